"""A table from batch size to k, and a gate that closes for good when acceptance is poor."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from autospec.policy.base import Decision, Outcome, Policy, PolicyOptions, View, plain, uniform
from autospec.records import NO_PROPOSER, ProposerInfo


class GateOptions(PolicyOptions):
    """Names are TensorRT-LLM's: ``max_draft_len`` drafts without a schedule; window and threshold
    of the gate are given together or not at all."""

    name: Literal["gate"] = "gate"
    proposer: Annotated[str, Field(description="who drafts")]
    max_draft_len: Annotated[int, Field(ge=1, le=64)] = 4
    draft_len_schedule: Annotated[
        dict[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0, le=64)]] | None,
        Field(min_length=1, description="k up to that many requests; above the last, none"),
    ] = None
    max_concurrency: Annotated[
        int | None, Field(ge=1, description="above that many requests, nobody drafts")
    ] = None
    acceptance_rate_window_size: Annotated[
        int | None, Field(ge=1, description="speculative steps that the gate looks back")
    ] = None
    acceptance_rate_threshold: Annotated[
        float | None, Field(ge=0, le=1, description="least mean acceptance rate in the window")
    ] = None

    @model_validator(mode="after")
    def _check_gate(self) -> GateOptions:
        if (self.acceptance_rate_window_size is None) != (self.acceptance_rate_threshold is None):
            raise ValueError(
                "acceptance_rate_window_size and acceptance_rate_threshold need each other"
            )
        return self


def draft_length(options: GateOptions, requests: int) -> int:
    """k at that many requests: of the first schedule key that is not below it."""
    if options.max_concurrency is not None and requests > options.max_concurrency:
        return 0
    if options.draft_len_schedule is None:
        return options.max_draft_len
    for bound in sorted(options.draft_len_schedule):
        if requests <= bound:
            return min(options.draft_len_schedule[bound], options.max_draft_len)
    return 0


class Gate(Policy[GateOptions]):
    """TensorRT-LLM: ``draft_len_schedule`` (upper bounds, as since its pull request 10860) and
    ``SpeculationGate`` (_torch/speculative/speculation_gate.py).

    When the mean of the last window's acceptance rates, one per speculative step, is below the
    threshold, speculation is off until the policy is made anew.
    """

    def __init__(
        self, options: GateOptions, proposers: Sequence[ProposerInfo], rng: np.random.Generator
    ) -> None:
        super().__init__(options, proposers, rng)
        self._rates: deque[float] = deque(maxlen=options.acceptance_rate_window_size)
        self._is_closed = False

    def decide(self, view: View) -> Decision:
        """The schedule's k for everybody while the gate is open."""
        if self._is_closed:
            return plain(view.requests)
        k = draft_length(self.options, view.requests)
        return uniform(view, self.index_of(self.options.proposer), k)

    def learn(self, outcome: Outcome) -> None:
        """Note the step's acceptance rate; close the gate if a whole window is poor."""
        threshold = self.options.acceptance_rate_threshold
        verified = int(outcome.verified.sum())
        if threshold is None or self._is_closed or verified == 0:
            return
        self._rates.append(int(outcome.accepted.sum()) / verified)
        if len(self._rates) == self._rates.maxlen:
            self._is_closed = float(np.mean(self._rates)) < threshold

    def wants_offers(self) -> NDArray[np.bool_]:
        """The chosen lookup alone, and none behind a closed gate."""
        return self.lookup_alone(
            NO_PROPOSER if self._is_closed else self.index_of(self.options.proposer)
        )

    def state(self) -> Mapping[str, Any]:
        """The window and the gate."""
        return {"rates": list(self._rates), "is_closed": self._is_closed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self._rates.clear()
        self._rates.extend(state["rates"])
        self._is_closed = state["is_closed"]
