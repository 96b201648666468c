"""Whether lookups are worth their own time, seldom as that is in doubt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autospec.compiled import compiled
from autospec.records import Float64Array, Int16Array

_WINDOW_STEPS = 128.0
_STEP_ROWS = 20.0  # requests that make a step count for one; more tell as much in fewer steps
_MOST_WEIGHT = 8.0
_LOOK_STEPS = 32
_FIRST_PAUSE_STEPS = 64
_MAX_PAUSE_STEPS = 512


@compiled
def _weigh(
    proposer: Int16Array,
    accepted: Int16Array,
    matched: Int16Array,
    lookup: NDArray[np.bool_],
    expected: Float64Array,
    cost: Float64Array,
    weight: float,
    is_open: NDArray[np.bool_],
    realized: Float64Array,
    balance: Float64Array,
    spread: Float64Array,
    seen: Float64Array,
) -> tuple[bool, bool]:
    """Move the balances of the open lookups; returns (any of them is ripe, any is paused).

    Realized are the tokens that a lookup brought beyond the best other one's offer for the row.
    """
    realized[:] = 0.0
    for i in range(proposer.shape[0]):
        p = proposer[i]
        if p >= 0 and lookup[p]:
            other = 0
            for q in range(lookup.shape[0]):
                if q != p and lookup[q]:
                    other = max(other, matched[q, i])
            realized[p] += accepted[i] - other
    ripe = False
    paused = False
    for p in range(lookup.shape[0]):
        if is_open[p]:
            gain = min(expected[p], realized[p]) - cost[p]
            rate = weight / _WINDOW_STEPS
            spread[p] += ((gain - balance[p]) ** 2 - spread[p]) * rate
            balance[p] += (gain - balance[p]) * rate
            seen[p] += weight
            ripe = ripe or seen[p] >= _WINDOW_STEPS
        elif lookup[p]:
            paused = True
    return ripe, paused


class OfferGate:
    """Pauses a lookup whose drafts bring less than it takes; looks again after growing pauses.

    Its advantage is what the batch would lose without it, the other proposers still there: the
    smaller of what was expected and what came of it. (What was expected alone is too kind, since
    the proposer with the luckiest estimate is the one that is chosen.) Beside another lookup it
    must pay by a standard error: of two that draft alike one is paused, never both in one step.
    """

    def __init__(self, lookup: NDArray[np.bool_]) -> None:
        self._lookup = lookup
        self._expected = np.zeros(len(lookup))
        self._realized = np.zeros(len(lookup))
        count = len(lookup)
        self._balance = np.zeros(count)  # advantage minus cost, tokens per step, running mean
        self._alone = np.zeros(count)  # worth without the others, running mean
        self._spread = np.zeros(count)  # its mean square deviation
        self._seen = np.zeros(count)
        self._pause = np.zeros(count, dtype=np.int64)
        self._next_pause = np.full(count, _FIRST_PAUSE_STEPS, dtype=np.int64)
        self._open = lookup.copy()
        self._weight = 1.0  # of a step

    def open(self) -> NDArray[np.bool_]:
        """Which lookups should draft for the next plan [p]."""
        opened: NDArray[np.bool_] = self._open
        return opened

    def expect(self, advantage: Float64Array, alone: Float64Array) -> None:
        """A step was planned: ``advantage`` and worth ``alone`` [p] in expected tokens."""
        self._expected[:] = advantage
        self._alone += (alone - self._alone) / _WINDOW_STEPS

    def note(
        self,
        proposer: Int16Array,  # [n]
        accepted: Int16Array,  # [n]
        matched: Int16Array,  # [p, n]
        cost: Float64Array,  # [p]
    ) -> None:
        """The step is over; ``cost`` is each proposer's time in tokens at the going rate."""
        is_open = self._open
        self._weight = min(max(1.0, len(proposer) / _STEP_ROWS), _MOST_WEIGHT)
        is_ripe, is_paused = _weigh(
            proposer, accepted, matched, self._lookup, self._expected, cost, self._weight,
            is_open, self._realized, self._balance, self._spread, self._seen,
        )  # fmt: skip
        if is_paused:
            self._pause[self._lookup & ~is_open] -= 1
            for p in np.flatnonzero(self._lookup & ~is_open & (self._pause <= 0)):
                self._open[p] = True
                self._seen[p] = _WINDOW_STEPS - _LOOK_STEPS
                self._balance[p] = 0.0
        if is_ripe:
            self._judge()

    def _judge(self) -> None:
        """Pause one of the lookups that were watched for long enough and do not pay, if any.

        Of several it is the one that would be worth least alone: of two that propose the same,
        the one whose confidence tells less of what will be accepted.
        """
        ripe = self._open & (self._seen >= _WINDOW_STEPS)
        self._seen[ripe] = _WINDOW_STEPS - _LOOK_STEPS
        is_alone = np.count_nonzero(self._open) == 1
        error = 0.0 if is_alone else np.sqrt(self._spread * self._weight / (2.0 * _WINDOW_STEPS))
        failing = ripe & (self._balance < error)
        self._next_pause[ripe & ~failing] = _FIRST_PAUSE_STEPS
        if failing.any():
            worst = int(np.argmin(np.where(failing, self._alone, np.inf)))
            self._open[worst] = False
            self._pause[worst] = self._next_pause[worst]
            self._next_pause[worst] = min(_MAX_PAUSE_STEPS, 2 * self._next_pause[worst])

    def state(self) -> Mapping[str, Any]:
        """Everything, as JSON."""
        return {
            "balance": self._balance.tolist(),
            "alone": self._alone.tolist(),
            "spread": self._spread.tolist(),
            "seen": self._seen.tolist(),
            "pause": self._pause.tolist(),
            "next_pause": self._next_pause.tolist(),
            "open": self._open.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self._balance = np.array(state["balance"])
        self._alone = np.array(state["alone"])
        self._spread = np.array(state["spread"])
        self._seen = np.array(state["seen"])
        self._pause = np.array(state["pause"], dtype=np.int64)
        self._next_pause = np.array(state["next_pause"], dtype=np.int64)
        self._open = np.array(state["open"], dtype=np.bool_)
