"""What travels between a server and the controller: frozen records over the running batch.

Row ``i`` of every array belongs to the same request, ``handles[i]``. Axis names: ``n`` running
requests in their decode phase, ``p`` proposers in the controller's order, lookups or not, ``k``
draft positions, as many as the largest ``max_k`` of them (``Controller.k_max``).

A request belongs to the batch once its whole prompt is computed; a step of prompts alone needs no
plan. One that is preempted keeps its handle and is left out until it decodes again: ``finish`` and
``start`` would forget what is known of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

Int16Array = NDArray[np.int16]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]

NO_PROPOSER = -1
"""Value in ``Plan.proposer`` of a request that does not speculate in this step."""

Kind = Literal["lookup", "sequential", "parallel"]
"""How a proposer drafts: by looking tokens up, with one forward per depth, or with one in all."""

KINDS: tuple[str, ...] = get_args(Kind)

Shape = Literal["packed", "padded", "stepped"]
"""What a target forward pays for: every token, the longest row of the batch, or a captured size."""

Mode = Literal["plain", "speculate", "probe", "guard", "fallback"]
"""Why a step looks as it does; the label of the step counter."""


@dataclass(frozen=True, slots=True)
class ProposerInfo:
    """A proposer as the controller sees it.

    ``max_k`` is the most tokens it can draft for one request in one step. A ``lookup`` proposer
    offers its drafts before the plan is made; the others draft what the plan asks for.
    ``needs_state`` says that it keeps a cache that goes stale while it is off. The first ``head_k``
    tokens of its drafts are those of the proposer called ``head``, if it has one: what is learned
    of them is shared.
    """

    name: str
    kind: Kind
    max_k: int
    needs_state: bool = False
    head: str | None = None
    head_k: int = 0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The engine that is being controlled; with the proposers' names the identity of a profile.

    ``captured_sizes`` are the token counts that a ``stepped`` engine pads a step to, ascending.
    """

    target: str
    engine: str
    version: str
    device: str
    dtype: str
    shape: Shape = "packed"
    captured_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One request at its start. ``workload`` is the caller's label; None lets AutoSpec assign one.

    ``prompt_token_ids`` are read at the start only, if at all. ``max_k`` caps the draft length of
    this request; 0 opts out of speculation. ``tpot_target_seconds`` is its target for time per
    output token, used by the ``slo`` objective; what counts is the ``step_seconds`` of the steps
    that it took part in, not its prefill and not what lies between steps.
    """

    id: str
    prompt_token_ids: Int32Array | Sequence[int]
    workload: str | None = None
    tag: str | None = None
    text: str | None = None
    temperature: float = 0.0
    max_k: int | None = None
    tpot_target_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class BatchState:
    """The running batch just before a step.

    ``context_tokens[i]`` are all that request ``i`` has, the last one included, which no cache
    holds yet. Offers are the drafts that lookup proposers already hold (``Controller.wants_offers``
    says of which): ``offer_lengths[p, i]`` tokens for request ``i``, each with a raw confidence in
    [0, 1] that it is right if those before it are; what is outside counts as the nearer end, NaN as
    0. Rows of other proposers are zero. ``last_tokens[i]`` is the token that a draft would
    continue; some are hard to go on from. ``stale_tokens[p, i]`` is how many tokens proposer ``p``
    must catch up on before it can draft for request ``i``. ``room[i]`` is how many draft tokens fit
    before the request's token limit with one more behind them: limit - context - 1.
    ``prefill_tokens`` are those of prompts in the same step.
    """

    handles: Int64Array  # [n]
    context_tokens: Int32Array  # [n]
    offer_lengths: Int16Array | None = None  # [p, n]
    offer_confidence: Float32Array | None = None  # [p, n, k]
    last_tokens: Int32Array | None = None  # [n]
    stale_tokens: Int32Array | None = None  # [p, n]
    room: Int16Array | None = None  # [n]
    waiting_requests: int = 0
    prefill_tokens: int = 0


class Plan(NamedTuple):
    """One step's decision: who drafts for each request, how many tokens, how many to verify.

    ``verify`` equals ``k`` until ``Controller.trim`` has seen the drafts. ``predicted_seconds``, of
    drafting, the target's forward and the step's prefill, are None until a step's cost is known;
    ``predicted_tokens`` are those expected to be committed. A tuple: one is made in every step,
    which takes a quarter of the time.
    """

    id: int
    handles: Int64Array  # [n]
    proposer: Int16Array  # [n], NO_PROPOSER where k is 0
    k: Int16Array  # [n]
    verify: Int16Array  # [n]
    mode: Mode
    predicted_seconds: float | None = None
    predicted_tokens: float | None = None


class StepResult(NamedTuple):
    """What the step of a plan brought.

    ``accepted[i]`` of ``verified[i]`` draft tokens were kept; ``committed[i]`` tokens were added to
    the request, the recovered or bonus token included: one more than accepted, less only where the
    request ends, whose last token (EOS, say) counts. Zeros are of a request that took no part.
    ``matched[p, i]`` is how many leading tokens of an offer equal the committed ones and goes no
    further than these; -1 without an offer, as where a lookup was not asked. So lookup proposers
    are learned without being used. ``step_seconds`` is the whole step with planning and drafting;
    ``draft_seconds[p]`` the part that each proposer took, where the engine can tell. A tuple, as a
    ``Plan`` is.
    """

    verified: Int16Array  # [n]
    accepted: Int16Array  # [n]
    committed: Int16Array  # [n]
    step_seconds: float
    draft_seconds: Float64Array | None = None  # [p]
    matched: Int16Array | None = None  # [p, n]
    prefill_tokens: int = 0
