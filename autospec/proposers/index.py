"""What the lookup proposers share: hashing token windows, and the checks before a kernel runs."""

from __future__ import annotations

import numpy as np

from autospec.compiled import compiled
from autospec.errors import InputError
from autospec.proposers.base import Drafts, History
from autospec.records import Int32Array


@compiled
def window_hash(tokens: Int32Array, slot: int, end: int, width: int) -> int:
    """Hash of ``tokens[slot, end - width : end]`` into [0, 2^32): multiply, xor, fold."""
    state = np.uint64(width)
    for position in range(end - width, end):
        state = (state ^ np.uint64(tokens[slot, position])) * np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(29)
    return int(state >> np.uint64(32))


@compiled
def match_length(tokens: Int32Array, slot: int, source: int, end: int, limit: int) -> int:
    """How many tokens before ``source`` equal those before ``end``, at most ``limit``."""
    limit = min(limit, source)
    length = 0
    while length < limit and tokens[slot, source - 1 - length] == tokens[slot, end - 1 - length]:
        length += 1
    return length


def table_size(entries: int) -> int:
    """Smallest power of two of at least ``entries`` (and 2)."""
    return 1 << max(1, (entries - 1).bit_length())


def check_positive(name: str, field: str, value: int) -> None:
    """Refuse a setting below one."""
    if value < 1:
        raise InputError(f"proposer {name}: {field} is {value}; it must be at least 1")


def check_match(name: str, min_match: int, max_match: int) -> None:
    """Refuse an empty range of match lengths."""
    if max_match < min_match:
        raise InputError(
            f"proposer {name}: max_match is {max_match}, below min_match {min_match}; "
            "it must be at least min_match"
        )


def check_arrays(name: str, slots: int, capacity: int, history: History) -> None:
    """Refuse a history that the index has no room for or that a kernel was not compiled for."""
    tokens, lengths = history.tokens, history.lengths
    rows, columns = tokens.shape
    if rows > slots or columns > capacity or lengths.shape[0] != rows:
        raise InputError(
            f"proposer {name}: history has {rows} slots of {columns} tokens and "
            f"{lengths.shape[0]} lengths; the index was made for at most {slots} slots "
            f"of {capacity} tokens"
        )
    if (
        tokens.dtype != np.int32
        or lengths.dtype != np.int32
        or not tokens.flags.c_contiguous
        or not lengths.flags.c_contiguous
    ):
        raise InputError(
            f"proposer {name}: history must be C-contiguous int32 arrays, found tokens "
            f"{tokens.dtype} and lengths {lengths.dtype}"
        )


def check_drafts(name: str, slots: Int32Array, out: Drafts) -> None:
    """Refuse output arrays that do not fit ``slots`` or that a kernel was not compiled for."""
    rows = slots.shape[0]
    if (
        out.tokens.shape[0] != rows
        or out.lengths.shape[0] != rows
        or out.confidence.shape != out.tokens.shape
    ):
        raise InputError(
            f"proposer {name}: drafts are tokens {out.tokens.shape}, lengths "
            f"{out.lengths.shape}, confidence {out.confidence.shape} for {rows} requests; "
            "allowed is [n, k], [n], [n, k]"
        )
    if (
        slots.dtype != np.int32
        or out.tokens.dtype != np.int32
        or out.lengths.dtype != np.int16
        or out.confidence.dtype != np.float32
        or not slots.flags.c_contiguous
        or not out.tokens.flags.c_contiguous
        or not out.lengths.flags.c_contiguous
        or not out.confidence.flags.c_contiguous
    ):
        raise InputError(
            f"proposer {name}: slots, draft tokens, lengths and confidence must be C-contiguous "
            f"int32, int32, int16 and float32, found {slots.dtype}, {out.tokens.dtype}, "
            f"{out.lengths.dtype} and {out.confidence.dtype}"
        )


def bad_slots(name: str, refused: int, history: History, slots: Int32Array) -> InputError:
    """What to raise when ``refused`` of the slots are not in the history."""
    return InputError(
        f"proposer {name}: {refused} of the slots {slots.tolist()} are outside "
        f"the history's 0..{history.tokens.shape[0] - 1}"
    )


def check_slot(name: str, slots: int, slot: int) -> None:
    """Refuse a slot outside the index."""
    if not 0 <= slot < slots:
        raise InputError(f"proposer {name}: slot is {slot}; it must be in 0..{slots - 1}")


class Checked:
    """What a lookup was given last: the same objects need not be checked again."""

    def __init__(self, name: str, num_slots: int, capacity: int) -> None:
        self._name = name
        self._num_slots = num_slots
        self._capacity = capacity
        self._history: History | None = None
        self._slots: Int32Array | None = None
        self._out: Drafts | None = None

    def require(self, history: History, slots: Int32Array, out: Drafts) -> None:
        """Raise InputError unless ``check_arrays`` and ``check_drafts`` are content."""
        if history is self._history and slots is self._slots and out is self._out:
            return
        check_arrays(self._name, self._num_slots, self._capacity, history)
        check_drafts(self._name, slots, out)
        self._history, self._slots, self._out = history, slots, out
