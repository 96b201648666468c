"""What the lookups would have had accepted on exactly these outputs, and what that is worth.

The proposers really run, on the recorded tokens, and copy from the request itself: what a cache of
earlier answers would add depends on how alike the traffic is, which few prompts cannot show. A
request is then walked through at every k: the tokens a step brings and the drafts it verifies
follow from the table, and a step time turns them into a speedup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autospec.check.drafting_time import DraftingTime, drafting_time
from autospec.check.step_time import StepTime
from autospec.compiled import compiled
from autospec.proposers.settings import LOOKUP_DEFAULTS
from autospec.records import Float64Array, Int16Array, Int64Array
from autospec.replay.cost_file import CostFile, LookupSeconds, StepSeconds
from autospec.replay.fixed_arms import AcceptanceTable, tabulate
from autospec.replay.trace import TraceRequest

KS = (1, 2, 3, 4, 6, 8, 12, 16)
LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_LOAD = 512

_LOOKUPS = ("ngram", "suffix")
_RESAMPLES = 400
_SEED = 0

_TABLES = CostFile(
    shape="packed",
    step=StepSeconds(fixed_seconds=1.0, per_token_seconds=0.0),
    proposers={name: LookupSeconds(kind="lookup", max_k=max(KS)) for name in _LOOKUPS},
)
"""``tabulate`` takes from a cost file which proposers there are and how far they draft."""


@dataclass(frozen=True, slots=True)
class Walks:
    """Every request decoded at every k by one proposer, from its first token to its last.

    ``next_right`` is the share of output positions at which the first drafted token was right.
    """

    proposer: str
    workloads: tuple[str, ...]  # [r]
    context_tokens: Float64Array  # [r] mean over the output
    steps: Int64Array  # [r, k]
    verified: Int64Array  # [r, k]
    tokens: Int64Array  # [r]
    next_right: Float64Array  # [r]
    time: DraftingTime

    def rows(self, workload: str | None) -> Int64Array:
        """The requests of a workload, or all of them."""
        if workload is None:
            return np.arange(len(self.workloads))
        return np.flatnonzero(np.array([each == workload for each in self.workloads]))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """One proposer at one k on some requests, as sums over them."""

    proposer: str
    k: int
    tokens_per_step: float
    verified_per_step: float

    @property
    def accepted_share(self) -> float:
        """Accepted over verified drafts, 0 without any."""
        if self.verified_per_step <= 0.0:
            return 0.0
        return (self.tokens_per_step - 1.0) / self.verified_per_step


@dataclass(frozen=True, slots=True)
class Speedup:
    """The best choice at a number of running requests, over plain decoding.

    ``low`` and ``high`` are the 90 % interval over the requests (bootstrap), ``cautious`` the lower
    quartile, by which it was chosen and by which it ``pays`` or not. All are at the dearer price of
    a verified token, where two are known; ``at_best`` is at the cheaper one.
    """

    running: int
    proposer: str
    k: int
    speedup: float
    low: float
    high: float
    cautious: float
    pays: bool
    at_best: float | None = None


def walk(requests: Sequence[TraceRequest]) -> tuple[Walks, ...]:
    """Every lookup over all the requests, in their order."""
    return tuple(_walked(requests, proposer) for proposer in _LOOKUPS)


def _walked(requests: Sequence[TraceRequest], proposer: str) -> Walks:
    settings = LOOKUP_DEFAULTS[proposer].model_copy(update={"max_k": max(KS)})
    table: AcceptanceTable = tabulate(requests, _TABLES, proposer, settings)
    outputs = np.array([len(each.output_token_ids) for each in requests], dtype=np.int64)
    prompts = np.array([len(each.prompt_token_ids) for each in requests], dtype=np.float64)
    steps = np.zeros((len(requests), len(KS)), dtype=np.int64)
    verified = np.zeros_like(steps)
    _walk(table.drafted, table.correct, outputs, np.array(KS, dtype=np.int64), steps, verified)
    return Walks(
        proposer,
        tuple(each.workload or "default" for each in requests),
        prompts + outputs / 2.0,
        steps,
        verified,
        outputs,
        (table.correct > 0).sum(axis=1) / outputs,
        drafting_time(requests, proposer, settings),
    )


@compiled
def _walk(
    drafted: Int16Array,
    correct: Int16Array,
    outputs: Int64Array,
    ks: Int64Array,
    steps: Int64Array,
    verified: Int64Array,
) -> None:
    """Steps and verified drafts [r, k] of each request by itself."""
    for r in range(outputs.shape[0]):
        for c in range(ks.shape[0]):
            at = 0
            while at < outputs[r]:
                left = outputs[r] - at
                draft = min(ks[c], min(int(drafted[r, at]), left - 1))
                at += min(min(draft, int(correct[r, at])) + 1, left)
                verified[r, c] += draft
                steps[r, c] += 1


def acceptance(walks: Walks, workload: str | None = None) -> tuple[Acceptance, ...]:
    """At every k."""
    rows = walks.rows(workload)
    steps = walks.steps[rows].sum(axis=0)
    return tuple(
        Acceptance(
            walks.proposer,
            k,
            float(walks.tokens[rows].sum() / steps[c]),
            float(walks.verified[rows, c].sum() / steps[c]),
        )
        for c, k in enumerate(KS)
    )


def repetitiveness(walks: Sequence[Walks], workload: str | None = None) -> float:
    """Share of output tokens that the better lookup would have drafted right."""
    shares = []
    for each in walks:
        rows = each.rows(workload)
        shares.append(float(np.average(each.next_right[rows], weights=each.tokens[rows])))
    return max(shares)


@dataclass(frozen=True, slots=True)
class _Brought:
    """What one proposer brings per step of a request at every k, over some requests.

    ``cautious`` tokens are the lower quartile over the requests (bootstrap): the best of many
    choices is partly the luckiest. ``drawn`` and ``drawn_verified`` are the bootstrap itself.
    """

    proposer: str
    time: DraftingTime
    context_tokens: float
    tokens: Float64Array  # [k]
    verified: Float64Array  # [k]
    cautious: Float64Array  # [k]
    drawn: Float64Array  # [draws, k]
    drawn_verified: Float64Array  # [draws, k]


def _brought(walks: Walks, workload: str | None) -> _Brought:
    rows = walks.rows(workload)
    tokens, steps, verified = walks.tokens[rows], walks.steps[rows], walks.verified[rows]
    draws = np.random.default_rng(_SEED).multinomial(
        len(rows), np.full(len(rows), 1.0 / len(rows)), _RESAMPLES
    )
    drawn_steps = draws @ steps
    drawn = (draws @ tokens)[:, None] / drawn_steps
    total = steps.sum(axis=0)
    return _Brought(
        walks.proposer,
        walks.time,
        float(np.average(walks.context_tokens[rows], weights=tokens)),
        tokens.sum() / total,
        verified.sum(axis=0) / total,
        np.percentile(drawn, 25.0, axis=0),
        drawn,
        draws @ verified / drawn_steps,
    )


def speedups(
    walks: Sequence[Walks],
    time: StepTime,
    loads: Sequence[int] = LOADS,
    workload: str | None = None,
) -> tuple[Speedup, ...]:
    """The best fixed choice at each load that anything is known about.

    All requests draft alike: n running requests take T(n (1 + verified)) for n x tokens, against
    T(n) for n. It is the limit of the closed loop for many requests.
    """
    every = [_brought(each, workload) for each in walks]
    best_time = time.at_best
    found = []
    for running in loads:
        chosen = _best_choice(every, running, time)
        if chosen is None:
            break
        brought, c, cautious = chosen
        ratios = [
            ratio
            for tokens, verified in zip(
                brought.drawn[:, c].tolist(), brought.drawn_verified[:, c].tolist(), strict=True
            )
            if (ratio := _ratio(brought, tokens, verified, running, time)) > 0.0
        ]
        low, high = np.percentile(ratios or [0.0], (5, 95)).tolist()
        tokens, verified = float(brought.tokens[c]), float(brought.verified[c])
        found.append(
            Speedup(
                running,
                brought.proposer,
                KS[c],
                _ratio(brought, tokens, verified, running, time),
                low,
                high,
                cautious,
                cautious >= time.least_gain,
                None
                if best_time is None
                else _ratio(brought, tokens, verified, running, best_time),
            )
        )
    return tuple(found)


def _best_choice(
    every: Sequence[_Brought], running: int, time: StepTime
) -> tuple[_Brought, int, float] | None:
    """The proposer, the place of its k, and the cautious speedup; None beyond what is known."""
    if running > time.most_running:
        return None
    ratio, index, c = max(
        (
            _ratio(each, float(each.cautious[c]), float(each.verified[c]), running, time),
            index,
            c,
        )
        for index, each in enumerate(every)
        for c in range(len(KS))
    )
    return (every[index], c, ratio) if ratio > 0.0 else None


def _ratio(
    brought: _Brought, tokens: float, verified: float, running: int, time: StepTime
) -> float:
    """0 where a step would be larger than anything that is known."""
    if running * (1.0 + verified) > time.most_tokens:
        return 0.0
    context = brought.context_tokens
    plain = time.seconds(running, 0.0, context)
    step = time.seconds(running, verified, context)
    share = time.lookup_share(brought.proposer)
    step += brought.time.seconds(running) if share is None else share * step
    return tokens * plain / step


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where speculation stops paying.

    ``off_from`` is the fewest running requests at which no choice is worth it, None if there is no
    such number up to ``known_to``, beyond which nothing is known.
    """

    off_from: int | None
    known_to: int


def crossover(walks: Sequence[Walks], time: StepTime) -> Crossover:
    """Load by load, for all requests together; by the cautious speedup."""
    every = [_brought(each, None) for each in walks]
    for running in range(1, MOST_LOAD + 1):
        chosen = _best_choice(every, running, time)
        if chosen is None:
            return Crossover(None, running - 1)
        if chosen[2] < time.least_gain:
            return Crossover(running, running)
    return Crossover(None, MOST_LOAD)
