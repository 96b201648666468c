"""Which requests run, and what each adds to the next step: admission, chunked prefill, ending."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autospec.engine.cache import SlotCache
from autospec.engine.model import CausalModel
from autospec.engine.request import Event, FinishReason, GenerationOutput, GenerationRequest
from autospec.engine.sampling import SamplingRows
from autospec.engine.text import TextStream
from autospec.errors import InputError
from autospec.proposers.base import History
from autospec.records import Int32Array, Int64Array

_SEED_STEP = 0x9E3779B97F4A7C15


class SlotUser(Protocol):
    """Whoever keeps something per slot and wants to know when its request changes."""

    def begin(self, slot: int, request: GenerationRequest, prompt: Int32Array) -> None: ...
    def end(self, slot: int, history: History, *, retire: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """One step without its drafts, in ascending order of slots.

    Row ``i`` feeds ``counts[i]`` known tokens from position ``starts[i]`` on. ``completes`` marks
    rows that get a next token; ``decoding`` those of them that feed just their last token, and may
    therefore speculate. The others are chunks of a prompt.
    """

    slots: Int32Array  # [m]
    starts: Int32Array  # [m]
    counts: Int32Array  # [m]
    completes: NDArray[np.bool_]  # [m]
    decoding: NDArray[np.bool_]  # [m]
    num_decoding: int
    prefill_tokens: int


@dataclass(slots=True)
class _Waiting:
    request: GenerationRequest
    prompt: Int32Array
    submitted: float
    seed: int


@dataclass(slots=True)
class _Running:
    request: GenerationRequest
    slot: int
    prompt_tokens: int
    submitted: float
    token_limit: int  # of the whole sequence
    ends: frozenset[int]
    stream: TextStream | None
    first_token: float | None = None
    fresh: list[int] = field(default_factory=list)
    finished: FinishReason | None = None


class Scheduler:
    """Owns the queue, the slots, every request's tokens and their ends.

    ``submit`` and ``cancel`` are thread-safe; everything else belongs to the decoder's thread.
    """

    def __init__(
        self,
        target: CausalModel,
        cache: SlotCache,
        prefill_tokens: int,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        slots = cache.slots
        self.history = History(
            tokens=np.zeros((slots, cache.capacity), dtype=np.int32),
            lengths=np.zeros(slots, dtype=np.int32),
        )
        self.sampling = SamplingRows(
            temperature=np.zeros(slots, dtype=np.float64),
            top_k=np.zeros(slots, dtype=np.int64),
            top_p=np.ones(slots, dtype=np.float64),
            min_p=np.zeros(slots, dtype=np.float64),
            seed=np.zeros(slots, dtype=np.int64),
            draw=np.zeros(slots, dtype=np.int64),
        )
        self.token_limits: Int32Array = np.zeros(slots, dtype=np.int32)
        self._target = target
        self._cache = cache
        self._prefill_tokens = prefill_tokens
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._cancelled: set[str] = set()
        self._ids: set[str] = set()
        self._numbers = count()
        self._seeds = count(seed)
        self._running: dict[int, _Running] = {}  # by slot, in order of admission
        self._free = list(range(slots))

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def running_requests(self) -> int:
        return len(self._running)

    @property
    def waiting_requests(self) -> int:
        return len(self._waiting)

    def submit(self, request: GenerationRequest) -> str:
        prompt = self._checked_prompt(request)
        with self._lock:
            request_id = request.id or f"request-{next(self._numbers)}"
            if request_id in self._ids:
                raise InputError(
                    f"request {request_id!r}: a request with this id is waiting or running"
                )
            self._ids.add(request_id)
            seed = request.sampling.seed
            if seed is None:
                seed = next(self._seeds) * _SEED_STEP
            self._waiting.append(
                _Waiting(replace(request, id=request_id), prompt, self._clock(), _as_int64(seed))
            )
        return request_id

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._ids:
                self._cancelled.add(request_id)

    def admit(self, user: SlotUser | None) -> list[Event]:
        """End what was cancelled, give free slots to the longest waiting; events of the ended."""
        if not self._waiting and not self._cancelled:
            return []
        events: list[Event] = []
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            still_waiting: deque[_Waiting] = deque()
            for waiting in self._waiting:
                if waiting.request.id in cancelled:
                    events.append(self._cancelled_event(waiting))
                else:
                    still_waiting.append(waiting)
            self._waiting = still_waiting
            for running in self._running.values():
                if running.request.id in cancelled:
                    running.finished = "cancelled"
        self.release(events, user)
        while self._free and self._waiting:
            with self._lock:
                waiting = self._waiting.popleft()
            self._start(waiting, heapq.heappop(self._free), user)
        return events

    def schedule(self) -> Batch | None:
        """Every decoding request and, in order of arrival, prompt chunks up to the token budget."""
        if not self._running:
            return None
        budget = self._prefill_tokens
        chosen: list[tuple[int, int, int]] = []  # slot, known tokens to feed, those pending
        lengths, cached = self.history.lengths, self._cache.lengths
        for slot in self._running:
            pending = int(lengths[slot] - cached[slot])
            size = pending if pending == 1 else min(pending, budget)
            if size:
                chosen.append((slot, size, pending))
                budget -= size if pending > 1 else 0
        chosen.sort()
        table = np.array(chosen, dtype=np.int32)
        slots, counts, pending_tokens = (
            np.ascontiguousarray(table[:, column]) for column in range(3)
        )
        decoding = pending_tokens == 1
        return Batch(
            slots=slots,
            starts=cached[slots],
            counts=counts,
            completes=counts == pending_tokens,
            decoding=decoding,
            num_decoding=int(decoding.sum()),
            prefill_tokens=self._prefill_tokens - budget,
        )

    def commit(
        self,
        batch: Batch,
        rows: Int64Array,  # [r] rows of the batch with new tokens
        tokens: Int64Array,  # [r, k + 1]
        accepted: Int64Array,  # [r]
        events: list[Event],
    ) -> Int64Array:
        """Append the new tokens up to the end of each request; how many were added [r]."""
        self._cache.lengths[batch.slots] = batch.starts + batch.counts
        committed = accepted + 1
        now = self._clock()
        for index, row in enumerate(rows.tolist()):
            slot = int(batch.slots[row])
            running = self._running[slot]
            length = int(self.history.lengths[slot])
            fresh = tokens[index, : committed[index]].tolist()
            kept = self._until_end(running, fresh, length)
            self.history.tokens[slot, length : length + kept] = fresh[:kept]
            self.history.lengths[slot] = length + kept
            self._cache.lengths[slot] = length + kept - 1
            committed[index] = kept
            if running.first_token is None:
                running.first_token = now
            if running.finished is None:
                text = (
                    running.stream.take() if running.stream and running.request.stream_text else ""
                )
                events.append(Event(running.request.id, tuple(fresh), text))
            else:
                running.fresh = fresh[:kept]
        self.sampling.draw[batch.slots[rows]] += committed
        return committed

    def release(self, events: list[Event], user: SlotUser | None) -> None:
        """Free the slots of requests that have ended and add their last events."""
        ended = [running for running in self._running.values() if running.finished is not None]
        for running in ended:
            assert running.finished is not None
            slot = running.slot
            if user is not None:
                user.end(slot, self.history, retire=running.finished != "cancelled")
            token_ids = tuple(
                self.history.tokens[
                    slot, running.prompt_tokens : self.history.lengths[slot]
                ].tolist()
            )
            text, tail = None, ""
            if running.stream is not None:
                tail = running.stream.finish()
                text = running.stream.text
            elif self._target.tokenizer is not None:
                text = self._target.decode(token_ids)
            output = GenerationOutput(
                id=running.request.id,
                prompt_tokens=running.prompt_tokens,
                token_ids=token_ids,
                text=text,
                finish_reason=running.finished,
                first_token_seconds=None
                if running.first_token is None
                else running.first_token - running.submitted,
                total_seconds=self._clock() - running.submitted,
            )
            events.append(
                Event(
                    running.request.id,
                    tuple(running.fresh),
                    tail if running.request.stream_text else "",
                    output,
                )
            )
            del self._running[slot]
            self.history.lengths[slot] = 0
            self._cache.lengths[slot] = 0
            heapq.heappush(self._free, slot)
            with self._lock:
                self._ids.discard(running.request.id)
                self._cancelled.discard(running.request.id)

    def _checked_prompt(self, request: GenerationRequest) -> Int32Array:
        name = f"request {request.id!r}" if request.id else "request"
        prompt = np.asarray(request.prompt_token_ids)
        if prompt.size == 0:
            raise InputError(f"{name}: the prompt is empty; it must hold at least one token")
        if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
            raise InputError(
                f"{name}: the prompt must be a flat list of token ids, "
                f"found an array of {prompt.dtype} with shape {prompt.shape}"
            )
        capacity = self._cache.capacity
        if len(prompt) >= capacity:
            raise InputError(
                f"{name}: the prompt has {len(prompt)} tokens; at most {capacity - 1} fit, so that "
                f"one can be generated (the model's context is {self._target.context_tokens}, the "
                f"engine's capacity {capacity})"
            )
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= self._target.vocab_size:
            found = low if low < 0 else high
            raise InputError(
                f"{name}: the prompt holds token {found}; "
                f"allowed are 0 to {self._target.vocab_size - 1}"
            )
        if request.max_tokens < 1:
            raise InputError(f"{name}: max_tokens is {request.max_tokens}; it must be at least 1")
        if (request.stop or request.stream_text) and self._target.tokenizer is None:
            raise InputError(
                f"{name}: stop strings and streamed text need a tokenizer in the model folder"
            )
        if "" in request.stop:
            raise InputError(f"{name}: a stop string is empty; it must hold at least one character")
        return prompt.astype(np.int32)

    def _start(self, waiting: _Waiting, slot: int, user: SlotUser | None) -> None:
        request, prompt = waiting.request, waiting.prompt
        self.history.tokens[slot, : len(prompt)] = prompt
        self.history.lengths[slot] = len(prompt)
        self._cache.lengths[slot] = 0
        limit = min(len(prompt) + request.max_tokens, self._cache.capacity)
        self.token_limits[slot] = limit
        sampling = request.sampling
        self.sampling.temperature[slot] = sampling.temperature
        self.sampling.top_k[slot] = sampling.top_k
        self.sampling.top_p[slot] = sampling.top_p
        self.sampling.min_p[slot] = sampling.min_p
        self.sampling.seed[slot] = waiting.seed
        self.sampling.draw[slot] = 0
        ends = () if request.ignore_eos else self._target.eos_token_ids
        self._running[slot] = _Running(
            request=request,
            slot=slot,
            prompt_tokens=len(prompt),
            submitted=waiting.submitted,
            token_limit=limit,
            ends=frozenset((*ends, *request.stop_token_ids)),
            stream=TextStream(self._target.decode, request.stop)
            if request.stop or request.stream_text
            else None,
        )
        if user is not None:
            user.begin(slot, request, prompt)

    def _until_end(self, running: _Running, fresh: list[int], length: int) -> int:
        """How many of ``fresh`` belong to the request; notes its end."""
        room = running.token_limit - length
        kept = len(fresh)
        if running.stream is None and running.ends.isdisjoint(fresh):
            if kept >= room:
                running.finished = "length"
            return min(kept, room)
        for index, token in enumerate(fresh):
            stopped = token in running.ends
            if running.stream is not None and not stopped:
                stopped = running.stream.push(token)
            if stopped or index + 1 == room:
                running.finished = "stop" if stopped else "length"
                return index + 1
        return kept

    def _cancelled_event(self, waiting: _Waiting) -> Event:
        self._ids.discard(waiting.request.id)
        output = GenerationOutput(
            id=waiting.request.id,
            prompt_tokens=len(waiting.prompt),
            token_ids=(),
            text="" if self._target.tokenizer is not None else None,
            finish_reason="cancelled",
            first_token_seconds=None,
            total_seconds=self._clock() - waiting.submitted,
        )
        return Event(waiting.request.id, (), output=output)


def _as_int64(seed: int) -> int:
    """Any integer as a signed 64-bit one."""
    return ((seed + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)
