from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autospec.errors import InputError
from autospec.proposers.base import Drafts, History, LookupProposer
from autospec.proposers.ngram import NgramProposer, confidence

BIG = 2**31 - 1
TOKENS = st.lists(st.sampled_from([0, 1, 2, BIG]), max_size=60)


def new_drafts(rows: int, k: int) -> Drafts:
    return Drafts(
        np.full((rows, k), -7, np.int32), np.full(rows, -7, np.int16), np.zeros((rows, k), "f4")
    )


def draft(proposer: LookupProposer, history: History, slot: int, k: int) -> list[int]:
    out = new_drafts(1, k)
    proposer.propose(history, np.array([slot], np.int32), out)
    return [int(token) for token in out.tokens[0, : out.lengths[0]]]


def single(tokens: list[int], capacity: int = 64) -> History:
    row = np.zeros((1, capacity), np.int32)
    row[0, : len(tokens)] = tokens
    return History(row, np.array([len(tokens)], np.int32))


def reference(tokens: list[int], k: int, min_match: int, max_match: int) -> list[int]:
    for width in range(max_match, min_match - 1, -1):
        for end in range(len(tokens) - 1, width - 1, -1):
            if tokens[end - width : end] == tokens[len(tokens) - width :]:
                text = list(tokens)
                for depth in range(k):
                    text.append(text[end + depth])
                return text[len(tokens) :]
    return []


@settings(max_examples=300, deadline=None, derandomize=True)
@given(TOKENS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 9))
def test_drafts_what_followed_the_newest_of_the_longest(
    tokens: list[int], min_match: int, extra: int, k: int
) -> None:
    proposer = NgramProposer(1, 64, max_k=k, min_match=min_match, max_match=min_match + extra)
    expected = reference(tokens, k, min_match, min_match + extra)
    assert draft(proposer, single(tokens), 0, k) == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TOKENS, st.lists(st.integers(1, 20), min_size=1, max_size=10))
def test_catching_up_in_chunks_gives_the_same_drafts(tokens: list[int], chunks: list[int]) -> None:
    lazy = NgramProposer(1, 64)
    history = single(tokens)
    length = 0
    for chunk in chunks:
        length = min(length + chunk, len(tokens))
        history.lengths[0] = length
        assert draft(lazy, history, 0, 8) == draft(NgramProposer(1, 64), history, 0, 8)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TOKENS, TOKENS)
def test_a_rewound_slot_is_indexed_from_scratch(first: list[int], second: list[int]) -> None:
    first = first + [3] * (len(second) + 1 - len(first))  # the second text is always shorter
    proposer = NgramProposer(1, 64)
    draft(proposer, single(first), 0, 8)
    assert draft(proposer, single(second), 0, 8) == reference(second, 8, 2, 4)


def test_reset_isolates_requests() -> None:
    proposer = NgramProposer(2, 64)
    history = single([1, 2, 3, 4, 1, 2])
    assert draft(proposer, history, 0, 2) == [3, 4]
    proposer.reset(0)
    assert draft(proposer, single([1, 2]), 0, 2) == []
    assert draft(proposer, single([1, 2, 9, 9, 9, 8, 1, 2, 5, 3, 4]), 0, 2) == []


def test_rows_are_independent_and_in_the_order_of_slots() -> None:
    history = History(
        np.array([[1, 2, 3, 1, 2], [4, 5, 6, 7, 8], [9, 8, 7, 9, 8]], np.int32),
        np.array([5, 5, 5], np.int32),
    )
    out = new_drafts(3, 2)
    NgramProposer(3, 5, max_k=1).propose(history, np.array([2, 1, 0], np.int32), out)
    assert out.lengths.tolist() == [1, 0, 1]
    assert out.tokens[:, 0].tolist() == [7, -7, 3]


@pytest.mark.parametrize("tokens", [[], [5], [5, 6]])
def test_too_short_a_text_has_no_draft(tokens: list[int]) -> None:
    assert draft(NgramProposer(1, 64), single(tokens), 0, 8) == []


