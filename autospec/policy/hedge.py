"""Exponential weights over proposers, each judged by what it would have had accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autospec.policy.base import Decision, Outcome, Policy, PolicyOptions, View, plain
from autospec.policy.per_request import PerRequest
from autospec.records import NO_PROPOSER, Float64Array, ProposerInfo

_MEMORY_ROWS = 256.0  # rows that a model's own mean loss is taken over


class HedgeOptions(PolicyOptions):
    """Draft lengths are given: only who drafts is learned."""

    name: Literal["hedge"] = "hedge"
    proposers: Annotated[
        tuple[str, ...] | None, Field(min_length=1, description="who may draft; null for all")
    ] = None
    lookup_k: Annotated[int, Field(ge=1, le=64)] = 8
    model_k: Annotated[int, Field(ge=1, le=64)] = 3
    rate: Annotated[
        float, Field(gt=0, description="factor on the learning rate sqrt(8 ln N / t)")
    ] = 2.0


def weights(lost: Float64Array, steps: Float64Array, rate: float) -> Float64Array:
    """exp(-eta L) of losses L [n, p] after ``steps`` [n], with eta = rate sqrt(8 ln p / t)."""
    eta = rate * np.sqrt(8.0 * np.log(max(2, lost.shape[1])) / np.maximum(1.0, steps))
    scaled: Float64Array = np.exp(-eta[:, None] * (lost - lost.min(axis=1, keepdims=True)))
    return scaled


class Hedge(Policy[HedgeOptions]):
    """HedgeSpec ("Not-a-Bandit", ICLR 2026): Hedge on the loss 1 - (1 + accepted) / (K + 1).

    Weights are each request's own and start even. Where the paper runs every drafter over the
    verified tokens, a lookup's offer is compared with them here. A proposer that cannot draft for
    a request sleeps (it is charged what the chosen one is, so that the others' odds stay); a
    model that could but was not asked is charged its own mean loss of late, 0 before its first.
    """

    def __init__(
        self, options: HedgeOptions, proposers: Sequence[ProposerInfo], rng: np.random.Generator
    ) -> None:
        super().__init__(options, proposers, rng)
        allowed = [
            options.proposers is None or info.name in options.proposers for info in proposers
        ]
        ks = np.where(self.lookup, options.lookup_k, options.model_k)
        most = [info.max_k for info in proposers]
        self._ks = np.where(allowed, np.minimum(ks, most), 0).astype(np.int16)
        self._losses = PerRequest(len(proposers) + 1)  # [.., p] cumulated losses, then steps
        self._usual = np.zeros(len(proposers))
        self._rows = np.zeros(len(proposers))

    def decide(self, view: View) -> Decision:
        """Draw each request's proposer from those that can draft for it."""
        limits = np.minimum(view.limits, self._ks[:, None])
        known = self._losses.align(view.handles, np.zeros(len(self.proposers) + 1))
        if not limits.any():
            return plain(view.requests)
        chances = weights(known[:, :-1], known[:, -1], self.options.rate) * (limits.T > 0)
        reached = np.cumsum(chances, axis=1)
        draw = self.rng.random(view.requests) * reached[:, -1]
        chosen = np.minimum((reached <= draw[:, None]).sum(axis=1), len(self.proposers) - 1)
        k = limits[chosen, np.arange(view.requests)].astype(np.int16)
        return Decision(np.where(k > 0, chosen, NO_PROPOSER).astype(np.int16), k)

    def learn(self, outcome: Outcome) -> None:
        """Charge every proposer of every request that drafted."""
        known, at = self._losses.of(outcome.handles)
        drafted = outcome.verified[at] > 0
        rows = at[drafted]
        if len(rows) == 0:
            return
        longest = float(self._ks.max())
        used = outcome.proposer[rows]
        own = 1.0 - (1.0 + outcome.accepted[rows]) / (longest + 1.0)
        matched = np.minimum(outcome.matched[:, rows], self._ks[:, None]).T
        lost = 1.0 - (1.0 + matched) / (longest + 1.0)
        offered = (self.lookup[:, None] & (outcome.offer_lengths[:, rows] > 0)).T & (matched >= 0)
        lost = np.where(offered, lost, np.where(self.lookup, own[:, None], self._usual))
        lost[np.arange(len(rows)), used] = own
        for p in np.unique(used):
            new = own[used == p]
            self._rows[p] = min(self._rows[p] + len(new), _MEMORY_ROWS)
            share = min(1.0, len(new) / self._rows[p])
            self._usual[p] += share * (float(new.mean()) - self._usual[p])
        known[drafted, :-1] += lost
        known[drafted, -1] += 1.0
        self._losses.put(outcome.handles[at], known)

    def wants_offers(self) -> NDArray[np.bool_]:
        """The allowed lookups."""
        return self.lookup & (self._ks > 0)

    def state(self) -> Mapping[str, Any]:
        """Every request's losses, the models' usual ones and the random numbers to come."""
        sums = {"usual": self._usual.tolist(), "rows": self._rows.tolist()}
        return {**sums, "losses": self._losses.state(), "rng": self.rng.bit_generator.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self._usual, self._rows = np.array(state["usual"]), np.array(state["rows"])
        self._losses.restore(state["losses"])
        self.rng.bit_generator.state = state["rng"]
