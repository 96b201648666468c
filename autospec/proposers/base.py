"""What drafting is given and what it returns; shared by serving and replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from autospec.records import Float32Array, Int16Array, Int32Array, ProposerInfo


@dataclass(frozen=True, slots=True)
class History:
    """Every slot's tokens, prompt first. The owner appends in place; proposers only read.

    Behind a slot's length its row is free; drafts are written there for whoever goes on from them.
    """

    tokens: Int32Array  # [slots, capacity]
    lengths: Int32Array  # [slots]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens over the batch; ``lengths[i]`` of row ``i`` are valid.

    A token's confidence, in [0, 1], is that it is right if those before it are.
    """

    tokens: Int32Array  # [n, k]
    lengths: Int16Array  # [n]
    confidence: Float32Array  # [n, k]


def smallest_call() -> tuple[History, Int32Array, Drafts]:
    """A history without text, its slot and room for one token, to compile kernels with."""
    drafts = Drafts(np.zeros((1, 1), np.int32), np.zeros(1, np.int16), np.zeros((1, 1), np.float32))
    return History(np.zeros((1, 1), np.int32), np.zeros(1, np.int32)), np.zeros(1, np.int32), drafts


class LookupProposer(Protocol):
    """Drafts from token ids alone, on the host, in microseconds.

    A slot is one running request's row in ``History``. An index over a slot catches up with
    its tokens inside ``propose``.
    """

    info: ProposerInfo

    def reset(self, slot: int) -> None:
        """Forget the slot's last request; a new one starts there."""
        ...

    def propose(self, history: History, slots: Int32Array, out: Drafts) -> None:
        """Draft for the requests in ``slots`` [n], writing into ``out``."""
        ...

    def retire(self, history: History, slot: int) -> None:
        """The request in ``slot`` ended well: its tokens may serve later requests."""
        ...

    def memory_bytes(self) -> int:
        """Bytes held now, and for ever at this number of slots and capacity."""
        ...


@runtime_checkable
class BindableLookup(Protocol):
    """A lookup that drafts for the same arrays again and again in a fraction of the time."""

    def bind(self, history: History, slots: Int32Array, out: Drafts) -> Callable[[], None]:
        """``propose`` with these very arguments, whose arrays are filled anew before every call.

        Raises InputError when they do not fit; what is returned does when slots do not.
        """
        ...


class StatefulProposer(Protocol):
    """What every proposer with a state of its own on the device has in common.

    Drafting itself speaks of tensors and is declared by the engine (``engine/drafting.py``).
    """

    info: ProposerInfo

    def reset(self, slot: int) -> None:
        """Forget the slot's last request; a new one starts there."""
        ...

    def stale_tokens(self, history: History, slots: Int32Array) -> Int32Array:
        """Tokens [n] to catch up on before drafting, beyond what drafting every step would need."""
        ...

    def memory_bytes(self) -> int:
        """Bytes held beside the weights, now and for ever."""
        ...
