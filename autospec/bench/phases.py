"""A measurement's plan and its arithmetic: phases of blocks, served by all the arms in turn.

A phase is one load and some workloads. Its rounds serve one block of requests each; within a round
every arm serves the same block, a few steps at a time in turn with the others (``turns``), so that
whatever slows the machine down hits all of them alike. Ratios of arms are taken within a round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from autospec.errors import InputError
from autospec.prompts import Prompt

PLAIN = "plain"
ADAPTIVE = "adaptive"
_MOST_NAMED = 4
OFF = "off"
"""Who drafted for a request in a step without drafts."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One load over some workloads; ``requests`` and ``max_tokens`` are per block."""

    load: int
    workloads: tuple[str, ...]
    requests: int
    max_tokens: int
    rounds: int = 1

    @property
    def workload(self) -> str:
        """The workloads in a few words, as reported."""
        if len(self.workloads) > _MOST_NAMED:
            return f"mix of {len(self.workloads)}"
        return "+".join(self.workloads)


@dataclass(frozen=True, slots=True)
class Block:
    """What every arm serves in one round of a phase."""

    phase: int
    round: int
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Who drafted for one request in one step, and how many tokens were verified."""

    proposer: str
    k: int


@dataclass(frozen=True, slots=True)
class BlockResult:
    """One arm's run over one block. ``request_steps`` are decoding steps, summed over requests, and
    ``step_tokens`` what they committed; the first token of a request comes from its prompt.
    ``equal_outputs`` of the ``requests`` are plain decoding's, None where nobody compared them.
    ``disturbed`` counts blocks during which other processes took processor time."""

    tokens: int
    seconds: float
    step_tokens: int
    request_steps: int
    drafted: int = 0
    accepted: int = 0
    choices: Mapping[Choice, int] = field(default_factory=dict)
    equal_outputs: int | None = None
    requests: int = 0
    disturbed: int = 0


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes over rounds."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread | None:
    """Median, least and greatest; None without values."""
    return Spread(median(values), min(values), max(values)) if values else None


def add_results(results: Iterable[BlockResult]) -> BlockResult:
    """Sums over blocks; ratios are to be taken of the sums, never averaged."""
    parts = list(results)
    equal = [part.equal_outputs for part in parts if part.equal_outputs is not None]
    choices: Counter[Choice] = Counter()
    for part in parts:
        choices.update(part.choices)
    return BlockResult(
        tokens=sum(part.tokens for part in parts),
        seconds=sum(part.seconds for part in parts),
        step_tokens=sum(part.step_tokens for part in parts),
        request_steps=sum(part.request_steps for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        choices=dict(choices),
        equal_outputs=sum(equal) if equal else None,
        requests=sum(part.requests for part in parts),
        disturbed=sum(part.disturbed for part in parts),
    )


def tokens_per_second(result: BlockResult) -> float | None:
    """Goodput; None where no time passed."""
    return result.tokens / result.seconds if result.seconds > 0.0 else None


def acceptance_length(result: BlockResult) -> float | None:
    """Tokens per request and decoding step; None without one."""
    return result.step_tokens / result.request_steps if result.request_steps else None


def shares(choices: Mapping[Choice, int]) -> dict[str, tuple[float, float]]:
    """Per proposer and for ``off``: share of the request steps, and mean k. Largest share first."""
    total = sum(choices.values())
    steps: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for choice, count in choices.items():
        steps[choice.proposer] += count
        tokens[choice.proposer] += choice.k * count
    return {name: (count / total, tokens[name] / count) for name, count in steps.most_common()}


@dataclass(frozen=True, slots=True)
class Measurement:
    """Every block's result by arm: ``results[arm][phase]`` is a list over the rounds done."""

    phases: tuple[Phase, ...]
    arms: tuple[str, ...]
    results: Mapping[str, tuple[list[BlockResult], ...]]

    @classmethod
    def empty(cls, phases: Sequence[Phase], arms: Sequence[str]) -> Measurement:
        """Nothing measured yet."""
        return cls(tuple(phases), tuple(arms), {arm: tuple([] for _ in phases) for arm in arms})

    def add_round(self, phase: int, results: Mapping[str, BlockResult]) -> None:
        """The next round of a phase, finished by every arm."""
        for arm in self.arms:
            self.results[arm][phase].append(results[arm])

    def sums(self, phase: int) -> dict[str, BlockResult]:
        """Sums of a phase by arm."""
        return {arm: add_results(self.results[arm][phase]) for arm in self.arms}

    def total(self) -> dict[str, BlockResult]:
        """Sums over all phases by arm."""
        phases = [self.sums(phase) for phase in range(len(self.phases))]
        return {arm: add_results(sums[arm] for sums in phases) for arm in self.arms}

    def ratios(self, arm: str, base: str, phase: int) -> tuple[float, ...]:
        """Goodput of ``arm`` over ``base``'s, for each round of a phase; () without ``base``."""
        if base not in self.results:
            return ()
        pairs = zip(self.results[arm][phase], self.results[base][phase], strict=True)
        speeds = [(tokens_per_second(mine), tokens_per_second(other)) for mine, other in pairs]
        return tuple(mine / other for mine, other in speeds if mine and other)


