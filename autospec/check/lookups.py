"""What the lookups would have had accepted on exactly these outputs, and what that is worth.

The proposers really run, on the recorded tokens, in the order in which the requests ended (see
``fixed_arms.tabulate``). A request is then walked through at every k: the tokens a step brings and
the drafts it verifies follow from the table, and a step time turns them into a speedup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autospec.check.step_time import StepTime
from autospec.compiled import compiled
from autospec.cost_file import CostFile, LookupSeconds, StepSeconds
from autospec.fixed_arms import AcceptanceTable, tabulate
from autospec.records import Float64Array, Int16Array, Int64Array
from autospec.trace import TraceRequest

KS = (1, 2, 3, 4, 6, 8, 12, 16)
LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PAYS = 1.1
"""A smaller speedup is not worth it: drafting also costs what cannot be seen from outside."""

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

    ``low`` and ``high`` are the 90 % interval over the requests (bootstrap).
    """

    running: int
    proposer: str
    k: int
    speedup: float
    low: float
    high: float


def walk(requests: Sequence[TraceRequest]) -> tuple[Walks, ...]:
    """Every lookup over all the requests, in their order."""
    return tuple(_walked(requests, proposer) for proposer in _LOOKUPS)


def _walked(requests: Sequence[TraceRequest], proposer: str) -> Walks:
    table: AcceptanceTable = tabulate(requests, _TABLES, proposer)
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
    found = []
    for running in loads:
        if running > time.most_tokens:
            break
        best = max(
            (
                (_ratio(each, each.rows(workload), c, running, time), index, c)
                for index, each in enumerate(walks)
                for c in range(len(KS))
            ),
            default=None,
        )
        if best is None or best[0] <= 0.0:
            continue
        ratio, index, c = best
        chosen = walks[index]
        low, high = _interval(chosen, chosen.rows(workload), c, running, time)
        found.append(Speedup(running, chosen.proposer, KS[c], ratio, low, high))
    return tuple(found)


def _ratio(walks: Walks, rows: Int64Array, c: int, running: int, time: StepTime) -> float:
    """0 where a step would be larger than anything that is known."""
    steps = walks.steps[rows, c].sum()
    verified = float(walks.verified[rows, c].sum() / steps)
    if running * (1.0 + verified) > time.most_tokens:
        return 0.0
    context = float(np.average(walks.context_tokens[rows], weights=walks.tokens[rows]))
    plain = time.seconds(running, 0.0, context)
    step = time.seconds(running, verified, context) * (1.0 + time.lookup_share(walks.proposer))
    return float(walks.tokens[rows].sum() / steps) * plain / step


def _interval(
    walks: Walks, rows: Int64Array, c: int, running: int, time: StepTime
) -> tuple[float, float]:
    rng = np.random.default_rng(_SEED)
    ratios = [
        _ratio(walks, rng.choice(rows, len(rows)), c, running, time) for _ in range(_RESAMPLES)
    ]
    low, high = np.percentile([each for each in ratios if each > 0.0] or [0.0], (5, 95))
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where speculation stops paying.

    ``off_from`` is the fewest running requests at which no choice is worth it, None if there is no
    such number up to ``known_to``, beyond which nothing is known.
    """

    off_from: int | None
    known_to: int


def crossover(walks: Sequence[Walks], time: StepTime) -> Crossover:
    """Load by load, for all requests together."""
    running = 1
    while running <= min(MOST_LOAD, time.most_tokens):
        best = max(
            _ratio(each, each.rows(None), c, running, time)
            for each in walks
            for c in range(len(KS))
        )
        if best <= 0.0:
            break
        if best < PAYS:
            return Crossover(running, running)
        running += 1
    return Crossover(None, running - 1)
