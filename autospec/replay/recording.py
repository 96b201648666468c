"""``autospec record``: a trace of a live run, for ``autospec replay``.

The target decodes plainly. At every output position the draft model or head drafts too, nothing of
it is verified, and once the output is known its drafts are compared with it. Lookups need no
record: replay runs them on the tokens. Decoding is greedy, since only then what a draft
would have had accepted follows from the tokens alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from autospec.bench.arms import encode
from autospec.bench.command import load_model
from autospec.engine.decoder import Decoder
from autospec.engine.drafting import DraftTask, ModelDrafts, ModelProposer
from autospec.engine.model import CausalModel
from autospec.engine.relay import Relay
from autospec.engine.request import GenerationRequest
from autospec.errors import InputError
from autospec.prompts import Prompt, read_prompts
from autospec.proposers.draft_model import DraftModelProposer
from autospec.proposers.heads import load_head
from autospec.records import (
    NO_PROPOSER,
    BatchState,
    Float32Array,
    Int16Array,
    Int64Array,
    Plan,
    Request,
    StepResult,
)
from autospec.replay.trace import TraceRequest, write_traces


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What ``autospec record`` was asked for."""

    target: Path
    prompts: Path
    out: Path
    draft: Path | None = None
    head: Path | None = None
    draft_k: int = 8
    max_tokens: int = 256
    concurrency: int = 4
    stop_at_eos: bool = True
    dtype: str = "auto"
    device: str = "cpu"


@dataclass(slots=True)
class _Tape:
    """Draft tokens of one request by the number of tokens that were known."""

    prompt_tokens: int
    drafts: dict[int, Int64Array] = field(default_factory=dict)


class DraftRecorder(Relay):
    """A proposer and its controller in one: drafts at every position, verifies nothing."""

    def __init__(self, inner: ModelProposer) -> None:
        super().__init__(inner)
        self._tapes: dict[str, _Tape] = {}
        self._by_slot: dict[int, _Tape] = {}
        self._slot = -1
        self._next = 0

    def accepted(self, request_id: str, output: Sequence[int]) -> Int16Array:
        """Tokens [output] that a draft at each position would have had accepted.

        0 at the first position: its token comes with the prompt, before anybody can draft.
        """
        tape = self._tapes.pop(request_id)
        target = np.array(output, dtype=np.int64)
        lengths = np.zeros(len(output), dtype=np.int16)
        for known, draft in tape.drafts.items():
            position = known - tape.prompt_tokens
            depth = min(len(draft), len(output) - position)
            equal = draft[:depth] == target[position : position + depth]
            lengths[position] = int(np.logical_and.accumulate(equal).sum())
        return lengths

    # As a proposer -------------------------------------------------------------------------

    def reset(self, slot: int) -> None:
        """Passed on; the next request that starts is in this slot."""
        super().reset(slot)
        self._slot = slot

    def draft(self, task: DraftTask) -> ModelDrafts:
        """Passed on and kept."""
        drafts = super().draft(task)
        for row, slot in enumerate(task.slots.tolist()):
            count = int(drafts.lengths[row])
            known = int(task.history.lengths[slot])
            self._by_slot[slot].drafts[known] = drafts.tokens[row, :count].copy()
        return drafts

    # As a controller -----------------------------------------------------------------------

    @property
    def k_max(self) -> int:
        """Of the proposer."""
        return self.info.max_k

    def start(self, request: Request) -> int:
        """Begin a tape."""
        tape = _Tape(len(request.prompt_token_ids))
        self._tapes[request.id] = self._by_slot[self._slot] = tape
        self._next += 1
        return self._next

    def wants_offers(self) -> NDArray[np.bool_]:
        """There are no lookups."""
        return np.zeros(1, dtype=np.bool_)

    def plan(self, state: BatchState) -> Plan:
        """Everybody drafts as much as there is room for."""
        n = len(state.handles)
        room = np.full(n, self.k_max) if state.room is None else state.room
        k = np.clip(room, 0, self.k_max).astype(np.int16)
        proposer = np.where(k > 0, 0, NO_PROPOSER).astype(np.int16)
        return Plan(0, state.handles, proposer, k, k, "probe")

    def trim(self, plan: Plan, drafted: Int16Array, confidence: Float32Array) -> Plan:
        """Nothing is verified."""
        return plan._replace(verify=np.zeros_like(plan.k))

    def observe(self, plan: Plan, result: StepResult) -> None:
        """Nothing is learned."""

    def finish(self, handle: int) -> None:
        """The tape is read when the output is known."""


