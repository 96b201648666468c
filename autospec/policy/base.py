"""What a policy sees, what it returns, and the options that every policy's YAML shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from autospec.cost.step_cost import StepCost
from autospec.policy.offer_gate import OfferGate
from autospec.policy.program import Memory
from autospec.records import (
    NO_PROPOSER,
    Float32Array,
    Float64Array,
    Int16Array,
    Int32Array,
    Int64Array,
    Mode,
    ProposerInfo,
)


class PolicyOptions(BaseModel):
    """Options of one policy in YAML; each policy's own class adds a literal ``name``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def named(self) -> Iterable[str]:
        """The proposers that the options name: ``proposer`` or ``proposers``, where a policy does
        not say otherwise."""
        one, several = getattr(self, "proposer", None), getattr(self, "proposers", None)
        return several or (() if one is None else (one,))


Options = TypeVar("Options", bound=PolicyOptions)

NO_ARM = -1
"""The arm of a decision that counts for none."""


class View(NamedTuple):
    """One step as a policy sees it; arrays are the controller's and must not be changed.

    ``limits`` is how many tokens each proposer may draft for each request now: caps, room, and for
    a lookup the length of its offer. ``confidence`` holds the offers' raw confidences, ``hazards``
    the calibrated ones of every position within the limits. ``stale_tokens`` is the catch-up each
    model owes, ``behind`` how far a request's time per output token is above its target (1 = on
    target, 0 = no target). ``plain_seconds`` is the estimate for a plain step of this batch, 0
    while there is none. ``handles`` tell one request from another across steps.
    """

    requests: int
    waiting: int
    context_tokens: int
    workloads: Int32Array  # [n]
    limits: Int16Array  # [p, n]
    confidence: Float32Array  # [p, n, k]
    hazards: Float32Array  # [n, p, k]
    stale_tokens: Float64Array  # [p, n]
    behind: Float64Array  # [n]
    cost: StepCost
    plain_seconds: float
    handles: Int64Array  # [n]
    has_prefill: bool = False


class Decision(NamedTuple):
    """Who drafts and how much, before the controller's bounds are applied.

    ``arm`` is a number of the policy's own for what it tried, ``promised`` [4, p] what it expects
    of the drafts; the outcome echoes both.
    """

    proposer: Int16Array  # [n]
    k: Int16Array  # [n]
    mode: Mode = "speculate"
    arm: int = NO_ARM
    promised: Float64Array | None = None


class Outcome(NamedTuple):
    """What the step of a decision brought; rows as in its view.

    Of ``asked`` draft tokens the proposer ``drafted`` some, and ``trim`` left ``kept`` of these; a
    probe verifies what ``trim`` would have cut as well.
    ``plain_seconds`` is the estimate for a plain step of the same batch, 0 while there is none.
    """

    requests: int
    workloads: Int32Array  # [n]
    proposer: Int16Array  # [n]
    asked: Int16Array  # [n]
    drafted: Int16Array  # [n]
    kept: Int16Array  # [n]
    verified: Int16Array  # [n]
    accepted: Int16Array  # [n]
    committed: Int16Array  # [n]
    matched: Int16Array  # [p, n], -1 where nothing is known
    offer_lengths: Int16Array  # [p, n]
    step_seconds: float
    draft_seconds: Float64Array | None  # [p]
    plain_seconds: float
    has_prefill: bool
    handles: Int64Array  # [n]
    promised: Float64Array  # [4, p], 0 where nothing was
    arm: int = NO_ARM


class Policy(ABC, Generic[Options]):
    """Decides steps. State is what ``state`` returns; everything else is derived from options.

    The guard rail and probing overrule ``adaptive`` policies; the others are obeyed. A ``gate``, if
    a policy has one, pauses lookups that are not worth their time.
    """

    adaptive: ClassVar[bool] = False
    gate: OfferGate | None = None

    def __init__(
        self, options: Options, proposers: Sequence[ProposerInfo], rng: np.random.Generator
    ) -> None:
        self.options = options
        self.proposers = tuple(proposers)
        self.lookup: NDArray[np.bool_] = np.array(
            [info.kind == "lookup" for info in proposers], dtype=np.bool_
        )
        self.rng = rng

    @abstractmethod
    def decide(self, view: View) -> Decision:
        """Who drafts and how much in this step."""

    def trim(self, view: View, decision: Decision, hazards: Float32Array) -> Int16Array:
        """How many of the drafts [n] to verify, given hazards [n, p, k] that know them; those of
        other proposers and positions say nothing."""
        return decision.k

    def learn(self, outcome: Outcome) -> None:
        """Take note of what a step brought."""

    def program(self, requests: int, positions: int, cost: StepCost) -> Memory | None:
        """``decide``, ``trim`` and ``learn`` for so many requests and draft positions in compiled
        code, where the policy is nothing else; ``learned`` is told what it said."""
        return None

    def learned(self, said: int, requests: int) -> None:
        """The program has learned from a step of so many requests; all but NEW_WORKLOAD."""

    def wants_offers(self) -> NDArray[np.bool_]:
        """Which lookups should draft before the next plan [p]."""
        return self.lookup

    def state(self) -> Mapping[str, Any]:
        """Everything the policy remembers, as JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""

    def lookup_alone(self, chosen: int) -> NDArray[np.bool_]:
        """Offers of proposer ``chosen`` only, if it is a lookup [p]."""
        mask = np.zeros_like(self.lookup)
        if chosen != NO_PROPOSER:
            mask[chosen] = self.lookup[chosen]
        return mask

    def index_of(self, name: str | None) -> int:
        """The number of a proposer; NO_PROPOSER for None, or for one that this engine has not."""
        for p, info in enumerate(self.proposers):
            if info.name == name:
                return p
        return NO_PROPOSER


def uniform(view: View, proposer: int, k: int) -> Decision:
    """The same proposer and k for every request, as far as each one's limit allows."""
    if proposer == NO_PROPOSER or k <= 0:
        return plain(view.requests)
    ks = np.minimum(view.limits[proposer], k).astype(np.int16)
    return Decision(np.where(ks > 0, proposer, NO_PROPOSER).astype(np.int16), ks)


def plain(requests: int, mode: Mode = "plain") -> Decision:
    """No speculation for anybody."""
    return Decision(
        np.full(requests, NO_PROPOSER, dtype=np.int16), np.zeros(requests, dtype=np.int16), mode
    )
