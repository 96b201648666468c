"""The default: maximize what the step is expected to bring, per request, with hysteresis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autospec.allocation import (
    Allocation,
    Prices,
    allocate,
    even_shares,
    latency_gains,
    limits_of,
    throughput_gains,
    weigh,
)
from autospec.policy.appended import Appended
from autospec.policy.base import Decision, Outcome, Policy, PolicyOptions, View, plain
from autospec.policy.going_rate import GoingRate
from autospec.policy.kept_share import KeptShare
from autospec.policy.offer_gate import OfferGate
from autospec.records import Float32Array, Float64Array, Int16Array, ProposerInfo

_URGENCY = 3.0  # exponent on time per token over its target, which gives a request its weight
_LEAST_WEIGHT = 0.25  # of a request far ahead of its target: it makes way for the others
_MOST_WEIGHT = 4.0
_MOST_PLAIN_STEPS = 32.0  # that one step may count for; a machine that slept tells nothing


class GoodputOptions(PolicyOptions):
    """What to maximize, and how reluctantly to change."""

    name: Literal["goodput"] = "goodput"
    objective: Annotated[
        Literal["throughput", "latency", "slo"],
        Field(
            description="tokens per second of the batch; time per token of each request; "
            "tokens per second with requests behind their target first"
        ),
    ] = "throughput"
    hysteresis: Annotated[
        float, Field(ge=0, lt=1, description="gain that switching a model on or off must promise")
    ] = 0.01
    catch_up_steps: Annotated[
        float, Field(ge=1, description="steps over which a model's catch-up is written off")
    ] = 16.0


class Goodput(Policy[GoodputOptions]):
    """Fractional programming over calibrated survivals and the learned step cost.

    A position is worth its time at the going rate: the long-run goodput at this load and of these
    workloads, not that of the step alone. By the renewal-reward theorem that is what maximizes
    tokens over time when steps differ.
    """

    adaptive = True

    def __init__(
        self,
        options: GoodputOptions,
        proposers: Sequence[ProposerInfo],
        rng: np.random.Generator,
    ) -> None:
        super().__init__(options, proposers, rng)
        self._held_depth = np.zeros(len(proposers), dtype=np.int16)
        self._make(np.zeros((0, len(proposers), 0), dtype=np.float32))
        self._free_drafts = np.zeros((len(proposers), 4))
        self._rate = GoingRate()
        self._gate = OfferGate(self.lookup)
        self._appended = Appended(proposers)
        self._kept = KeptShare(~self.lookup & (self._appended.head_k == 0))

    def decide(self, view: View) -> Decision:
        """The allocation of this step; plain while nothing is known of the cost."""
        if not view.cost.is_known:
            return plain(view.requests)
        self._fit(view.hazards)
        prices = self._prices(view, view.cost.draft_coefficients)
        chosen = self._allocate(view, view.hazards, view.limits, prices, hold=True)
        spare = view.cost.trusted_tokens(view.requests) - view.requests
        if spare < chosen.k.shape[0] * view.hazards.shape[2] and chosen.k.sum() > spare:
            limits = np.minimum(view.limits, even_shares(int(spare), view.limits.max(axis=0) > 0))
            chosen = self._allocate(view, view.hazards, limits, prices, hold=True)
        self._held_depth[:] = chosen.depth
        self._gate.expect(chosen.advantage, chosen.alone)
        self._appended.expect(chosen.proposer)
        return Decision(chosen.proposer, chosen.k)

    def trim(self, view: View, decision: Decision, hazards: Float32Array) -> Int16Array:
        """The same program with drafting already paid and the drafts' confidences known."""
        self._fit(hazards)
        limits_of(decision.proposer, decision.k, self._limits)
        prices = self._prices(view, self._free_drafts)
        return self._allocate(view, hazards, self._limits, prices, hold=False).k

    def learn(self, outcome: Outcome) -> None:
        """The going rate, and whether the lookups are worth their time."""
        if outcome.plain_seconds > 0.0 and not outcome.has_prefill:
            self._rate.note(
                outcome.workloads,
                outcome.committed,
                min(outcome.step_seconds / outcome.plain_seconds, _MOST_PLAIN_STEPS),
            )
        self._appended.note(outcome.proposer, outcome.verified, outcome.accepted)
        self._kept.note(outcome.proposer, outcome.asked, outcome.kept)
        if outcome.draft_seconds is not None and outcome.step_seconds > 0.0:
            tokens = outcome.draft_seconds * (outcome.committed.sum() / outcome.step_seconds)
            self._gate.note(outcome.proposer, outcome.accepted, outcome.matched, tokens)

    def wants_offers(self) -> NDArray[np.bool_]:
        """The lookups that are worth their time, the others now and then."""
        return self._gate.open()

    def _fit(self, hazards: Float32Array) -> None:
        if self._gains.shape != hazards.shape:
            self._make(hazards)

    def _make(self, hazards: Float32Array) -> None:
        """Arrays for steps of this size; they are written anew in each of them."""
        n, p, _ = hazards.shape
        self._gains = np.zeros_like(hazards)
        self._limits = np.zeros((p, n), dtype=np.int16)
        self._stale = np.zeros((p, n))
        self._weights = np.ones(n)
        self._chosen = Allocation.empty(p, n)

    def _prices(self, view: View, draft: Float64Array) -> Prices:
        cost = view.cost
        return Prices(
            cost.base_seconds(view.requests, view.context_tokens),
            cost.speculating_seconds,
            cost.slopes,
            draft,
            cost.engine.shape,
            cost.captured,
        )

    def _allocate(
        self, view: View, hazards: Float32Array, limits: Int16Array, prices: Prices, hold: bool
    ) -> Allocation:
        latency = self.options.objective == "latency"
        gains = self._gains
        share = self._kept.at(view.requests) if hold else np.ones(len(self.proposers))
        base_value = float(view.requests)
        rate = 0.0
        if latency:
            latency_gains(hazards, limits, share, np.ones(view.requests), gains)
        else:
            throughput_gains(hazards, limits, share, gains)
            weights = self._weights
            rate = self._rate.tokens_per_second(view.workloads, view.plain_seconds, weights)
            weigh(gains, limits, weights)
        if self.options.objective == "slo":
            weights = np.clip(view.behind**_URGENCY, _LEAST_WEIGHT, _MOST_WEIGHT)
            weights[view.behind == 0.0] = 1.0
            weigh(gains, limits, weights)
            base_value = float(weights.sum())
            rate *= base_value / max(view.requests, 1)
        if hold and rate > 0.0 and self._appended.any:
            self._appended.plan(limits, prices, rate, gains)
        return allocate(
            gains,
            limits,
            self.lookup,
            prices,
            base_value,
            stale_tokens=np.divide(view.stale_tokens, self.options.catch_up_steps, out=self._stale),
            latency=latency,
            rate=rate,
            share=share,
            held_depth=self._held_depth,
            hold=self.options.hysteresis if hold else 0.0,
            into=self._chosen,
        )

    def state(self) -> Mapping[str, Any]:
        """Which models were in use, the going rates and the gate."""
        return {
            "held_depth": self._held_depth.tolist(),
            "rate": self._rate.state(),
            "gate": self._gate.state(),
            "appended": self._appended.state(),
            "kept": self._kept.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self._held_depth = np.array(state["held_depth"], dtype=np.int16)
        self._rate.restore(state["rate"])
        self._gate.restore(state["gate"])
        self._appended.restore(state["appended"])
        self._kept.restore(state["kept"])
