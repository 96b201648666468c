from __future__ import annotations

from math import exp, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autospec.errors import InputError
from autospec.proposers.base import Drafts, History
from autospec.proposers.outcomes import IN_CACHE, IN_OUTPUT, IN_PROMPT
from autospec.proposers.suffix import CACHE_DISCOUNT, WITNESSES, SuffixProposer, log_odds

BIG = 2**31 - 1
K = 6
TOKENS = st.one_of(
    st.lists(st.sampled_from([0, 1, 2, BIG]), max_size=60),
    st.lists(st.sampled_from([0, 1]), min_size=40, max_size=60),  # more matches than are kept
)
Row = list[tuple[int, float]]
Cache = list[int | None]
"""Tokens of retired requests, None between two of them."""


def propose(proposer: SuffixProposer, history: History, slot: int = 0, k: int = K) -> Row:
    out = Drafts(
        np.full((1, k), -7, np.int32), np.full(1, -7, np.int16), np.zeros((1, k), np.float32)
    )
    proposer.propose(history, np.array([slot], np.int32), out)
    length = int(out.lengths[0])
    return [(int(out.tokens[0, j]), round(float(out.confidence[0, j]), 5)) for j in range(length)]


def single(tokens: list[int], capacity: int = 64) -> History:
    row = np.zeros((1, capacity), np.int32)
    row[0, : len(tokens)] = tokens
    return History(row, np.array([len(tokens)], np.int32))


def matching(text: list[int], other: Cache, end: int, limit: int) -> int:
    length = 0
    while length < min(limit, end, len(text)) and other[end - 1 - length] == text[-1 - length]:
        length += 1
    return length


def sigmoid(score: float) -> float:
    return 1.0 / (1.0 + exp(-score))


class Learned:
    """Offsets of a token, a pair and a place, learned by the book."""

    def __init__(self) -> None:
        self.offsets: dict[object, tuple[float, float]] = {}
        self.prompt = 0

    def keys(self, before: int, token: int, place: int, agreeing: int) -> tuple[object, ...]:
        return (token % 4096, (before, token), ("place", place, int(log2(agreeing))))

    def offset(self, key: object) -> float:
        return self.offsets.get(key, (0.0, 0.0))[0]

    def learn(
        self, drafts: list[tuple[tuple[object, ...], int, float]], went_on: list[int]
    ) -> None:
        for (keys, token, score), real in zip(drafts, went_on, strict=False):
            p = sigmoid(score + sum(self.offset(key) for key in keys))
            for key in keys:
                prior = 16.0 if isinstance(key, tuple) and key[0] == "place" else 4.0
                offset, precision = self.offsets.get(key, (0.0, prior))
                precision = min(precision + p * (1.0 - p), 200.0)
                self.offsets[key] = (offset + ((token == real) - p) / precision, precision)
            if token != real:
                return


def reference(text: list[int], cache: Cache, k: int, min_match: int, max_match: int) -> Row:
    """Drafts of one who has learned nothing."""
    drafts = looked_up(Learned(), text, cache, k, min_match, max_match)
    return [(token, round(float(np.float32(sigmoid(score))), 5)) for _, token, score in drafts]


def looked_up(
    learned: Learned, text: list[int], cache: Cache, k: int, min_match: int, max_match: int
) -> list[tuple[tuple[object, ...], int, float]]:
    """All matches by brute force: keys of the offsets, token and score without them.

    ``cache`` is what the ring still holds.
    """
    own: Cache = list(text)
    found: list[tuple[int, int, int]] = []  # (-rank, order of finding, match), own and newest first
    sources: list[tuple[bool, int]] = []
    for cached, source, ends in ((False, own, len(text) - 1), (True, cache, len(cache) - 1)):
        for end in range(ends, min_match - 1, -1):
            match = matching(text, source, end, max_match)
            if match >= min_match and source[end] is not None:
                rank = match - CACHE_DISCOUNT if cached else match
                found.append((-rank, len(sources), match))
                sources.append((cached, end))
    witnesses = [(match, *sources[order]) for _, order, match in sorted(found)[:WITNESSES]]

    row = []
    before = text[-1] if text else 0
    for depth in range(k):
        nexts = []
        for match, cached, end in witnesses:
            source = cache if cached else own
            token = source[end + depth] if end + depth < len(source) else None
            if token is not None:
                nexts.append((token, match, cached, end))
        if not nexts:
            break
        token, match, lead_cached, lead = nexts[0]
        rival = max((m for t, m, _, _ in nexts if t != token), default=0)
        witnesses = [(m, c, e) for t, m, c, e in nexts if t == token]
        score = log_odds(match, depth, len(witnesses), rival, lead_cached)
        place = IN_CACHE if lead_cached else IN_PROMPT if lead <= learned.prompt else IN_OUTPUT
        row.append((learned.keys(before, token, place, match + depth), token, score))
        before = token
        own.append(token)
    return row


