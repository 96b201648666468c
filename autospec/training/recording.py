"""What a target says and thinks: tokens with the hidden states behind them, recorded as it decodes.

A text that is given is recorded by feeding it as a prompt; a continuation, as it is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from autospec.engine.cache import SlotCache
from autospec.engine.decoder import Decoder
from autospec.engine.drafting import DraftTask, Kept, ModelDrafts
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.errors import EngineError
from autospec.proposers.base import History
from autospec.records import (
    BatchState,
    Float32Array,
    Int16Array,
    Int32Array,
    Int64Array,
    Plan,
    ProposerInfo,
    Request,
    StepResult,
)


@dataclass(frozen=True, slots=True)
class Recording:
    """Sequences, one after the other. ``hidden[i]`` is the target's state after ``tokens[i]``.

    ``starts`` has the first index of every sequence, and their end. ``prompt`` marks tokens that
    were given, all others are the target's own.
    """

    tokens: Int64Array  # [tokens]
    hidden: torch.Tensor  # [tokens, layers, hidden_size]
    prompt: NDArray[np.bool_]  # [tokens]
    starts: Int64Array  # [sequences + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1


def record(
    target: CausalModel,
    requests: Sequence[GenerationRequest],
    *,
    layers: tuple[int, ...],
    slots: int,
    stop: Callable[[int], bool] = lambda tokens: False,
) -> Recording:
    """Serve ``requests``, ``slots`` at a time, and return what was fed to the target.

    ``stop`` is asked after every step with the tokens recorded so far; where it says so, requests
    that are under way are cut off. Sequences are in the order in which they ended.
    """
    capacity = max(len(each.prompt_token_ids) + each.max_tokens for each in requests)
    tape = _Tape(layers)
    decoder = Decoder(target, (tape,), _Silence(), slots=slots, capacity=capacity)
    for request in requests:
        decoder.submit(request)
    while decoder.has_work and not stop(tape.num_tokens):
        decoder.step()
    return tape.recording()


def joined(parts: Sequence[Recording]) -> Recording:
    """One recording of all sequences in order."""
    lengths = np.concatenate([np.diff(part.starts) for part in parts])
    starts: Int64Array = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return Recording(
        np.concatenate([part.tokens for part in parts]),
        torch.cat([part.hidden for part in parts]),
        np.concatenate([part.prompt for part in parts]),
        starts,
    )


class _Tape:
    """A proposer that never drafts and keeps everything it is told."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.info = ProposerInfo("recording", "sequential", 1)
        self.hidden_layers = layers
        self.num_tokens = 0
        self._open: dict[int, list[tuple[Int64Array, torch.Tensor, bool]]] = {}
        self._closed: list[list[tuple[Int64Array, torch.Tensor, bool]]] = []

    def attach(self, target: CausalModel, cache: SlotCache) -> None:
        return None

    def reset(self, slot: int) -> None:
        self._close(slot)

    def stale_tokens(self, history: History, slots: Int32Array) -> Int32Array:
        return np.zeros(len(slots), dtype=np.int32)

    def memory_bytes(self) -> int:
        return sum(
            hidden.nbytes
            for pieces in (*self._open.values(), *self._closed)
            for _, hidden, _ in pieces
        )

    def draft(self, task: DraftTask) -> ModelDrafts:
        raise EngineError("a recording does not draft")

    def commit(self, kept: Kept, history: History) -> None:
        assert kept.hidden is not None
        ends = np.cumsum(kept.counts)
        for row, slot in enumerate(kept.slots.tolist()):
            start, count = int(kept.starts[row]), int(kept.counts[row])
            tokens = history.tokens[slot, start : start + count].astype(np.int64)
            hidden = kept.hidden[int(ends[row]) - count : int(ends[row])].cpu()
            given = start == 0 or count > 1  # a prompt's chunks; its last one may hold one token
            self._open.setdefault(slot, []).append((tokens, hidden, given))
            self.num_tokens += count

    def recording(self) -> Recording:
        for slot in sorted(self._open):
            self._close(slot)
        pieces = [piece for sequence in self._closed for piece in sequence]
        lengths = [sum(len(tokens) for tokens, _, _ in sequence) for sequence in self._closed]
        starts: Int64Array = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        return Recording(
            np.concatenate([tokens for tokens, _, _ in pieces]),
            torch.cat([hidden for _, hidden, _ in pieces]),
            np.concatenate([np.full(len(tokens), given) for tokens, _, given in pieces]),
            starts,
        )

    def _close(self, slot: int) -> None:
        sequence = self._open.pop(slot, None)
        if sequence:
            self._closed.append(sequence)


class _Silence:
    """A controller that always says: nobody drafts."""

    k_max = 1

    def __init__(self) -> None:
        self._steps = 0
        self._started = 0

    def start(self, request: Request) -> int:
        self._started += 1
        return self._started

    def wants_offers(self) -> NDArray[np.bool_]:
        return np.zeros(1, dtype=np.bool_)

    def plan(self, state: BatchState) -> Plan:
        self._steps += 1
        nobody = np.full(len(state.handles), -1, dtype=np.int16)
        none = np.zeros(len(state.handles), dtype=np.int16)
        return Plan(self._steps, state.handles, nobody, none, none, "plain")

    def trim(self, plan: Plan, drafted: Int16Array, confidence: Float32Array) -> Plan:
        return plan

    def observe(self, plan: Plan, result: StepResult) -> None:
        return None

    def finish(self, handle: int) -> None:
        return None
