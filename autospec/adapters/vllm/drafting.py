"""The worker's side: the configured drafter runs when ordered, on whatever it has skipped."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from autospec.adapters.vllm.modes import LOOKUP_METHODS, STATELESS_METHODS
from autospec.adapters.vllm.orders import DraftOrder, DraftReport

log = logging.getLogger("autospec")

_MOST_SEGMENTS = 512


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one request in one step that the drafter has not seen: ``start`` is the first's
    position, and row ``offset`` of ``hidden`` (None if the drafter needs none) belongs to it."""

    start: int
    count: int
    hidden: torch.Tensor | None  # [tokens of the step, hidden]
    offset: int


@dataclass(frozen=True, slots=True)
class Span:
    """Positions ``start`` to ``end`` of one request, gathered from segments."""

    request_id: str
    row: int
    start: int
    end: int
    parts: tuple[tuple[Segment, int, int], ...]  # segment, first and last position


class DraftDesk:
    """Defers a model runner's drafting until the scheduler orders it.

    ``runner`` is vLLM's GPUModelRunner (or a subclass), ``propose`` its own
    ``propose_draft_token_ids``. A fault leaves zeros as drafts: wrong, but harmless to outputs.
    """

    def __init__(self, runner: Any, propose: Callable[..., Any]) -> None:
        from vllm.v1.spec_decode.draft_model import DraftModelProposer
        from vllm.v1.spec_decode.eagle import EagleProposer

        self._runner = runner
        self._propose = propose
        self._method = str(runner.speculative_config.method)
        drafter = runner.drafter
        self._packs = type(drafter) in (EagleProposer, DraftModelProposer)
        self.supports = (
            self._packs or self._method in STATELESS_METHODS or self._method in LOOKUP_METHODS
        )
        self._wants_hidden = self._packs and bool(drafter.pass_hidden_states_to_model)
        self._segments: dict[str, deque[Segment]] = {}
        self._forgotten: set[str] = set()
        self._call: tuple[Any, ...] | None = None
        self._seconds = 0.0
        self._faults = 0
        self._is_logged = False
        self._times = runner.device.type == "cpu"  # elsewhere the host does not know

    def defer(self, scheduler_output: Any, *arguments: Any) -> list[list[int]]:
        """Called where vLLM would draft: keep what drafting needs, draft nothing."""
        try:
            if self._packs:
                _, _, hidden_states, _, aux_hidden_states, _, attention = arguments[:7]
                self._keep(scheduler_output, hidden_states, aux_hidden_states, attention)
            elif self._method in STATELESS_METHODS:
                self._call = (scheduler_output, *arguments)
        except Exception as error:
            self._fault(error)
        return [[] for _ in self._runner.input_batch.req_ids]

    def drop(self) -> None:
        """vLLM drafts by itself in this step."""
        self._call = None

    def draft(self, order: DraftOrder, scheduler_output: Any) -> None:
        """Carry out an order before the step's target forward; fills in the draft tokens."""
        if not self._packs and not order.draft:
            self._call = None
            return
        began = time.perf_counter()
        drafted: dict[str, list[int]] = {}
        try:
            self._forget(order, scheduler_output)
            with torch.inference_mode():
                if self._packs:
                    drafted = self._draft_packed(order, scheduler_output)
                elif self._call is not None and order.draft:
                    drafted = self._draft_late()
        except Exception as error:
            self._fault(error)
        self._call = None
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        for request_id in order.draft:
            tokens = drafted.get(request_id)
            wanted = len(scheduled.get(request_id, ()))
            if tokens is not None and wanted:
                scheduled[request_id] = [*tokens, *[0] * wanted][:wanted]
        self._seconds = time.perf_counter() - began

    def report(self) -> DraftReport:
        """What was done for the step whose output is about to be sent."""
        report = DraftReport(self._seconds if self._times else None, self._faults, self.supports)
        self._seconds, self._faults = 0.0, 0
        return report

    # ----------------------------------------------------------------------------------------

    def _fault(self, error: Exception) -> None:
        self._segments.clear()
        self._faults += 1
        if not self._is_logged:
            self._is_logged = True
            log.error("drafting failed; the step goes on (logged once)", exc_info=error)

    def _forget(self, order: DraftOrder, scheduler_output: Any) -> None:
        ended = set(scheduler_output.finished_req_ids)
        for request_id in ended.union(order.forget):
            self._segments.pop(request_id, None)
        self._forgotten.update(order.forget)
        self._forgotten -= ended.union(scheduler_output.preempted_req_ids or ())

    def _keep(
        self, scheduler_output: Any, hidden_states: Any, aux_hidden_states: Any, attention: Any
    ) -> None:
        runner = self._runner
        batch = runner.input_batch
        tokens = scheduler_output.total_num_scheduled_tokens
        hidden: torch.Tensor | None = None
        if self._wants_hidden:
            own = getattr(runner.get_model(), "get_mtp_target_hidden_states", None)
            other = None if own is None else own()
            if runner.use_aux_hidden_state_outputs:
                hidden = torch.cat([each[:tokens] for each in aux_hidden_states], dim=-1)
            else:
                hidden = (hidden_states if other is None else other)[:tokens].clone()
        starts = attention.query_start_loc_cpu.tolist()
        for row, request_id in enumerate(batch.req_ids):
            if request_id in self._forgotten:
                continue
            count = scheduler_output.num_scheduled_tokens[request_id]
            start = int(batch.num_computed_tokens_cpu[row])
            segments = self._segments.setdefault(request_id, deque(maxlen=_MOST_SEGMENTS))
            segments.append(Segment(start, count, hidden, starts[row]))

    def _draft_late(self) -> dict[str, list[int]]:
        """vLLM's own call, made now."""
        assert self._call is not None
        output, *arguments = self._call
        runner = self._runner
        output = dataclasses.replace(output, num_spec_tokens_to_schedule=runner.num_spec_tokens)
        drafts = self._propose(runner, output, *arguments)
        tokens = drafts.tolist() if isinstance(drafts, torch.Tensor) else drafts
        return {
            request_id: list(row)
            for request_id, row in zip(runner.input_batch.req_ids, tokens, strict=True)
        }

    def _draft_packed(self, order: DraftOrder, scheduler_output: Any) -> dict[str, list[int]]:
        runner = self._runner
        longest = runner.effective_drafter_max_model_len
        depth = max(order.draft.values(), default=0)
        spans: list[Span] = []
        for request_id in (*order.draft, *order.catch_up):
            span = self._span(request_id)
            if span is not None and span.end + depth < longest:
                spans.append(span)
        drafted: dict[str, list[int]] = {}
        rows_with_probs: list[str] = []
        probs: list[torch.Tensor] = []
        for group in _groups(spans, runner.drafter):
            is_drafting = any(span.request_id in order.draft for span in group)
            tokens = self._run(group, depth if is_drafting else 0)
            for span, row in zip(group, tokens.tolist(), strict=True):
                if span.request_id in order.draft:
                    drafted[span.request_id] = row
            last = runner.drafter.take_last_draft_probs()
            if last is not None and is_drafting:
                probs.append(last)
                rows_with_probs += [span.request_id for span in group]
        for span in spans:
            self._segments.pop(span.request_id, None)
        everyone = set(scheduler_output.scheduled_spec_decode_tokens) <= set(rows_with_probs)
        if probs and everyone:  # else drafts count as certain, which is lossless as well
            runner._draft_probs = torch.cat(probs)
            runner._draft_prob_req_ids = rows_with_probs
        return drafted

    def _span(self, request_id: str) -> Span | None:
        """The latest contiguous tokens of a request that the drafter has not seen."""
        segments = self._segments.get(request_id)
        row = self._runner.input_batch.req_id_to_index.get(request_id)
        if not segments or row is None:
            return None
        end = int(self._runner.input_batch.num_tokens_no_spec[row]) - 1
        parts: list[tuple[Segment, int, int]] = []
        limit = end
        for segment in reversed(segments):
            last = min(segment.start + segment.count, limit)
            if parts and last < limit:
                break  # a hole: what is older cannot be joined
            if segment.start >= last:
                continue  # superseded
            parts.append((segment, segment.start, last))
            limit = segment.start
        if not parts:
            return None
        parts.reverse()
        return Span(request_id, row, parts[0][1], parts[-1][2], tuple(parts))

    def _run(self, spans: list[Span], depth: int) -> torch.Tensor:
        """One packed first pass over all spans, then ``depth`` draft tokens each [n, depth]."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        runner = self._runner
        drafter, batch = runner.drafter, runner.input_batch
        device = runner.device
        lengths = np.array([span.end - span.start for span in spans], dtype=np.int32)
        bounds = np.zeros(len(spans) + 1, dtype=np.int32)
        np.cumsum(lengths, out=bounds[1:])
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        tokens = np.concatenate(
            [batch.token_ids_cpu[span.row, span.start : span.end] for span in spans]
        )
        following = np.array(
            [batch.token_ids_cpu[span.row, span.end] for span in spans], dtype=np.int32
        )
        ends = np.array([span.end for span in spans], dtype=np.int32)
        group = max(drafter.kv_cache_gid, 0)
        table = batch.block_table[group].get_device_tensor(batch.num_reqs)
        rows = _on(np.array([span.row for span in spans], dtype=np.int64), device)
        table = table.index_select(0, rows)
        positions_on = _on(positions.astype(np.int64), device)
        row_of_token = _on(np.repeat(np.arange(len(spans)), lengths), device)
        blocks = table[row_of_token, positions_on // drafter.block_size].long()
        slots = blocks * drafter.block_size + positions_on % drafter.block_size
        bounds_cpu = torch.from_numpy(bounds)
        attention = CommonAttentionMetadata(
            query_start_loc=_on(bounds.copy(), device),
            query_start_loc_cpu=bounds_cpu,
            seq_lens=_on(ends.copy(), device),  # drafting counts on in it
            num_reqs=len(spans),
            num_actual_tokens=int(bounds[-1]),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=table,
            slot_mapping=slots,
            causal=True,
            positions=positions_on,
            is_prefilling=torch.from_numpy(
                ends < batch.num_prompt_tokens[[span.row for span in spans]]
            ),
            seq_lens_cpu_upper_bound=torch.from_numpy(ends.copy()),
        )
        drafts: torch.Tensor = drafter.propose(
            num_speculative_tokens=depth,
            target_token_ids=_on(tokens.astype(np.int32), device),
            target_positions=positions_on,
            target_hidden_states=self._hidden(spans, device),
            next_token_ids=_on(following, device),
            token_indices_to_sample=None,
            sampling_metadata=batch.sampling_metadata,
            common_attn_metadata=attention,
        )
        return drafts

    def _hidden(self, spans: list[Span], device: torch.device) -> torch.Tensor:
        """The target's hidden states of all spans' tokens [tokens, hidden]."""
        if not self._wants_hidden:
            return torch.zeros(0, device=device)
        chunks: list[torch.Tensor] = []
        bases: dict[int, int] = {}
        size = 0
        index: list[NDArray[np.int64]] = []
        for span in spans:
            for segment, first, last in span.parts:
                hidden = segment.hidden
                assert hidden is not None
                if id(hidden) not in bases:
                    bases[id(hidden)] = size
                    size += hidden.shape[0]
                    chunks.append(hidden)
                base = bases[id(hidden)] + segment.offset - segment.start
                index.append(np.arange(base + first, base + last))
        joined = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        return joined.index_select(0, _on(np.concatenate(index), device))


def _on(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def _groups(spans: list[Span], drafter: Any) -> list[list[Span]]:
    """Spans in groups that fit the drafter's buffers; one that does not keeps its end only."""
    room = int(drafter.max_num_tokens)
    extra = int(drafter.net_num_new_slots_per_request)
    groups: list[list[Span]] = []
    used = room + 1
    for span in spans:
        if span.end - span.start + extra > room:
            span = _shortened(span, span.end - room + extra)
        need = span.end - span.start + extra
        if used + need > room:
            groups.append([])
            used = 0
        groups[-1].append(span)
        used += need
    return groups


def _shortened(span: Span, start: int) -> Span:
    parts = tuple(
        (segment, max(first, start), last) for segment, first, last in span.parts if last > start
    )
    return dataclasses.replace(span, start=start, parts=parts)