@settings(max_examples=300, deadline=None, derandomize=True)
@given(TOKENS, st.integers(1, 3), st.integers(0, 9))
def test_leader_and_confidence_equal_brute_force(
    tokens: list[int], min_match: int, extra: int
) -> None:
    limit = min_match + extra
    proposer = SuffixProposer(1, 64, max_k=K, min_match=min_match, max_match=limit)
    assert propose(proposer, single(tokens)) == reference(tokens, [], K, min_match, limit)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TOKENS, st.lists(st.integers(1, 20), min_size=1, max_size=10))
def test_catching_up_in_chunks_gives_the_same_drafts(tokens: list[int], chunks: list[int]) -> None:
    lazy = SuffixProposer(1, 64)
    history = single(tokens)
    length = 0
    for chunk in chunks:
        length = min(length + chunk, len(tokens))
        history.lengths[0] = length
        fresh = propose(SuffixProposer(1, 64), history)
        assert [token for token, _ in propose(lazy, history)] == [token for token, _ in fresh]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(TOKENS, st.lists(st.integers(1, 20), min_size=2, max_size=10), st.integers(1, 2))
def test_confidence_learns_what_became_of_drafts(
    tokens: list[int], chunks: list[int], min_match: int
) -> None:
    proposer = SuffixProposer(1, 64, max_k=K, min_match=min_match)
    learned = Learned()
    history = single(tokens)
    drafts: list[tuple[tuple[object, ...], int, float]] = []
    length = 0
    for chunk in chunks:
        last, length = length, min(length + chunk, len(tokens))
        learned.learn(drafts, tokens[last:length])
        learned.prompt = learned.prompt or length
        drafts = looked_up(learned, tokens[:length], [], K, min_match, 32)
        history.lengths[0] = length
        row = propose(proposer, history)
        assert [token for token, _ in row] == [token for _, token, _ in drafts]
        assert [sure for _, sure in row] == pytest.approx(
            [sigmoid(score + sum(map(learned.offset, keys))) for keys, _, score in drafts],
            abs=2e-5,
        )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TOKENS, TOKENS)
def test_a_rewound_slot_is_indexed_from_scratch(first: list[int], second: list[int]) -> None:
    first = first + [3] * (len(second) + 1 - len(first))  # the second text is always shorter
    proposer = SuffixProposer(1, 64)
    propose(proposer, single(first))
    assert propose(proposer, single(second)) == reference(second, [], K, 2, 32)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(TOKENS, min_size=1, max_size=8), TOKENS, st.sampled_from([8, 32, 64, 256]))
def test_the_cache_serves_exactly_what_the_ring_still_holds(
    retired: list[list[int]], tokens: list[int], size: int
) -> None:
    proposer = SuffixProposer(1, 64, max_k=K, cache_tokens=size)
    held: Cache = []
    for text in retired:
        proposer.retire(single(text), 0)
        held += [*text[max(0, len(text) - size + 1) :], None]
        expected = reference(tokens, held[-size:], K, 2, 32)
        proposer.reset(0)
        assert propose(proposer, single(tokens)) == expected


def test_a_retired_request_is_drafted_from_until_it_is_overwritten() -> None:
    proposer = SuffixProposer(1, 64, cache_tokens=16)
    proposer.retire(single([1, 2, 3, 4, 5]), 0)
    assert [token for token, _ in propose(proposer, single([9, 1, 2]))] == [3, 4, 5]
    proposer.retire(single(list(range(20, 35))), 0)
    assert propose(proposer, single([9, 1, 2])) == []


def test_without_a_cache_nothing_is_kept() -> None:
    proposer = SuffixProposer(1, 64)
    proposer.retire(single([1, 2, 3, 4, 5]), 0)
    assert propose(proposer, single([9, 1, 2])) == []


def test_cached_matches_never_cross_requests() -> None:
    proposer = SuffixProposer(1, 64, cache_tokens=64)
    proposer.retire(single([7, 1]), 0)
    proposer.retire(single([2, 3, 4]), 0)
    assert propose(proposer, single([9, 1, 2])) == []
    assert [token for token, _ in propose(proposer, single([9, 2, 3]))] == [4]


def test_the_own_text_leads_unless_the_cache_matches_clearly_longer() -> None:
    proposer = SuffixProposer(1, 64, max_k=1, cache_tokens=64)
    proposer.retire(single([11, 12, 13, 14, 1, 2, 50]), 0)
    assert propose(proposer, single([1, 2, 60, 13, 14, 1, 2]))[0][0] == 60
    proposer.reset(0)
    assert propose(proposer, single([1, 2, 60, 12, 13, 14, 1, 2]))[0][0] == 50


def test_reset_isolates_requests() -> None:
    proposer = SuffixProposer(1, 64)
    assert propose(proposer, single([1, 2, 3, 4, 1, 2]))[0][0] == 3
    proposer.reset(0)
    assert propose(proposer, single([1, 2, 9, 9, 9, 8, 1, 2, 5, 3, 4])) == []


def test_slots_do_not_see_each_other() -> None:
    history = History(np.array([[1, 2, 3, 4], [1, 2, 8, 9]], np.int32), np.array([4, 2], np.int32))
    proposer = SuffixProposer(2, 4)
    assert propose(proposer, history, slot=0) == []
    assert propose(proposer, history, slot=1) == []


