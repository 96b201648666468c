"""The running requests in arrays: their texts, what a plan is told of them, what a step adds."""

from __future__ import annotations

from itertools import chain

import numpy as np
from numpy.typing import NDArray

from autospec.adapters.vllm.seats import (
    COUNT,
    LAST,
    MOST_ROOM,
    NO_SEAT,
    Seats,
    add_tokens,
    describe,
    take_drafts,
)
from autospec.adapters.vllm.step_arrays import StepArrays, StepMemory

PROMPT = [1, 2, 3]
LOOKUPS, K = 2, 4


def step_arrays(requests: int) -> StepArrays:
    return StepMemory(requests, LOOKUPS, LOOKUPS, K, has_model=False).of(requests)


def add(seats: Seats, arrays: StepArrays, *added: list[int]) -> None:
    tokens = [*(len(each) for each in added), *chain(*added)]
    arrays.counts_and_tokens[: len(tokens)] = tokens
    add_tokens(seats.reference, arrays.reference)


def text(seats: Seats, seat: int) -> list[int]:
    found: NDArray[np.int32] = seats.history.tokens[seat, : seats.history.lengths[seat]]
    return [int(token) for token in found]


def test_a_seat_is_given_once_and_given_back() -> None:
    seats = Seats(1, 6)
    seat = seats.take(7, PROMPT, 2, 10)
    assert text(seats, seat) == PROMPT[:2]
    assert seats.take(8, PROMPT, 3, 10) == NO_SEAT
    seats.leave(seat)
    assert seats.take(9, [5], 1, 10) == seat
    assert text(seats, seat) == [5]


def test_a_plan_is_told_of_the_seated() -> None:
    seats = Seats(3, 6)
    arrays = step_arrays(2)
    arrays.seats[:] = [seats.take(7, PROMPT, 3, 10), seats.take(8, [9], 1, 1 << 20)]
    arrays.offer_lengths[:] = 3
    describe(seats.reference, arrays.reference)
    assert arrays.handles.tolist() == [7, 8]
    assert arrays.context_tokens.tolist() == [3, 1]
    assert arrays.last_tokens.tolist() == [3, 9]
    assert arrays.room.tolist() == [6, MOST_ROOM]
    assert not arrays.offer_lengths.any()


def test_a_step_adds_its_tokens_and_says_which_offers_were_right() -> None:
    seats = Seats(3, 6)
    arrays = step_arrays(3)
    arrays.seats[:] = [seats.take(10 + each, PROMPT, 3, 10) for each in range(3)]
    describe(seats.reference, arrays.reference)
    arrays.offer_lengths[:] = [[3, 4, 0], [2, 0, 2]]
    arrays.offered[0, 0, :3] = [4, 5, 9]
    arrays.offered[0, 1, :4] = [6, 7, 7, 7]
    arrays.offered[1, 0, :2] = [9, 5]
    arrays.offered[1, 2, :2] = [8, 8]
    add(seats, arrays, [4, 5, 6], [6], [])
    assert arrays.committed.tolist() == [3, 1, 0]
    assert arrays.accepted.tolist() == [2, 0, 0]
    assert arrays.matched.tolist() == [[2, 1, -1], [0, -1, 0]]
    first, second, third = arrays.seats.tolist()
    assert text(seats, first) == [*PROMPT, 4, 5, 6]
    assert text(seats, second) == [*PROMPT, 6]
    assert text(seats, third) == PROMPT
    assert seats.known[arrays.seats, COUNT].tolist() == [6, 4, 3]
    assert seats.known[arrays.seats, LAST].tolist() == [6, 6, 3]


def test_a_text_that_grows_too_long_is_dropped_but_counted() -> None:
    seats = Seats(2, 4)
    arrays = step_arrays(2)
    arrays.seats[:] = [seats.take(7, PROMPT, 3, 10), seats.take(8, [0] * 5, 5, 10)]
    describe(seats.reference, arrays.reference)
    add(seats, arrays, [4], [4])
    assert [text(seats, seat) for seat in arrays.seats.tolist()] == [[*PROMPT, 4], []]
    add(seats, arrays, [5], [5])
    assert [text(seats, seat) for seat in arrays.seats.tolist()] == [[], []]
    assert seats.known[arrays.seats, COUNT].tolist() == [5, 7]


def test_tokens_of_a_request_that_has_left_are_not_given_to_the_next_one() -> None:
    seats = Seats(1, 6)
    arrays = step_arrays(1)
    seat = seats.take(7, PROMPT, 3, 10)
    arrays.seats[:] = seat
    describe(seats.reference, arrays.reference)
    seats.leave(seat)
    seats.take(8, [9], 1, 10)
    add(seats, arrays, [4])
    assert text(seats, seat) == [9]
    assert arrays.committed.tolist() == [1]


def test_drafts_are_those_of_the_planned_lookups_and_zeros_for_the_others() -> None:
    arrays = StepMemory(3, LOOKUPS + 1, LOOKUPS, K, has_model=True).of(3)
    arrays.offered[:] = np.arange(3 * 3 * K).reshape(3, 3, K)
    arrays.drafts[:] = -1
    proposer, k = np.array([1, -1, 2], dtype=np.int16), np.array([2, 0, 3], dtype=np.int16)
    assert take_drafts(arrays.reference, proposer, k) == 5
    assert arrays.drafts[:5].tolist() == [*arrays.offered[1, 0, :2].tolist(), 0, 0, 0]


def test_arrays_of_steps_of_any_size_share_their_memory() -> None:
    memory = StepMemory(4, LOOKUPS, LOOKUPS, K, has_model=True)
    small, large = memory.of(2), memory.of(4)
    assert memory.of(2) is small
    assert np.shares_memory(small.offered, large.offered)
    assert small.offers[1].confidence.flags.c_contiguous
    assert np.shares_memory(small.offers[1].tokens, small.offered[1])
    assert small.batch(3, 0) is small.batch(3, 0)
    assert small.batch(0, 5).prefill_tokens == 5
