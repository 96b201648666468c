"""The default: maximize what the step is expected to bring, per request, with hysteresis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autospec.allocation.choice import Workspace
from autospec.compiled import by_reference
from autospec.cost.step_cost import StepCost
from autospec.octave import octave_of
from autospec.policy.appended import Appended
from autospec.policy.base import Decision, Outcome, Policy, PolicyOptions, View, plain
from autospec.policy.going_rate import GoingRate
from autospec.policy.kept_share import KeptShare
from autospec.policy.offer_gate import OfferGate
from autospec.policy.program import (
    GATE_IS_RIPE,
    LATENCY,
    NEW_WORKLOAD,
    SLO,
    THROUGHPUT,
    Memory,
    decide_step,
    learn_step,
    trim_step,
)
from autospec.policy.promise import NUM_PROMISES
from autospec.records import EngineInfo, Float32Array, Int16Array, ProposerInfo

_URGENCY = 3.0  # exponent on time per token over its target, which gives a request its weight
_LEAST_WEIGHT = 0.25  # of a request far ahead of its target: it makes way for the others
_MOST_WEIGHT = 4.0
_OBJECTIVES = {"throughput": THROUGHPUT, "latency": LATENCY, "slo": SLO}


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
        self._objective = _OBJECTIVES[options.objective]
        self._held_depth = np.zeros(len(proposers), dtype=np.int16)
        self._rate = GoingRate()
        self.gate = self._gate = OfferGate(self.lookup)
        self._appended = Appended(proposers)
        self._kept = KeptShare(~self.lookup & (self._appended.arrays.head_k == 0))
        self._promised = np.zeros((NUM_PROMISES, len(proposers)))
        self._make(0, 0, StepCost(proposers, EngineInfo("", "", "", "", "")))

    def decide(self, view: View) -> Decision:
        """The allocation of this step; plain while nothing is known of the cost."""
        n = view.requests
        if not view.cost.is_known:
            return plain(n)
        self._fit(n, view.hazards.shape[2], view.cost)
        decide_step(
            self._memory, view.hazards, view.limits, view.stale_tokens, view.workloads,
            octave_of(n), view.context_tokens, view.plain_seconds, self._weigh(view),
            view.cost.most_tokens, self._promised,
        )  # fmt: skip
        best = self._room.best
        return Decision(best.proposer[:n], best.k[:n], promised=self._promised)

    def trim(self, view: View, decision: Decision, hazards: Float32Array) -> Int16Array:
        """The same program with drafting already paid and the drafts' confidences known."""
        n, most = view.requests, view.cost.most_tokens
        self._fit(n, view.hazards.shape[2], view.cost)
        trim_step(
            self._memory, decision.proposer, decision.k, hazards, view.workloads, octave_of(n),
            view.context_tokens, view.plain_seconds, self._weigh(view), most,
        )  # fmt: skip
        return self._room.best.k[:n]

    def learn(self, outcome: Outcome) -> None:
        """The going rate, and whether the lookups are worth their time."""
        draft_seconds = outcome.draft_seconds
        learned = learn_step(
            self._memory, octave_of(outcome.requests), outcome.workloads, outcome.proposer,
            outcome.drafted, outcome.kept, outcome.verified, outcome.accepted, outcome.committed,
            outcome.matched, outcome.step_seconds,
            0.0 if outcome.has_prefill else outcome.plain_seconds,
            self._cost.no_times if draft_seconds is None else draft_seconds,
            draft_seconds is not None, outcome.promised,
        )  # fmt: skip
        if learned == NEW_WORKLOAD:
            self._rate.grow(outcome.workloads)
            self._make(self._most, self._positions, self._cost)
            self.learn(outcome)
        else:
            self.learned(learned, outcome.requests)

    def program(self, requests: int, positions: int, cost: StepCost) -> Memory | None:
        """All of the above in compiled code, where requests do not weigh by their targets."""
        if self._objective == SLO:
            return None
        self._fit(requests, positions, cost)
        return self._memory

    def learned(self, said: int, requests: int) -> None:
        """The program has learned from a step, and this is what it said."""
        if said == GATE_IS_RIPE:
            self._gate.judge(requests)

    def wants_offers(self) -> NDArray[np.bool_]:
        """The lookups that are worth their time, the others now and then."""
        return self._gate.arrays.is_open

    def _weigh(self, view: View) -> float:
        """The sum of the requests' weights, where they have any."""
        if self._objective != SLO:
            return 0.0
        weights = np.clip(view.behind**_URGENCY, _LEAST_WEIGHT, _MOST_WEIGHT)
        weights[view.behind == 0.0] = 1.0
        self._urgency[: view.requests] = weights
        return float(weights.sum())

    def _fit(self, n: int, positions: int, cost: StepCost) -> None:
        """Make room for a step."""
        if n > self._most or positions != self._positions or cost is not self._cost:
            self._make(max(n, 2 * self._most), positions, cost)

    def _make(self, n: int, positions: int, cost: StepCost) -> None:
        """Arrays for steps of up to ``n`` requests; they are written anew in each of them."""
        p = len(self.proposers)
        self._most, self._positions, self._cost = n, positions, cost
        self._urgency = np.ones(n)
        self._room = room = Workspace.empty(p, n, positions)
        self._memory = by_reference(
            Memory(
                objective=self._objective,
                hysteresis=self.options.hysteresis,
                catch_up_steps=self.options.catch_up_steps,
                lookup=self.lookup,
                held_depth=self._held_depth,
                cost=cost.reference,
                rate=by_reference(self._rate.arrays),
                kept=by_reference(self._kept.arrays),
                appended=by_reference(self._appended.arrays),
                has_appended=self._appended.any,
                gate=by_reference(self._gate.arrays),
                room=by_reference(
                    room._replace(best=by_reference(room.best), trial=by_reference(room.trial))
                ),
                gains=np.zeros((n, p, positions), dtype=np.float32),
                limits=np.zeros((p, n), dtype=np.int16),
                within=np.zeros((p, n), dtype=np.int16),
                stale=np.zeros((p, n)),
                weights=np.ones(n),
                urgency=self._urgency,
                gross=np.zeros((p, n)),
                all_kept=np.ones(p),
                free_drafts=np.zeros((p, 4)),
            )
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
        self._held_depth[:] = state["held_depth"]
        self._rate.restore(state["rate"])
        self._gate.restore(state["gate"])
        self._appended.restore(state["appended"])
        self._kept.restore(state["kept"])
        self._make(self._most, self._positions, self._cost)
