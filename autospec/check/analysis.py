"""From samples to what a check says: levels, lookups, speedups, verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autospec.check.lookups import (
    LOADS,
    Acceptance,
    Crossover,
    Speedup,
    Walks,
    acceptance,
    crossover,
    repetitiveness,
    speedups,
    walk,
)
from autospec.check.result import Sensitivity, StepTimeFacts, WorkloadFacts
from autospec.check.samples import Level, Sample
from autospec.check.step_time import StepTime
from autospec.check.verdict import Evidence, Verdict, decide
from autospec.replay.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Findings:
    """What the lookups would have brought, and the verdict."""

    verdict: Verdict
    workloads: tuple[WorkloadFacts, ...] = ()
    speedups: tuple[Speedup, ...] = ()
    crossover: Crossover | None = None
    step_time: StepTimeFacts | None = None


def traces(samples: Sequence[Sample]) -> tuple[TraceRequest, ...]:
    """Those whose tokens are known, in their order."""
    return tuple(
        TraceRequest(
            each.id,
            each.workload,
            np.array(each.prompt_token_ids, dtype=np.int32),
            np.array(each.output_token_ids, dtype=np.int32),
            {},
            each.temperature,
        )
        for each in samples
        if each.error is None and each.prompt_token_ids and each.output_token_ids
    )


def first_of_each(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Of prompts that were sent again and again the first answer; a copy of an own earlier answer
    is nothing that real traffic would bring."""
    seen: dict[str, Sample] = {}
    for each in sorted(samples, key=lambda sample: sample.end):
        if each.error is None:
            seen.setdefault(each.id, each)
    return tuple(seen.values())


def find(
    samples: Sequence[Sample],
    levels: Sequence[Level],
    lowest: Sequence[Sample],
    time: StepTime | None,
) -> Findings:
    """``samples`` are what lookups are tried on, ``lowest`` those of the lowest of the ``levels``,
    which come by rising rate."""
    requests = traces(samples)
    low, high = levels[0], levels[-1]
    loads = sorted({*LOADS, *(max(1, round(level.running)) for level in levels)})
    walks = walk(requests) if requests else ()
    workloads = tuple(
        _workload_facts(requests, walks, name, lowest, time, loads) for name in _names(requests)
    )
    found: tuple[Speedup, ...] = ()
    cross: Crossover | None = None
    best_cross: Crossover | None = None
    if walks and time is not None:
        found = speedups(walks, time, loads)
        cross = crossover(walks, time)
        best_cross = None if time.at_best is None else crossover(walks, time.at_best)
    by_load = {each.running: each for each in found}
    paying = [
        each
        for each in found
        if each.pays and (cross is None or cross.off_from is None or each.running < cross.off_from)
    ]
    verdict = decide(
        Evidence(
            output_tokens=float(np.mean([level.output_tokens for level in levels])),
            shares_low=low.shares,
            shares_high=high.shares,
            running_low=low.running,
            running_high=high.running,
            best_acceptance=_best(walks) if walks else None,
            crossover=cross if cross is None or cross.known_to else None,
            best_crossover=best_cross,
            at_low=by_load.get(max(1, round(low.running))),
            at_high=by_load.get(max(1, round(high.running))),
            at_one=by_load.get(1),
            largest_k=max((each.k for each in paying), default=0),
            best_workload=_best_workload(workloads, max(1, round(low.running))),
            speculates_already=_speculation(levels),
        )
    )
    return Findings(verdict, workloads, found, cross, _step_time_facts(time, requests, loads))


def sensitivity(temperature: float, top_p: float, samples: Sequence[Sample]) -> Sensitivity | None:
    """None where the tokens are not known."""
    requests = traces(first_of_each(samples))
    if not requests:
        return None
    return Sensitivity(temperature, top_p, len(requests), _best(walk(requests)))


def _names(requests: Sequence[TraceRequest]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.workload or "default" for each in requests))


def _workload_facts(
    requests: Sequence[TraceRequest],
    walks: Sequence[Walks],
    name: str,
    lowest: Sequence[Sample],
    time: StepTime | None,
    loads: Sequence[int],
) -> WorkloadFacts:
    own = [each for each in requests if (each.workload or "default") == name]
    seen = [each for each in lowest if each.workload == name and each.error is None]
    return WorkloadFacts(
        name,
        len(own),
        float(np.mean([len(each.prompt_token_ids) for each in own])),
        float(np.mean([len(each.output_token_ids) for each in own])),
        _median([each.ttft for each in seen]),
        _median([each.tpot for each in seen]),
        repetitiveness(walks, name),
        tuple(one for each in walks for one in acceptance(each, name)),
        () if time is None else speedups(walks, time, loads, name),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return float(np.median(known)) if known else None


def _best(walks: Sequence[Walks]) -> Acceptance:
    every = [one for each in walks for one in acceptance(each)]
    return max(every, key=lambda each: (each.tokens_per_step, -each.verified_per_step))


def _best_workload(workloads: Sequence[WorkloadFacts], running: int) -> tuple[str, Speedup] | None:
    """None for a single workload: it is the whole."""
    if len(workloads) < 2:
        return None
    for load in (running, 1):
        found = [
            (each.name, one)
            for each in workloads
            for one in each.speedups
            if one.running == load and one.pays
        ]
        if found:
            return max(found, key=lambda each: each[1].speedup)
    return None


def _speculation(levels: Sequence[Level]) -> float | None:
    told = [
        each.server.tokens_per_step
        for each in levels
        if each.server is not None and each.server.tokens_per_step is not None
    ]
    return float(np.mean(told)) if told else None


def _step_time_facts(
    time: StepTime | None, requests: Sequence[TraceRequest], loads: Sequence[int]
) -> StepTimeFacts | None:
    if time is None:
        return None
    context = 0.0
    if requests:
        context = float(
            np.mean(
                [len(each.prompt_token_ids) + len(each.output_token_ids) / 2 for each in requests]
            )
        )
    return StepTimeFacts(
        time.source,
        {n: time.seconds(n, 0.0, context) for n in loads if n <= time.most_tokens},
    )
