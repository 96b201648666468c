"""What a target says and thinks: tokens with the hidden states behind them, recorded as it decodes.

A text that is given is recorded by feeding it as a prompt; a continuation, as it is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from autospec.engine.cache import SlotCache
from autospec.engine.decoder import Decoder
from autospec.engine.drafting import DraftTask, Kept, ModelDrafts
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.errors import EngineError, InputError
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
class Excerpt:
    """A text to record: ``given`` tokens to feed, then up to ``generate`` tokens of the target's.

    Nothing is learned from the first ``context`` tokens, such as the question to an answer.
    """

    given: tuple[int, ...]
    context: int
    generate: int


@dataclass(frozen=True, slots=True)
class Recording:
    """Sequences, one after the other. ``hidden[i]`` is the target's state after ``tokens[i]``.

    ``starts`` has the first index of every sequence, and the end of the last. ``context`` marks
    tokens from which nothing is to be learned.
    """

    tokens: torch.Tensor  # [tokens], int64
    hidden: torch.Tensor  # [tokens, layers, hidden_size]
    context: torch.Tensor  # [tokens], bool
    starts: Int64Array  # [sequences + 1]

    @property
    def num_tokens(self) -> int:
        """Tokens from which something is learned."""
        return int((~self.context).sum())

    def places(self, ahead: int) -> torch.Tensor:
        """Indices ``i`` whose sequence goes on to ``i + ahead`` and learns from ``i + 1`` on."""
        lengths = np.diff(self.starts)
        ends = torch.from_numpy(np.repeat(self.starts[1:], lengths))
        index = torch.arange(len(self.tokens))
        inside = index + ahead < ends
        following = (index + 1).clamp(max=max(len(index) - 1, 0))
        return index[inside & ~self.context[following]]


def record(
    target: CausalModel,
    excerpts: Sequence[Excerpt],
    *,
    layers: tuple[int, ...],
    slots: int,
    stop: Callable[[int], bool] = lambda tokens: False,
) -> Recording:
    """Feed and generate ``excerpts``, ``slots`` at a time; sequences in the order of their ends.

    ``stop`` is asked after every step with the number of tokens recorded so far, context left out;
    where it says so, sequences that are under way are cut off.
    """
    capacity = max(len(each.given) + each.generate for each in excerpts)
    tape = _Tape(layers, excerpts)
    decoder = Decoder(target, (tape,), tape, slots=slots, capacity=capacity)
    for number, excerpt in enumerate(excerpts):
        request = GenerationRequest(
            excerpt.given, max_tokens=max(excerpt.generate, 1), id=str(number)
        )
        decoder.submit(request)
    while decoder.has_work:
        decoder.step()
        if stop(tape.num_tokens):
            break
    return tape.recording()


def joined(parts: Sequence[Recording]) -> Recording:
    """One recording of all sequences in order."""
    lengths = np.concatenate([np.diff(part.starts) for part in parts])
    return Recording(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.hidden for part in parts]),
        torch.cat([part.context for part in parts]),
        np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
    )


def save_recording(path: Path, recording: Recording) -> None:
    """Write a recording; the file is there as a whole or not at all."""
    tensors = {
        "tokens": recording.tokens,
        "hidden": recording.hidden.contiguous(),
        "context": recording.context,
        "starts": torch.from_numpy(recording.starts),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)


def load_recording(path: Path) -> Recording:
    """Read what ``save_recording`` wrote. Raises InputError."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: is not a readable recording ({error})") from None
    return Recording(
        tensors["tokens"], tensors["hidden"], tensors["context"], tensors["starts"].numpy()
    )


class _Tape:
    """A proposer and controller in one: nobody ever drafts, and all that is said is kept."""

    k_max = 1

    def __init__(self, layers: tuple[int, ...], excerpts: Sequence[Excerpt]) -> None:
        self.info = ProposerInfo("tape", "sequential", 1)
        self.hidden_layers = layers
        self.num_tokens = 0
        self._excerpts = excerpts
        self._slot = 0
        self._steps = 0
        self._number: dict[int, int] = {}  # excerpt by slot
        self._open: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._closed: list[tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]] = []

    def attach(self, target: CausalModel, cache: SlotCache) -> None:
        return None

    def reset(self, slot: int) -> None:
        self._close(slot)
        self._slot = slot  # whose request is started next

    def start(self, request: Request) -> int:
        self._number[self._slot] = int(request.id)
        return self._slot

    def commit(self, kept: Kept, history: History) -> None:
        assert kept.hidden is not None
        ends = np.cumsum(kept.counts)
        for row, slot in enumerate(kept.slots.tolist()):
            start, end = int(kept.starts[row]), int(ends[row])
            count = int(kept.counts[row])
            tokens = torch.from_numpy(history.tokens[slot, start : start + count].astype(np.int64))
            hidden = kept.hidden[end - count : end].cpu()
            self._open.setdefault(slot, []).append((tokens, hidden))
            context = self._excerpts[self._number[slot]].context
            self.num_tokens += max(0, start + count - max(start, context))

    def recording(self) -> Recording:
        for slot in sorted(self._open):
            self._close(slot)
        pieces = [piece for _, sequence in self._closed for piece in sequence]
        lengths = [sum(len(tokens) for tokens, _ in sequence) for _, sequence in self._closed]
        context = [
            torch.arange(length) < self._excerpts[number].context
            for (number, _), length in zip(self._closed, lengths, strict=True)
        ]
        return Recording(
            torch.cat([tokens for tokens, _ in pieces]),
            torch.cat([hidden for _, hidden in pieces]),
            torch.cat(context),
            np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        )

    def _close(self, slot: int) -> None:
        sequence = self._open.pop(slot, None)
        if sequence:
            self._closed.append((self._number[slot], sequence))

    def plan(self, state: BatchState) -> Plan:
        self._steps += 1
        nobody = np.full(len(state.handles), -1, dtype=np.int16)
        none = np.zeros(len(state.handles), dtype=np.int16)
        return Plan(self._steps, state.handles, nobody, none, none, "plain")

    def wants_offers(self) -> NDArray[np.bool_]:
        return np.zeros(1, dtype=np.bool_)

    def draft(self, task: DraftTask) -> ModelDrafts:
        raise EngineError("a recording does not draft")

    def trim(self, plan: Plan, drafted: Int16Array, confidence: Float32Array) -> Plan:
        return plan

    def observe(self, plan: Plan, result: StepResult) -> None:
        return None

    def finish(self, handle: int) -> None:
        return None

    def stale_tokens(self, history: History, slots: Int32Array) -> Int32Array:
        return np.zeros(len(slots), dtype=np.int32)

    def memory_bytes(self) -> int:
        pieces = [piece for _, sequence in self._closed for piece in sequence]
        pieces += [piece for sequence in self._open.values() for piece in sequence]
        return sum(tokens.nbytes + hidden.nbytes for tokens, hidden in pieces)
