"""Steps that try what is not in use: when, with whom, and how much of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from autospec.acceptance.shared_heads import shared_heads
from autospec.cost.coefficients import DEPTH
from autospec.cost.step_cost import StepCost
from autospec.policy.base import Decision, Policy, View, plain
from autospec.policy.promise import APPENDED
from autospec.rails.probe import DRAFTS, PLAIN, SEVERAL, ProbeClocks
from autospec.records import Int16Array, Int64Array

_MODEL_K = 3
_MODEL_SHARE = 0.5  # of a plain step that a probe's drafting may take beyond its first token
_PARALLEL_K = 8
_MODEL_REQUESTS = 8
_LIKELY = 0.3  # of a token to be right with all before it


class Probing:
    """What a policy's steps leave untried is tried now and then: plain decoding, models, lookups.

    ``clocks`` say when.
    """

    def __init__(self, policy: Policy[Any], cost: StepCost, clocks: ProbeClocks) -> None:
        self._policy = policy
        self._cost = cost
        self.clocks = clocks
        self._triable = (*cost.models, DRAFTS, SEVERAL)
        heads = shared_heads(policy.proposers)
        self._head_k = heads[:, 1]
        self._heads = np.where(self._head_k > 0, heads[:, 0], np.arange(len(heads)))

    def decide(self, view: View) -> Decision | None:
        """The decision of a step that tries something; None leaves it to the policy.

        So does a step that also prefills and would teach nothing of decoding.
        """
        if view.has_prefill and not self._cost.learns_beside_prefill:
            return None
        arm = self.clocks.due(view.requests)
        if arm is not None and arm != PLAIN:
            available = [each for each in self._triable if self._may_draft(view, each)]
            arm = self.clocks.due(view.requests, available)
            if SEVERAL not in available:
                self.clocks.postpone(SEVERAL)
        if arm is None:
            return None
        if arm == PLAIN:
            return plain(view.requests, "probe")
        if arm == DRAFTS:
            return self._surest_offer(view)
        return self._several_offered(view) if arm == SEVERAL else self._some_of_model(view, arm)

    def _may_draft(self, view: View, arm: int) -> bool:
        if arm == SEVERAL:
            likely = int(self._likely_tokens(view).max(axis=1).sum())
            return likely >= self.clocks.several(view.requests)
        limits = view.limits[self._policy.lookup] if arm == DRAFTS else view.limits[arm]
        return bool(limits.any())

    def _surest_offer(self, view: View) -> Decision:
        """The lookups' surest draft token alone: it tells whether drafts are still as dear."""
        is_offered = (view.limits > 0) & self._policy.lookup[:, None]
        sureness = np.where(is_offered, view.hazards[:, :, 0].T, -1.0)
        proposer, row = np.unravel_index(int(np.argmax(sureness)), sureness.shape)
        decision = plain(view.requests, "probe")
        decision.proposer[row] = proposer
        decision.k[row] = 1
        return decision

    def _likely_tokens(self, view: View) -> Int64Array:
        """How many of the tokens that lookups offer are likely to be right [n, p]."""
        positions = np.arange(view.hazards.shape[2])
        is_offered = (positions < view.limits[:, :, None]) & self._policy.lookup[:, None, None]
        survival = np.cumprod(view.hazards, axis=2)
        likely: Int64Array = ((survival >= _LIKELY) & is_offered.swapaxes(0, 1)).sum(axis=2)
        return likely

    def _several_offered(self, view: View) -> Decision:
        """The policy's decision, but requests that are sure of the most tokens draft some more.

        Twice as many where it is repeated, since the last one was cheap: more tell more.
        """
        decision = self._policy.decide(view)
        proposer, k = decision.proposer.copy(), self._without_appended(decision)
        likely = self._likely_tokens(view)
        lookups = likely.argmax(axis=1)
        lengths = likely.max(axis=1)
        tokens = self.clocks.several(view.requests) << self.clocks.streak
        for row in np.argsort(k - lengths, kind="stable"):
            missing = tokens - int(k.sum())
            if missing <= 0 or lengths[row] <= k[row]:
                break
            proposer[row] = lookups[row]
            k[row] = min(lengths[row], k[row] + missing)
        return _promising_nothing_appended(decision, proposer, k)

    def _some_of_model(self, view: View, model: int) -> Decision:
        """The policy's decision, but some requests draft with ``model``.

        So do all that would draft with another proposer of the same head: a step in which both
        draft would pay for it twice. What is appended to a head is drafted by some only.
        """
        policy, limits = self._policy, view.limits[model]
        decision = policy.decide(view)
        proposer, k = decision.proposer.copy(), self._without_appended(decision)
        rows = np.flatnonzero(limits > 0)
        if len(rows) > _MODEL_REQUESTS:
            rows = policy.rng.choice(rows, _MODEL_REQUESTS, replace=False)
        kin = (limits > 0) & (proposer >= 0) & (self._heads[proposer] == self._heads[model])
        kin[rows] = False
        proposer[kin] = model
        proposer[rows] = model
        if policy.proposers[model].kind == "sequential":
            k[proposer == model] = policy.rng.integers(1, self._depth(view, model) + 1)
        else:
            k[rows] = _PARALLEL_K
        k[rows] = np.minimum(k[rows], limits[rows])
        k[kin] = np.minimum(k[kin], self._head_k[model] or limits[kin])
        return _promising_nothing_appended(decision, proposer, k)

    def _without_appended(self, decision: Decision) -> Int16Array:
        """What is drafted [n] without what is appended to heads, since probes are not trimmed."""
        head_k = np.where(decision.proposer >= 0, self._head_k[decision.proposer], 0)
        return np.where(head_k > 0, np.minimum(decision.k, head_k), decision.k)

    def _depth(self, view: View, model: int) -> int:
        """The most that a probe may draft, to tell what a depth costs; a dear model drafts less."""
        depth_seconds = float(self._cost.draft_coefficients[model, DEPTH])
        most = _MODEL_SHARE * view.plain_seconds
        return _MODEL_K if _MODEL_K * depth_seconds <= most else max(1, int(most / depth_seconds))


def _promising_nothing_appended(
    decision: Decision, proposer: Int16Array, k: Int16Array
) -> Decision:
    """A probe made of a decision."""
    promised = None if decision.promised is None else decision.promised.copy()
    if promised is not None:
        promised[APPENDED] = 0.0
    return Decision(proposer, k, "probe", promised=promised)
