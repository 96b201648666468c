"""Two tokens more after a full success, one less otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autospec.policy.base import Decision, Outcome, Policy, PolicyOptions, View, plain
from autospec.policy.per_request import PerRequest
from autospec.records import NO_PROPOSER, Float64Array, Int16Array, ProposerInfo


class HeuristicOptions(PolicyOptions):
    """``transient`` is the schedule ``heuristic_transient``: every request starts at ``k``."""

    name: Literal["heuristic"] = "heuristic"
    proposer: Annotated[str, Field(description="who drafts")]
    k: Annotated[int, Field(ge=1, le=64, description="draft tokens of the first step")] = 20
    max_k: Annotated[
        int, Field(ge=1, le=64, description="most to grow to (transformers has no bound)")
    ] = 64
    transient: Annotated[
        bool, Field(description="start every request at k, not where the last one ended")
    ] = False


def next_k(k: Float64Array, verified: Int16Array, accepted: Int16Array, max_k: int) -> Float64Array:
    """+2 where all were accepted, else -1, within 1 and ``max_k``; the same without a draft."""
    moved = np.where(accepted == verified, np.minimum(k + 2.0, max_k), np.maximum(k - 1.0, 1.0))
    result: Float64Array = np.where(verified > 0, moved, k)
    return result


class Heuristic(Policy[HeuristicOptions]):
    """transformers' ``num_assistant_tokens_schedule="heuristic"`` (candidate_generator.py).

    There, one request runs at a time. Here each request has a k of its own; a new one starts at
    the k that the request which left last ended with, which at batch size 1 is the same.
    """

    def __init__(
        self,
        options: HeuristicOptions,
        proposers: Sequence[ProposerInfo],
        rng: np.random.Generator,
    ) -> None:
        super().__init__(options, proposers, rng)
        self._proposer = self.index_of(options.proposer)
        info = self.proposers[self._proposer] if self._proposer >= 0 else None
        self._max_k = max(1, min(options.max_k, info.max_k if info is not None else 1))
        self._start = np.array([float(min(options.k, self._max_k))])
        self._ks = PerRequest(1)

    def decide(self, view: View) -> Decision:
        """Each request's own k, as far as its limit allows."""
        if self._proposer == NO_PROPOSER:
            return plain(view.requests)
        if not self.options.transient:
            left = self._ks.left(view.handles)
            if len(left):
                self._start = left[-1]
        wanted = self._ks.align(view.handles, self._start)[:, 0]
        k = np.minimum(wanted, view.limits[self._proposer]).astype(np.int16)
        return Decision(np.where(k > 0, self._proposer, NO_PROPOSER).astype(np.int16), k)

    def learn(self, outcome: Outcome) -> None:
        """Move every k that was drafted with."""
        ks, rows = self._ks.of(outcome.handles)
        ks[:, 0] = next_k(ks[:, 0], outcome.verified[rows], outcome.accepted[rows], self._max_k)
        self._ks.put(outcome.handles[rows], ks)

    def wants_offers(self) -> NDArray[np.bool_]:
        """The chosen lookup alone."""
        return self.lookup_alone(self._proposer)

    def state(self) -> Mapping[str, Any]:
        """Every request's k and where a new one starts."""
        return {"start": self._start.tolist(), "ks": self._ks.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self._start = np.array(state["start"])
        self._ks.restore(state["ks"])
