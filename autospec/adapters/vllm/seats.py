"""The running requests as compiled kernels see them: who they are, and their texts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autospec.compiled import by_reference, compiled_brief
from autospec.proposers.base import History
from autospec.records import Int16Array, Int32Array, Int64Array

NO_SEAT = -1
"""Seat of a request that is not decoding, or that came when all seats were taken."""

HANDLE, COUNT, LAST, LIMIT = range(4)
"""Columns of ``Seats.known``: the controller's handle (0: the seat is free), the tokens so far, the
newest of them, and how many there may be in the end."""

MOST_ROOM = np.iinfo(np.int16).max


class SeatArrays(NamedTuple):
    """What is known of the seated [seats], and their texts. By reference."""

    known: Int64Array  # [seats, 4]
    text: Int32Array  # [seats, capacity]
    lengths: Int32Array  # [seats]


class SeatedStep(NamedTuple):
    """What a step of the requests in ``seats`` is planned from and brought. By reference.

    ``offered`` are the tokens that lookups offer; rows of other proposers mean nothing.
    ``counts_and_tokens`` is how many tokens each request got, then these.
    """

    seats: Int32Array  # [n]
    handles: Int64Array  # [n]
    context_tokens: Int32Array  # [n]
    last_tokens: Int32Array  # [n]
    room: Int16Array  # [n]
    counts_and_tokens: Int32Array
    committed: Int16Array  # [n]
    accepted: Int16Array  # [n]
    matched: Int16Array  # [p, n]
    offered: Int32Array  # [p, n, k]
    offer_lengths: Int16Array  # [p, n]
    drafts: Int32Array  # [n * k]
    lookups: int  # as many of the proposers, those that come first


class Seats:
    """A row for each request that decodes. Texts longer than ``capacity`` are not kept."""

    def __init__(self, seats: int, capacity: int) -> None:
        self.known: Int64Array = np.zeros((seats, 4), dtype=np.int64)
        self.history = History(
            np.zeros((seats, capacity), dtype=np.int32), np.zeros(seats, dtype=np.int32)
        )
        self.reference = by_reference(
            SeatArrays(self.known, self.history.tokens, self.history.lengths)
        )
        """How kernels take them."""
        self._capacity = capacity
        self._free = list(range(seats - 1, -1, -1))

    def take(self, handle: int, tokens: Sequence[int], count: int, limit: int) -> int:
        """Seat a request of ``count`` tokens, at least one; NO_SEAT if there is no free seat."""
        if not self._free:
            return NO_SEAT
        seat = self._free.pop()
        self.known[seat] = handle, count, tokens[count - 1], limit
        kept = count if count <= self._capacity else 0
        self.history.lengths[seat] = kept
        self.history.tokens[seat, :kept] = array("i", tokens[:kept])  # faster than from a list
        return seat

    def leave(self, seat: int) -> None:
        """The request of ``seat`` has ended, or will be seated anew."""
        self.known[seat] = 0
        self.history.lengths[seat] = 0
        self._free.append(seat)


@compiled_brief
def describe(seated: SeatArrays, step: SeatedStep) -> None:
    """What a plan needs to know of a step's requests; nothing is offered yet."""
    known, seats, handles = seated.known, step.seats, step.handles
    context_tokens, last_tokens, room = step.context_tokens, step.last_tokens, step.room
    for i in range(seats.shape[0]):
        row = known[seats[i]]
        handles[i] = row[HANDLE]
        context_tokens[i] = row[COUNT]
        last_tokens[i] = row[LAST]
        room[i] = max(0, min(row[LIMIT] - row[COUNT] - 1, MOST_ROOM))
    step.offer_lengths[:] = 0


@compiled_brief
def add_tokens(seated: SeatArrays, step: SeatedStep) -> None:
    """Add a step's tokens to those of its requests that still sit where they sat.

    Writes what was committed and accepted, and how many leading tokens of every offer were right;
    -1 without one.
    """
    known, text, lengths = seated.known, seated.text, seated.lengths
    seats, handles, counts_and_tokens = step.seats, step.handles, step.counts_and_tokens
    offered, offer_lengths, matched = step.offered, step.offer_lengths, step.matched
    committed, accepted = step.committed, step.accepted
    n = seats.shape[0]
    start = n
    for i in range(n):
        count = counts_and_tokens[i]
        committed[i] = count
        accepted[i] = max(0, count - 1)
        for p in range(matched.shape[0]):
            most = min(offer_lengths[p, i], count)
            right = 0
            while right < most and offered[p, i, right] == counts_and_tokens[start + right]:
                right += 1
            matched[p, i] = right if offer_lengths[p, i] > 0 else -1
        seat = seats[i]
        if count > 0 and known[seat, HANDLE] == handles[i]:
            length = lengths[seat]
            if 0 < length <= text.shape[1] - count:
                text[seat, length : length + count] = counts_and_tokens[start : start + count]
                lengths[seat] = length + count
            else:
                lengths[seat] = 0
            known[seat, COUNT] += count
            known[seat, LAST] = counts_and_tokens[start + count - 1]
        start += count


@compiled_brief
def take_drafts(step: SeatedStep, proposer: Int16Array, k: Int16Array) -> int:
    """The planned draft tokens, row by row; zeros where no lookup drafts. Returns their number."""
    offered, drafts = step.offered, step.drafts
    total = 0
    for i in range(k.shape[0]):
        for j in range(k[i]):
            drafts[total] = offered[proposer[i], i, j] if proposer[i] < step.lookups else 0
            total += 1
    return total