@pytest.mark.parametrize("tokens", [[], [5], [5, 6]])
def test_too_short_a_text_has_no_draft(tokens: list[int]) -> None:
    assert propose(SuffixProposer(1, 64), single(tokens)) == []


@pytest.mark.parametrize("period", [1, 2, 3])
@pytest.mark.parametrize("cache_tokens", [0, 1000])
def test_repeating_texts_go_on_periodically(period: int, cache_tokens: int) -> None:
    length = 100_000
    text = (np.arange(length, dtype=np.int32) % period)[None]
    history = History(text, np.array([length], np.int32))
    proposer = SuffixProposer(1, length, cache_tokens=cache_tokens)
    for _ in range(2):
        row = propose(proposer, history, k=20)
        assert [token for token, _ in row] == [(length + depth) % period for depth in range(16)]
        proposer.retire(history, 0)


def test_only_the_newest_places_are_walked() -> None:
    text = [7, 1, 2, 5, *([1, 2, 6] * 3), 7, 1, 2]
    near, far = SuffixProposer(1, 64, max_walk=3), SuffixProposer(1, 64, max_walk=4)
    assert propose(near, single(text))[0][0] == 6
    assert propose(far, single(text))[0][0] == 5


def test_odds_follow_the_evidence() -> None:
    alone = log_odds(4, 0, 1, 0, False)
    assert log_odds(8, 0, 1, 0, False) > alone
    assert log_odds(4, 1, 1, 0, False) > alone
    assert log_odds(4, 0, 3, 0, False) > alone
    assert log_odds(4, 0, 1, 2, False) < alone
    assert log_odds(4, 0, 1, 4, False) < log_odds(4, 0, 1, 2, False)
    assert log_odds(4, 0, 1, 0, True) < alone
    assert -10 < log_odds(1, 0, 1, 32, True) < log_odds(32, 15, WITNESSES, 0, False) < 10


def test_what_became_of_drafts_outlives_the_request() -> None:
    proposer = SuffixProposer(1, 64)
    text = single([1, 2, 3, 4, 1, 2])
    before = propose(proposer, text)
    went_on = single([1, 2, 3, 4, 1, 2, 3, 9])
    propose(proposer, went_on)  # 3 was right, 4 was not
    proposer.reset(0)
    after = propose(proposer, text)
    assert [token for token, _ in after] == [token for token, _ in before]
    assert after[0][1] > before[0][1]
    assert after[1][1] < before[1][1]


def test_the_draft_of_a_request_that_ended_is_not_compared_with_the_next_one() -> None:
    proposer = SuffixProposer(1, 64)
    text = single([1, 2, 3, 4, 1, 2])
    before = propose(proposer, text)
    proposer.reset(0)
    propose(proposer, single([5, 6, 7, 8, 5, 9, 3, 4, 6]))
    proposer.reset(0)
    assert propose(proposer, text) == before


def test_memory_is_stated_and_does_not_grow() -> None:
    proposer = SuffixProposer(4, 1000, cache_tokens=5000)
    before = proposer.memory_bytes()
    outcomes = 8 * (4096 + 16384 + 48) + 4 * 4 * 3 + 4 * 4 * 16 * 3
    assert before == 4 * 4 * (1000 + 1024) + 4 * 4 + 16 * 8192 + 3 * 8 * WITNESSES + outcomes
    history = History(np.tile(np.arange(1000, dtype=np.int32), (4, 1)), np.full(4, 1000, np.int32))
    for slot in range(4):
        propose(proposer, history, slot)
        proposer.retire(history, slot)
    assert proposer.memory_bytes() == before


@pytest.mark.parametrize("slot", [-1, 1])
def test_a_slot_out_of_range_is_refused(slot: int) -> None:
    proposer = SuffixProposer(1, 64, cache_tokens=8)
    with pytest.raises(InputError, match=r"outside the history's 0\.\.0"):
        propose(proposer, single([1, 2]), slot)
    with pytest.raises(InputError, match=f"slot is {slot}; it must be in 0..0"):
        proposer.retire(single([1, 2]), slot)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(InputError, match="cache_tokens is -1; it must be 0"):
        SuffixProposer(1, 64, cache_tokens=-1)
    with pytest.raises(InputError, match="max_walk is 0; it must be at least 1"):
        SuffixProposer(1, 64, max_walk=0)
    with pytest.raises(InputError, match="max_match is 1, below min_match 2"):
        SuffixProposer(1, 64, max_match=1)


def test_a_tail_is_gone_on_from_and_forgotten() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    proposer = SuffixProposer(1, 64, max_k=K)
    assert propose(proposer, single([*text, 9])) == []
    tail = single([*text, 9, 3, 4])
    out = Drafts(np.zeros((1, K), np.int32), np.zeros(1, np.int16), np.zeros((1, K), np.float32))
    proposer.propose(tail, np.zeros(1, np.int32), out, tail=2)
    assert out.tokens[0, :4].tolist() == [5, 6, 7, 8]
    # the draft was wrong: what really followed is as if it had never been there
    went_on = single([*text, 9, 5, 6])
    assert propose(proposer, went_on) == propose(SuffixProposer(1, 64, max_k=K), went_on)