@pytest.mark.parametrize("period", [1, 2, 3])
def test_repeating_texts_go_on_periodically(period: int) -> None:
    text = (np.arange(100_000, dtype=np.int32) % period)[None]
    proposer = NgramProposer(1, 100_000)
    expected = [(100_000 + depth) % period for depth in range(8)]
    history = History(text, np.array([100_000], np.int32))
    assert draft(proposer, history, 0, 8) == expected


def test_a_match_anywhere_in_a_long_text_is_found() -> None:
    text = np.tile(np.array([1, 2, 3, 0], np.int32), 25_000)[None].copy()
    text[0, :6] = [9, 1, 2, 7, 7, 7]
    text[0, -3:] = [9, 1, 2]
    history = History(text, np.array([100_000], np.int32))
    assert draft(NgramProposer(1, 100_000), history, 0, 3) == [7, 7, 7]


def test_confidence_rises_with_match_and_depth() -> None:
    proposer = NgramProposer(1, 64)
    short, long = new_drafts(1, 8), new_drafts(1, 8)
    slots = np.zeros(1, np.int32)
    proposer.propose(single([8, 1, 2, 5, 9, 1, 2]), slots, short)
    proposer.reset(0)
    proposer.propose(single([7, 8, 1, 2, 5, 9, 7, 8, 1, 2]), slots, long)
    assert short.confidence[0, 0] == pytest.approx(confidence(2, 0))
    assert long.confidence[0, 0] == pytest.approx(confidence(4, 0))
    assert (np.diff(short.confidence[0]) > 0).all()
    assert 0 < short.confidence[0, 0] < long.confidence[0, 0] < long.confidence[0, 7] < 1


def test_memory_is_stated_and_does_not_grow() -> None:
    proposer = NgramProposer(256, 4096)
    before = proposer.memory_bytes()
    assert before == 4 * 256 * 3 * 8192 + 4 * 256
    history = History(np.tile(np.arange(4096, dtype=np.int32), (256, 1)), np.full(256, 4096, "i4"))
    proposer.propose(history, np.arange(256, dtype=np.int32), new_drafts(256, 8))
    assert proposer.memory_bytes() == before


def test_lengths_beyond_the_history_are_cut() -> None:
    history = single([1, 2, 3, 1, 2], capacity=5)
    history.lengths[0] = 1000
    assert draft(NgramProposer(1, 64), history, 0, 1) == [3]
    history.lengths[0] = -5
    assert draft(NgramProposer(1, 64), history, 0, 1) == []


@pytest.mark.parametrize("slot", [-1, 1])
def test_a_slot_out_of_range_is_refused(slot: int) -> None:
    proposer = NgramProposer(1, 64)
    with pytest.raises(InputError, match=r"outside the history's 0\.\.0"):
        draft(proposer, single([1, 2]), slot, 8)
    with pytest.raises(InputError, match=f"slot is {slot}; it must be in 0..0"):
        proposer.reset(slot)


def test_a_history_larger_than_the_index_is_refused() -> None:
    with pytest.raises(InputError, match="1 slots of 65 tokens"):
        draft(NgramProposer(1, 64), single([1], capacity=65), 0, 8)


def test_arrays_of_another_type_or_layout_are_refused() -> None:
    proposer = NgramProposer(1, 64)
    wide = History(np.zeros((1, 64), np.int64), np.zeros(1, np.int32))
    with pytest.raises(InputError, match="found tokens int64"):
        draft(proposer, wide, 0, 8)
    out = new_drafts(1, 8)
    with pytest.raises(InputError, match=r"allowed is \[n, k\]"):
        proposer.propose(single([1]), np.zeros(2, np.int32), out)
    two = new_drafts(2, 8)
    strided = Drafts(two.tokens, two.lengths, np.zeros((8, 2), np.float32).T)
    with pytest.raises(InputError, match="C-contiguous"):
        proposer.propose(single([1]), np.zeros(2, np.int32), strided)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(InputError, match="min_match is 0; it must be at least 1"):
        NgramProposer(1, 64, min_match=0)
    with pytest.raises(InputError, match="max_match is 2, below min_match 3"):
        NgramProposer(1, 64, min_match=3, max_match=2)