def record(
    target: CausalModel,
    requests: Sequence[GenerationRequest],
    proposer: ModelProposer | None,
    *,
    concurrency: int,
) -> tuple[TraceRequest, ...]:
    """Decode plainly and greedily; what ``proposer`` would have had accepted, position by position.

    Requests without an output token are left out. Raises InputError for one that cannot run.
    """
    recorder = None if proposer is None else DraftRecorder(proposer)
    longest = max(len(each.prompt_token_ids) + each.max_tokens for each in requests)
    decoder = Decoder(
        target,
        () if recorder is None else (recorder,),
        recorder,
        slots=min(concurrency, len(requests)),
        capacity=longest + 1,
    )
    traces: dict[str, TraceRequest] = {}
    by_id = {request.id: request for request in requests}
    for request in requests:
        decoder.submit(request)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("recording", total=len(requests))
        for event in decoder.events():
            output = event.output
            if output is None:
                continue
            progress.advance(bar)
            if not output.token_ids:
                continue
            accepted: Mapping[str, Int16Array] = {}
            if recorder is not None:
                lengths = recorder.accepted(output.id, output.token_ids)
                accepted = {recorder.info.name: lengths}
            request = by_id[output.id]
            traces[output.id] = TraceRequest(
                output.id,
                request.workload,
                np.array(request.prompt_token_ids, dtype=np.int32),
                np.array(output.token_ids, dtype=np.int32),
                accepted,
            )
    return tuple(traces[request.id] for request in requests if request.id in traces)


def run_record(options: RecordOptions, console: Console) -> int:
    """Load, decode, write; returns the exit code.

    Raises InputError and ModelError for what cannot be run, before anything is decoded.
    """
    prompts = read_prompts(options.prompts)
    if options.draft is not None and options.head is not None:
        raise InputError("--draft and --head: a trace holds one of them; record twice for both")
    if options.out.is_dir() or not options.out.parent.is_dir():
        raise InputError(f"--out: {options.out} cannot be written; give a file in a folder")
    with torch.inference_mode():
        target = load_model(options.target, options.dtype, options.device, console)
        proposer: ModelProposer | None = None
        if options.draft is not None:
            draft = load_model(options.draft, options.dtype, options.device, console)
            proposer = DraftModelProposer(draft, max_k=options.draft_k)
        elif options.head is not None:
            proposer = load_head(options.head, target)
        requests = [_request(prompt, target, options) for prompt in prompts]
        traces = record(target, requests, proposer, concurrency=options.concurrency)
    write_traces(options.out, traces)
    tokens = sum(len(trace.output_token_ids) for trace in traces)
    facts = f"{len(traces)} requests, {tokens} output tokens"
    if proposer is not None and tokens:
        name = proposer.info.name
        mean = sum(float(trace.accepted[name].sum()) for trace in traces) / tokens
        facts += (
            f"; {name} would have had {mean:.2f} tokens accepted per draft of {proposer.info.max_k}"
        )
    console.print(f"{options.out}: {facts}", markup=False, soft_wrap=True)
    return 0


def _request(prompt: Prompt, target: CausalModel, options: RecordOptions) -> GenerationRequest:
    token_ids = encode(prompt, target, options.prompts)
    most = min(options.max_tokens, prompt.max_tokens or options.max_tokens)
    if len(token_ids) + most > target.context_tokens:
        raise InputError(
            f"{options.prompts}: prompt {prompt.id!r} has {len(token_ids)} tokens and is to be "
            f"continued by {most}; the model's context is {target.context_tokens}"
        )
    return GenerationRequest(
        prompt_token_ids=token_ids,
        max_tokens=most,
        id=prompt.id,
        ignore_eos=not options.stop_at_eos,
        workload=prompt.label,
        text=prompt.text,
    )
