"""What a profile says about fixed choices: the rates and the step cost it holds, made usable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autospec.acceptance.hazards import BUCKET_OF, NUM_BUCKETS
from autospec.cost.coefficients import FIXED, KNOTS, SLOPES
from autospec.cost.step_cost import StepCost
from autospec.errors import ProfileError
from autospec.expectation import Choice, Expectation, Rates, mixed, rates_of_model
from autospec.octave import NUM_OCTAVES
from autospec.profile.learned import Profile, Statistics
from autospec.profile.tuned import ProposerSettings, WorkloadRates
from autospec.records import EngineInfo, Kind, ProposerInfo
from autospec.replay.cost_file import LOOKUPS

UNTUNED_CONTEXT_TOKENS = 512.0
"""Context of a request where the profile does not say: that of chat-like services."""

_LEAST_TRIALS = 30.0  # verified tokens at a depth before anything is said about it
_TRUST = 1.5  # how far beyond the largest step seen a price is believed
_MOST_REQUESTS = 512


@dataclass(frozen=True, slots=True)
class Outlook:
    """One workload's view, or that of all together. ``left_out`` says which proposers cannot be
    judged from this profile, and why. ``most_tokens`` is the largest step that the cost is known
    for, ``most_load`` the largest load that it was learned at."""

    expectation: Expectation
    proposers: tuple[ProposerInfo, ...]
    settings: Mapping[str, ProposerSettings]
    left_out: Mapping[str, str]
    most_tokens: float
    most_load: int

    def most_k(self, requests: int, proposer: str) -> int:
        """The largest k at a batch size that the profile can judge."""
        return min(self._fits(requests), self.expectation.rates[proposer].max_k)

    def best(self, requests: int, tolerance: float = 0.0) -> Choice:
        """The best fixed choice at a batch size, of those that the profile can judge."""
        return self.expectation.best(requests, self._fits(requests), tolerance)

    def _fits(self, requests: int) -> int:
        """Draft tokens of each request that the known steps have room for."""
        return max(0, int(self.most_tokens / requests) - 1)

    @property
    def most_requests(self) -> int:
        """The largest batch in which anybody could draft a token, as far as is known."""
        return max(1, min(_MOST_REQUESTS, int(self.most_tokens / 2)))


def outlook(profile: Profile, workload: str | None = None) -> Outlook:
    """The outlook of one workload, None for the mix that the profile was learned on.

    Raises ProfileError for an unknown workload, or when step cost or all rates are missing.
    """
    tuned = profile.tuned
    known = profile.workloads if tuned is None else tuned.workloads
    names = sorted(known) if workload is None else [workload]
    if workload is not None and workload not in known:
        listed = ", ".join(sorted(known)) or "none"
        raise ProfileError(f"--workload: the profile has no workload {workload!r}; it has {listed}")
    infos = _proposers(profile)
    left_out: dict[str, str] = {}
    rates: dict[str, Rates] = {}
    for info in infos:
        found, weights = _rates(profile, names, info)
        if found:
            rates[info.name] = mixed(found, weights)
        elif tuned is None and info.kind == "lookup":
            left_out[info.name] = (
                "how often it has a draft is not known: the profile was learned while serving; "
                "`autospec tune` measures it"
            )
        else:
            left_out[info.name] = "it was hardly ever verified"
    if not rates:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ProfileError(f"the profile says too little about its proposers: {reasons or 'none'}")
    step = profile.cost.get("step")
    if step is None or step["reference"][3] <= 0:
        raise ProfileError("the profile holds no step cost; serve with it longer, or tune it")
    engine = EngineInfo(
        profile.identity.target,
        profile.identity.engine,
        profile.identity.version,
        profile.identity.device,
        profile.identity.dtype,
        "packed" if tuned is None else tuned.shape,
        () if tuned is None else tuned.captured_sizes,
    )
    return Outlook(
        Expectation(_step_cost(step, infos, engine), infos, rates, _context(profile, names)),
        infos,
        {} if tuned is None else tuned.proposers,
        left_out,
        _TRUST * _most_tokens(step),
        _most_load(step),
    )


def _proposers(profile: Profile) -> tuple[ProposerInfo, ...]:
    if profile.tuned is not None:
        return tuple(
            ProposerInfo(name, settings.kind, settings.max_k)
            for name, settings in sorted(profile.tuned.proposers.items())
        )
    return tuple(
        ProposerInfo(name, _kind(name), len(BUCKET_OF)) for name in profile.identity.proposers
    )


def _kind(name: str) -> Kind:
    """Of a proposer in an untuned profile, which holds its name alone."""
    return "lookup" if name in LOOKUPS else "sequential"


def _rates(
    profile: Profile, names: list[str], info: ProposerInfo
) -> tuple[dict[str, Rates], dict[str, float]]:
    """Rates and weights by workload: measured ones, else those of models from their counts."""
    found: dict[str, Rates] = {}
    weights: dict[str, float] = {}
    for name in names:
        if profile.tuned is not None:
            measured: WorkloadRates = profile.tuned.workloads[name]
            rates = measured.proposers.get(info.name)
            if rates is not None and rates.accepted:
                found[name] = Rates(
                    np.array(rates.drafting), np.array(rates.drafted), np.array(rates.accepted)
                )
                weights[name] = float(measured.tokens)
            continue
        counts = profile.workloads[name].proposers.get(info.name)
        if counts is None or info.kind == "lookup":
            continue
        hazards = _hazards(counts)
        if len(hazards):
            found[name] = rates_of_model(hazards)
            weights[name] = max(profile.workloads[name].requests, 1e-9)
    return found, weights


def _hazards(counts: Statistics) -> np.ndarray:
    """P(position j is accepted | those before were) [k], as deep as enough was verified."""
    successes, trials = counts["successes"].sum(axis=1), counts["trials"].sum(axis=1)
    known = [
        bool(trials[bucket] >= _LEAST_TRIALS) for bucket in range(min(NUM_BUCKETS, len(trials)))
    ]
    hazards = []
    for bucket in BUCKET_OF.tolist():
        if bucket == NUM_BUCKETS - 1 or not known[bucket]:  # the last bucket has no end
            break
        hazards.append(successes[bucket] / trials[bucket])
    return np.array(hazards)


def _context(profile: Profile, names: list[str]) -> float:
    if profile.tuned is None:
        return UNTUNED_CONTEXT_TOKENS
    parts = [profile.tuned.workloads[name] for name in names]
    total = sum(part.tokens for part in parts)
    return sum(part.context_tokens * part.tokens for part in parts) / max(total, 1)


def _step_cost(step: Statistics, infos: tuple[ProposerInfo, ...], engine: EngineInfo) -> StepCost:
    model = StepCost(infos, engine)
    wanted, found = model.take_fresh()["gram"].shape, step["gram"].shape
    if wanted != found:
        raise ProfileError(
            f"the profile's step cost has sums of shape {found}, expected {wanted} for proposers "
            f"{', '.join(info.name for info in infos)}; tune it anew"
        )
    model.load(step)
    return model


def _most_tokens(step: Statistics) -> float:
    """A lower bound of the most paid tokens of a step that was seen.

    The mean, weighted by itself, of the tokens beyond the last knot that was passed.
    """
    gram = step["gram"][: 2 * NUM_OCTAVES].sum(axis=0)
    for segment in range(len(KNOTS) - 1, -1, -1):
        passed = float(gram[FIXED, SLOPES + segment])
        if passed > 0.0:
            return float(KNOTS[segment]) + float(gram[SLOPES + segment, SLOPES + segment]) / passed
    return 1.0


def _most_load(step: Statistics) -> int:
    """The upper end of the highest octave of load in which a step was seen."""
    weight = step["weight"][: 2 * NUM_OCTAVES].reshape(2, NUM_OCTAVES).sum(axis=0)
    seen = np.flatnonzero(weight > 0)
    return 1 << int(seen.max()) if len(seen) else 1
