"""Profiles with known rates and a known step time, for exporters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autospec.acceptance import hazard_table
from autospec.acceptance.hazards import NUM_BINS, NUM_BUCKETS
from autospec.cost import step_cost
from autospec.cost.step_cost import StepCost, StepLoad
from autospec.profile.learned import Identity, Profile, Statistics, WorkloadProfile
from autospec.profile.tuned import DraftRates, ProposerSettings, Provenance, Tuning, WorkloadRates
from autospec.records import EngineInfo, ProposerInfo

FIXED, PER_TOKEN, PER_DEPTH = 10e-3, 0.5e-3, 1e-3
ENGINE = EngineInfo("target", "embedded", "1", "cpu", "float32")
SETTINGS = {
    "ngram": ProposerSettings(kind="lookup", max_k=8, min_match=3, max_match=5),
    "suffix": ProposerSettings(
        kind="lookup", max_k=16, min_match=2, max_match=32, max_walk=64, cache_tokens=0
    ),
    "eagle3": ProposerSettings(kind="sequential", max_k=6, min_confidence=0.2),
    "draft_model": ProposerSettings(kind="sequential", max_k=6, min_confidence=0.2),
    "mtp": ProposerSettings(kind="sequential", max_k=6),
}


def step_statistics(proposers: Sequence[ProposerInfo]) -> Statistics:
    """Of an engine that takes FIXED + PER_TOKEN a token (+ PER_DEPTH a draft of a model)."""
    model = StepCost(proposers, ENGINE)
    models = [p for p, info in enumerate(proposers) if info.kind != "lookup"]
    for _ in range(6):
        for requests in (1, 2, 4, 8, 16, 32):
            for k in (0, 1, 3, 7):
                depth, draft_tokens, none = np.zeros((3, len(proposers)))
                parts = np.zeros(len(proposers))
                if k and models:
                    depth[models[0]], draft_tokens[models[0]] = k, k * requests
                    parts[models[0]] = PER_DEPTH * k
                tokens = requests * (1 + k)
                seconds = FIXED + PER_TOKEN * tokens + float(parts.sum())
                load = StepLoad(tokens, requests, 100 * requests, k > 0, depth, draft_tokens, none)
                model.observe(load, seconds, parts)
    return model.take_fresh()


def rates(share: float, hazard: float, depth: int) -> DraftRates:
    """A draft in that share of steps, each of its tokens right with ``hazard``."""
    sums = [sum(hazard ** (j + 1) for j in range(k)) for k in range(1, depth + 1)]
    return DraftRates(
        drafting=(share,) * depth,
        drafted=tuple(share * k for k in range(1, depth + 1)),
        accepted=tuple(share * each for each in sums),
    )


def tuned_profile(workloads: Mapping[str, Mapping[str, DraftRates]]) -> Profile:
    """A tuned profile with these rates by workload and proposer."""
    names = sorted({name for parts in workloads.values() for name in parts})
    settings = {name: SETTINGS[name] for name in names}
    infos = [ProposerInfo(name, each.kind, each.max_k) for name, each in settings.items()]
    return Profile(
        identity=Identity.of(ENGINE, tuple(infos)),
        acceptance_layout=hazard_table.LAYOUT,
        cost_layout=step_cost.LAYOUT,
        workloads={label: WorkloadProfile(4.0) for label in workloads},
        cost={"step": step_statistics(infos)},
        provenance=("test",),
        updated=1_800_000_000.0,
        tuned=Tuning(
            proposers=settings,
            kept=True,
            workloads={
                label: WorkloadRates(
                    requests=4, tokens=400, context_tokens=100.0, proposers=dict(parts)
                )
                for label, parts in workloads.items()
            },
            loads=(),
            crossover=None,
            provenance=Provenance(
                command="test",
                date="2026-11-29T00:00:00+00:00",
                engine="embedded",
                device="cpu",
                versions={},
                prompts="prompts.jsonl",
                prompts_digest="0" * 64,
                seed=0,
            ),
        ),
    )


def served_profile(proposers: Sequence[str], hazard: float) -> Profile:
    """What a controller saves: counts, no tuning."""
    trials = np.zeros((NUM_BUCKETS, NUM_BINS))
    trials[:5, 3] = 1000.0
    counts = {
        "successes": trials * hazard,
        "trials": trials,
        "draft_successes": trials * hazard,
        "draft_trials": trials,
    }
    infos = [
        ProposerInfo(name, "lookup" if name in ("ngram", "suffix") else "sequential", 8)
        for name in proposers
    ]
    return Profile(
        identity=Identity.of(ENGINE, tuple(infos)),
        acceptance_layout=hazard_table.LAYOUT,
        cost_layout=step_cost.LAYOUT,
        workloads={"chat": WorkloadProfile(8.0, dict.fromkeys(proposers, counts))},
        cost={"step": step_statistics(infos)},
        provenance=("test",),
        updated=1_800_000_000.0,
    )