def plan_blocks(phases: Sequence[Phase], prompts: Sequence[Prompt]) -> tuple[Block, ...]:
    """Requests for every round: workloads take turns, and each goes round its own prompts.

    Raises InputError for a workload without prompts.
    """
    by_workload: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_workload.setdefault(prompt.workload, []).append(prompt)
    used: Counter[str] = Counter()
    blocks = []
    for index, phase in enumerate(phases):
        for name in phase.workloads:
            if name not in by_workload:
                raise InputError(
                    f"no prompts of workload {name!r}; there are {', '.join(by_workload)}"
                )
        turn = 0
        for round_index in range(phase.rounds):
            chosen = []
            for _ in range(phase.requests):
                name = phase.workloads[turn % len(phase.workloads)]
                turn += 1
                own = by_workload[name]
                chosen.append(own[used[name] % len(own)])
                used[name] += 1
            blocks.append(Block(index, round_index, tuple(chosen)))
    return tuple(blocks)


def staggered_tokens(max_tokens: int, index: int, phase: Phase) -> int:
    """The most tokens of request ``index`` of a block, so that requests do not run in step.

    Where some wait, the ``load`` that begin together end one after the other, as in a service that
    has been running for a while. In step, plain decoding would prefill in a few whole waves, and
    arms whose requests advance unevenly would not.
    """
    if phase.requests <= phase.load or index >= phase.load:
        return max_tokens
    return -(-max_tokens * (index + 1) // phase.load)


def arm_order(arms: Sequence[str], block: int) -> tuple[str, ...]:
    """The order in which arms serve a block: the one that goes first changes every time."""
    first = block % len(arms)
    return (*arms[first:], *arms[:first])


def report(measurement: Measurement) -> dict[str, Any]:
    """The measurement as JSON: ``phases`` and ``total``, every figure by arm."""
    phases = []
    for index, phase in enumerate(measurement.phases):
        sums = measurement.sums(index)
        phases.append(
            {
                "workload": phase.workload,
                "workloads": list(phase.workloads),
                "load": phase.load,
                "requests": phase.requests,
                "max_tokens": phase.max_tokens,
                "rounds": len(measurement.results[measurement.arms[0]][index]),
                "arms": {
                    arm: {
                        **_figures(sums[arm]),
                        "ratio_to_plain": _spread_json(measurement.ratios(arm, PLAIN, index)),
                        "rounds": [
                            {
                                "tokens": each.tokens,
                                "seconds": round(each.seconds, 4),
                                "disturbed": bool(each.disturbed),
                            }
                            for each in measurement.results[arm][index]
                        ],
                    }
                    for arm in measurement.arms
                },
            }
        )
    totals = measurement.total()
    plain = tokens_per_second(totals[PLAIN]) if PLAIN in totals else None
    total = {}
    for arm in measurement.arms:
        figures = _figures(totals[arm])
        speed = tokens_per_second(totals[arm])
        figures["ratio_to_plain"] = round(speed / plain, 4) if speed and plain else None
        total[arm] = figures
    return {"phases": phases, "total": total}


def _figures(result: BlockResult) -> dict[str, Any]:
    steps = sum(result.choices.values())
    ordered = sorted(result.choices.items(), key=lambda item: -item[1])
    return {
        "tokens": result.tokens,
        "seconds": round(result.seconds, 4),
        "tokens_per_second": _rounded(tokens_per_second(result)),
        "acceptance_length": _rounded(acceptance_length(result)),
        "drafted": result.drafted,
        "accepted": result.accepted,
        "requests": result.requests,
        "outputs_equal_to_plain": result.equal_outputs,
        "choices": [
            {"proposer": choice.proposer, "k": choice.k, "share": round(count / steps, 4)}
            for choice, count in ordered
        ],
    }


def _spread_json(values: Sequence[float]) -> dict[str, float] | None:
    found = spread(values)
    if found is None:
        return None
    return {
        "median": round(found.median, 4),
        "low": round(found.low, 4),
        "high": round(found.high, 4),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
