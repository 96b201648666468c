"""Whether lookups are worth their own time, seldom as that is in doubt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autospec.compiled import compiled_brief
from autospec.policy.promise import ADVANTAGE, ALONE
from autospec.records import Float64Array, Int16Array, Int64Array

_WINDOW_STEPS = 128.0
_STEP_ROWS = 20.0  # requests that make a step count for one; more tell as much in fewer steps
_MOST_WEIGHT = 8.0
_LOOK_STEPS = 32
_FIRST_PAUSE_STEPS = 64
_MAX_PAUSE_STEPS = 512


class GateArrays(NamedTuple):
    """What is known of each proposer [p]; only the ``lookup`` ones are judged.

    ``realized`` is the last step's advantage, ``balance`` the running mean of advantage minus cost
    in tokens per step, ``spread`` its mean square deviation, ``alone`` the running mean of the
    worth without the others minus cost, of steps in which all offer: which one is the better is
    told by these. ``seen`` is how much it was watched, ``pause`` the steps left of one.
    """

    lookup: NDArray[np.bool_]
    is_open: NDArray[np.bool_]
    realized: Float64Array
    balance: Float64Array
    alone: Float64Array
    spread: Float64Array
    seen: Float64Array
    pause: Int64Array
    next_pause: Int64Array


@compiled_brief
def note_offers(
    gate: GateArrays,
    proposer: Int16Array,
    accepted: Int16Array,
    matched: Int16Array,
    promised: Float64Array,
    seconds: Float64Array,
    tokens_per_second: float,
) -> bool:
    """The step is over, which took each proposer its ``seconds`` [p] and had ``promised`` [4, p];
    True when a lookup can be judged.

    Realized are the tokens that a lookup brought beyond the best other one's offer for the row. The
    pauses go by.
    """
    lookup, realized = gate.lookup, gate.realized
    weight = step_weight(proposer.shape[0])
    realized[:] = 0.0
    for i in range(proposer.shape[0]):
        p = proposer[i]
        if p >= 0 and lookup[p]:
            other = 0
            for q in range(lookup.shape[0]):
                if q != p and lookup[q]:
                    other = max(other, matched[q, i])
            realized[p] += accepted[i] - other
    all_offer = True
    for p in range(lookup.shape[0]):
        all_offer = all_offer and gate.is_open[p] == lookup[p]
    rate = weight / _WINDOW_STEPS
    ripe = False
    for p in range(lookup.shape[0]):
        if gate.is_open[p]:
            cost = seconds[p] * tokens_per_second
            gain = min(promised[ADVANTAGE, p], realized[p]) - cost
            if all_offer:
                gate.alone[p] += (promised[ALONE, p] - cost - gate.alone[p]) * rate
            gate.spread[p] += ((gain - gate.balance[p]) ** 2 - gate.spread[p]) * rate
            gate.balance[p] += (gain - gate.balance[p]) * rate
            gate.seen[p] += weight
            ripe = ripe or gate.seen[p] >= _WINDOW_STEPS
        elif lookup[p]:
            gate.pause[p] -= 1
            if gate.pause[p] <= 0:
                gate.is_open[p] = True
                gate.seen[p] = _WINDOW_STEPS - _LOOK_STEPS
                gate.balance[p] = 0.0
    return ripe


@compiled_brief
def step_weight(requests: int) -> float:
    """What a step counts for."""
    return min(max(1.0, requests / _STEP_ROWS), _MOST_WEIGHT)


class OfferGate:
    """Pauses a lookup whose drafts bring less than it takes; looks again after growing pauses.

    Its advantage is what the batch would lose without it, the other proposers still there: the
    smaller of what was expected and what came of it. (What was expected alone is too kind, since
    the proposer with the luckiest estimate is the one that is chosen.) Beside another lookup it
    must pay by a standard error: of two that draft alike one is paused, never both in one step.
    """

    def __init__(self, lookup: NDArray[np.bool_]) -> None:
        values = np.zeros((5, len(lookup)))
        pauses = np.zeros((2, len(lookup)), dtype=np.int64)
        pauses[1] = _FIRST_PAUSE_STEPS
        self.arrays = GateArrays(lookup, lookup.copy(), *values, *pauses)

    def judge(self, requests: int) -> None:
        """Pause one of the lookups that were watched for long enough, if any does not pay.

        Of several it is never the one that is worth most alone, whichever does not pay beside the
        others: of two that propose the same, the one goes whose confidence tells less of what will
        be accepted, also where it was here first. The other one takes its place.
        """
        gate = self.arrays
        ripe = gate.is_open & (gate.seen >= _WINDOW_STEPS)
        gate.seen[ripe] = _WINDOW_STEPS - _LOOK_STEPS
        is_alone = np.count_nonzero(gate.is_open) == 1
        variance = gate.spread * step_weight(requests) / (2.0 * _WINDOW_STEPS)
        failing = ripe & (gate.balance < (0.0 if is_alone else np.sqrt(variance)))
        gate.next_pause[ripe & ~failing] = _FIRST_PAUSE_STEPS
        if not failing.any():
            return
        best = int(np.argmax(np.where(gate.is_open, gate.alone, -np.inf)))
        others = ripe & (np.arange(len(ripe)) != best)
        losing = failing if is_alone else failing & others if (failing & others).any() else others
        if losing.any():
            self._pause(int(np.argmin(np.where(losing, gate.alone, np.inf))), best)

    def _pause(self, worst: int, best: int) -> None:
        """Pause one lookup; ``best`` brings what it brought."""
        gate = self.arrays
        gate.is_open[worst] = False
        gate.pause[worst] = gate.next_pause[worst]
        gate.next_pause[worst] = min(_MAX_PAUSE_STEPS, 2 * gate.next_pause[worst])
        gate.balance[best] = max(gate.balance[best], gate.balance[worst])

    def end_pauses(self) -> None:
        """Look at every lookup again from the next step on."""
        self.arrays.pause[:] = 0

    def state(self) -> Mapping[str, Any]:
        """Everything, as JSON."""
        gate = self.arrays
        return {
            "balance": gate.balance.tolist(),
            "alone": gate.alone.tolist(),
            "spread": gate.spread.tolist(),
            "seen": gate.seen.tolist(),
            "pause": gate.pause.tolist(),
            "next_pause": gate.next_pause.tolist(),
            "open": gate.is_open.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        gate = self.arrays
        gate.is_open[:] = state["open"]
        for name in ("balance", "alone", "spread", "seen", "pause", "next_pause"):
            getattr(gate, name)[:] = state[name]
