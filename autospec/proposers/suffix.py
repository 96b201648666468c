"""Suffix lookup: the longest match of the text's end, its confidence from all other matches.

After "SuffixDecoding" (Oliaro et al., arXiv 2411.04975), without its trees: every position is
chained to the previous one whose last ``min_match`` tokens hash alike (the match finder of LZ77
compressors). Drafting walks the newest links of a chain, measures each match backward and keeps
the longest. The best of them leads: its continuation is the draft. The others are witnesses:
those that go on alike raise the confidence, the longest that goes on differently lowers it.
What became of earlier drafts moves it as well (``outcomes``).
(Letting them vote on the token instead brought no accepted tokens in recorded traces.) All
loops are capped, so no text is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log2
from typing import NamedTuple

import numpy as np

from autospec.compiled import by_reference, compiled, compiled_brief, prepared
from autospec.errors import InputError
from autospec.proposers.base import Drafts, History, smallest_call
from autospec.proposers.index import (
    Checked,
    bad_slots,
    check_arrays,
    check_match,
    check_positive,
    check_slot,
    match_length,
    table_size,
    window_hash,
)
from autospec.proposers.outcomes import (
    IN_CACHE,
    IN_OUTPUT,
    IN_PROMPT,
    Outcomes,
    learn_outcome,
    pair_row,
    place_row,
    token_row,
)
from autospec.records import Float32Array, Int16Array, Int32Array, Int64Array, ProposerInfo

WITNESSES = 16
"""Matches that are kept for a draft, its leader included."""

SEPARATOR = -1
"""Ends a request in the cache; equal to no token, so no match or draft crosses it."""

CACHE_DISCOUNT = 2
"""A match in the cache leads only if it is longer than one in the request by more than this."""


_LOG2 = np.log2(np.maximum(np.arange(256.0), 1.0))


@compiled
def _log2(n: int) -> float:
    """Of a number of at least one; most are small, and a table is faster."""
    return _LOG2[n] if n < _LOG2.shape[0] else log2(float(n))


@compiled
def log_odds(match: int, depth: int, agreeing: int, rival: int, cached: bool) -> float:
    """What the matches say of draft position ``depth`` (0 first), if all before it are accepted.

    A sum of log2 of the tokens that agree (``match`` and the draft before this position),
    log2 of the ``agreeing`` matches, how close the longest match that goes on differently comes
    (``rival`` tokens, 0 for none), and whether the leader lies in the cache. Coefficients fitted
    on recorded greedy outputs of chat, code-edit, math and summarize requests.
    """
    score = 0.55 * _log2(match + depth) + 0.75 * _log2(agreeing) - 0.15
    if rival > 0:
        score -= 3.0 / (1.0 + max(match - rival, 0))
    if cached:
        score -= 1.3
    return score


@compiled
def _cached_match(
    cache: Int32Array, source: int, oldest: int, tokens: Int32Array, slot: int, end: int, limit: int
) -> int:
    """How many tokens before ``source`` in the cache equal those before ``end`` in the slot."""
    mask = cache.shape[0] - 1
    limit = min(limit, min(end, source - oldest))
    length = 0
    while length < limit and cache[(source - 1 - length) & mask] == tokens[slot, end - 1 - length]:
        length += 1
    return length


@compiled
def _admit(
    count: int,
    match: int,
    rank: int,
    source: int,
    matches: Int64Array,
    ranks: Int64Array,
    sources: Int64Array,
) -> int:
    """Insert behind all matches of the same rank; the last falls out. Returns the count."""
    if count < ranks.shape[0]:
        count += 1
    elif ranks[count - 1] >= rank:
        return count
    place = count - 1
    while place > 0 and ranks[place - 1] < rank:
        matches[place] = matches[place - 1]
        ranks[place] = ranks[place - 1]
        sources[place] = sources[place - 1]
        place -= 1
    matches[place] = match
    ranks[place] = rank
    sources[place] = source
    return count


@compiled
def _catch_up(
    tokens: Int32Array,
    slot: int,
    length: int,
    min_match: int,
    heads: Int32Array,
    links: Int32Array,
    indexed: Int32Array,
) -> None:
    """Chain every position that has ``min_match`` tokens before it and a token after it."""
    if length < indexed[slot]:  # rewound: what was indexed may no longer be there
        heads[slot] = 0
        indexed[slot] = 0
    mask = heads.shape[1] - 1
    for end in range(max(indexed[slot], min_match), length):
        bucket = window_hash(tokens, slot, end, min_match) & mask
        links[slot, end] = heads[slot, bucket]
        heads[slot, bucket] = end
    indexed[slot] = max(length, 0)


@compiled_brief
def _propose(
    tokens: Int32Array,
    lengths: Int32Array,
    slots: Int32Array,
    tail: int,
    min_match: int,
    max_match: int,
    max_k: int,
    max_walk: int,
    heads: Int32Array,
    links: Int32Array,
    indexed: Int32Array,
    cache: Int32Array,
    cache_heads: Int64Array,
    cache_links: Int32Array,
    cached: int,
    matches: Int64Array,
    ranks: Int64Array,
    sources: Int64Array,
    outcomes: Outcomes,
    out_tokens: Int32Array,
    out_lengths: Int16Array,
    out_confidence: Float32Array,
) -> int:
    """Catch up and draft for every row; returns how many slots were out of range.

    The last ``tail`` tokens of a text are matched but not indexed.
    A source is the position after a match: in the slot's own text if not negative, else
    ``-1 - source`` in the cache.
    """
    k = min(max_k, out_tokens.shape[1])
    oldest = max(cached - cache.shape[0], 0)
    cache_mask = cache.shape[0] - 1
    offsets = outcomes.offsets
    refused = 0
    for row in range(slots.shape[0]):
        out_lengths[row] = 0
        slot = slots[row]
        if slot < 0 or slot >= tokens.shape[0]:
            refused += 1
            continue
        length = min(lengths[slot], tokens.shape[1])
        _catch_up(tokens, slot, length - tail, min_match, heads, links, indexed)
        if outcomes.prompts[slot] == 0 or length < outcomes.prompts[slot]:
            outcomes.prompts[slot] = length - tail
        if tail == 0:
            learn_outcome(outcomes, tokens, slot, length)
        if length < min_match:
            continue
        hashed = window_hash(tokens, slot, length, min_match)

        count = 0
        walked = 0
        source = np.int64(heads[slot, hashed & (heads.shape[1] - 1)])
        while source != 0 and walked < max_walk:
            match = match_length(tokens, slot, source, length, max_match)
            if match >= min_match:
                count = _admit(count, match, match, source, matches, ranks, sources)
                if count == ranks.shape[0] and ranks[count - 1] == max_match:
                    break
            source = np.int64(links[slot, source])
            walked += 1
        if cached > 0:
            walked = 0
            source = cache_heads[hashed & (cache_heads.shape[0] - 1)]
            while source - min_match >= oldest and source > 0 and walked < max_walk:
                match = _cached_match(cache, source, oldest, tokens, slot, length, max_match)
                if match >= min_match:
                    rank = match - CACHE_DISCOUNT
                    count = _admit(count, match, rank, -1 - source, matches, ranks, sources)
                    if count == ranks.shape[0] and ranks[count - 1] >= max_match - CACHE_DISCOUNT:
                        break
                distance = cache_links[source & cache_mask]
                if distance == 0:
                    break
                source -= distance
                walked += 1
        if count == 0:
            continue

        depth = 0
        before = tokens[slot, length - 1]
        while depth < k:
            # Keep the matches that go on like the first that goes on at all, the leader.
            leader_token = SEPARATOR
            agreeing = 0
            rival = 0
            for candidate in range(count):
                source = sources[candidate]
                match = matches[candidate]
                if source >= 0:
                    position = source + depth
                    if position < length:
                        token = tokens[slot, position]
                    else:  # the copy reached the end of the text: go on with the draft itself
                        token = out_tokens[row, position - length]
                else:
                    position = -1 - source + depth
                    token = cache[position & cache_mask] if position < cached else SEPARATOR
                    if token == SEPARATOR:
                        continue
                if agreeing == 0:
                    leader_token = token
                if token == leader_token:
                    sources[agreeing] = source
                    matches[agreeing] = match
                    agreeing += 1
                else:
                    rival = max(rival, match)
            if agreeing == 0:
                break
            out_tokens[row, depth] = leader_token
            place = IN_OUTPUT
            if sources[0] < 0:
                place = IN_CACHE
            elif sources[0] <= outcomes.prompts[slot]:
                place = IN_PROMPT
            score = log_odds(matches[0], depth, agreeing, rival, place == IN_CACHE)
            place = place_row(place, int(_log2(matches[0] + depth)))
            if tail == 0:
                outcomes.drafts[slot, depth] = leader_token
                outcomes.places[slot, depth] = place
                outcomes.scores[slot, depth] = score
            score += offsets[token_row(leader_token)]
            score += offsets[pair_row(before, leader_token)]
            score += offsets[place]
            out_confidence[row, depth] = 1.0 / (1.0 + exp(-score))
            before = leader_token
            count = agreeing
            depth += 1
        out_lengths[row] = depth
        if tail == 0:
            outcomes.starts[slot] = length
            outcomes.counts[slot] = depth
    return refused


class _Arguments(NamedTuple):
    """Those of ``_propose`` that last, by reference."""

    tokens: Int32Array
    lengths: Int32Array
    slots: Int32Array
    min_match: int
    max_match: int
    max_k: int
    max_walk: int
    heads: Int32Array
    links: Int32Array
    indexed: Int32Array
    cache: Int32Array
    cache_heads: Int64Array
    cache_links: Int32Array
    matches: Int64Array
    ranks: Int64Array
    sources: Int64Array
    outcomes: Outcomes
    out_tokens: Int32Array
    out_lengths: Int16Array
    out_confidence: Float32Array


@compiled_brief
def _propose_bound(of: _Arguments, cached: int) -> int:
    return _propose(
        of.tokens, of.lengths, of.slots, 0, of.min_match, of.max_match, of.max_k, of.max_walk,
        of.heads, of.links, of.indexed, of.cache, of.cache_heads, of.cache_links, cached,
        of.matches, of.ranks, of.sources, of.outcomes, of.out_tokens, of.out_lengths,
        of.out_confidence,
    )  # fmt: skip


@compiled
def _retire(
    tokens: Int32Array,
    slot: int,
    length: int,
    min_match: int,
    cache: Int32Array,
    cache_heads: Int64Array,
    cache_links: Int32Array,
    cached: int,
) -> int:
    """Append the slot's text and a separator to the ring; returns the new count of positions."""
    size = cache.shape[0]
    head_mask = cache_heads.shape[0] - 1
    start = max(0, length - (size - 1))
    for end in range(start, length):
        place = cached & (size - 1)
        cache[place] = tokens[slot, end]
        cache_links[place] = 0
        if end - start >= min_match:
            bucket = window_hash(tokens, slot, end, min_match) & head_mask
            newest = cache_heads[bucket]
            if newest > 0 and cached - newest < size:
                cache_links[place] = cached - newest
            cache_heads[bucket] = cached
        cached += 1
    cache[cached & (size - 1)] = SEPARATOR
    return cached + 1


class SuffixProposer:
    """Drafts what followed the longest match of the end of the text.

    Matches have ``min_match`` to ``max_match`` tokens and lie in the same request (prompt or
    output) or, if ``cache_tokens`` is not 0, among the last ``cache_tokens`` (rounded up to a power
    of two) tokens of retired requests. Of equally long matches the newest leads, and the request's
    own before a cached one that is not longer by more than CACHE_DISCOUNT. Only the newest
    ``max_walk`` places that may share the last ``min_match`` tokens are looked at, in the request
    and in the cache each.

    A draft ends early only when no match has a next token, which happens in cached text alone:
    in the request's own text, copying goes on periodically. Memory is fixed at construction:
    ``4 * slots * (capacity + t)`` bytes, ``t`` the power of two at or above the capacity, 16 bytes
    per (rounded) cached token, and for what became of drafts ``12 * slots * max_k`` and 0.2 MB.
    Not to be shared between threads.
    """

    def __init__(
        self,
        slots: int,
        capacity: int,
        max_k: int = 16,
        min_match: int = 2,
        max_match: int = 32,
        cache_tokens: int = 0,
        name: str = "suffix",
        max_walk: int = 64,
    ) -> None:
        check_positive(name, "slots", slots)
        check_positive(name, "capacity", capacity)
        check_positive(name, "max_k", max_k)
        check_positive(name, "min_match", min_match)
        check_positive(name, "max_walk", max_walk)
        check_match(name, min_match, max_match)
        if cache_tokens < 0:
            raise InputError(
                f"proposer {name}: cache_tokens is {cache_tokens}; it must be 0 (no cache) or more"
            )
        self.info = ProposerInfo(name, "lookup", max_k)
        self._slots = slots
        self._capacity = capacity
        self._min_match = min_match
        self._max_match = max_match
        self._max_walk = max_walk
        self._heads = np.zeros((slots, table_size(capacity)), np.int32)
        self._links = np.zeros((slots, capacity), np.int32)
        self._indexed = np.zeros(slots, np.int32)
        cache_size = table_size(cache_tokens) if cache_tokens else 1
        self._cache = np.full(cache_size, SEPARATOR, np.int32)
        self._cache_heads = np.zeros(cache_size, np.int64)
        self._cache_links = np.zeros(cache_size, np.int32)
        self._cached = 0
        self._cache_tokens = cache_tokens
        self._matches = np.zeros(WITNESSES, np.int64)
        self._ranks = np.zeros(WITNESSES, np.int64)
        self._sources = np.zeros(WITNESSES, np.int64)
        self._outcomes = Outcomes.empty(slots, max_k)
        self._checked = Checked(name, slots, capacity)
        self._warm()

    def _warm(self) -> None:
        history, slots, drafts = smallest_call()
        self.propose(history, slots, drafts)
        arguments = self._arguments(history, slots, drafts)
        _propose_bound(arguments, 0)
        self._propose_bound = prepared(_propose_bound, arguments, 0)
        _retire(
            history.tokens,
            0,
            0,
            self._min_match,
            self._cache.copy()[:1],
            self._cache_heads.copy()[:1],
            self._cache_links.copy()[:1],
            0,
        )

    def reset(self, slot: int) -> None:
        """Forget the slot's last request; a new one starts there."""
        check_slot(self.info.name, self._slots, slot)
        self._heads[slot] = 0
        self._indexed[slot] = 0
        self._outcomes.starts[slot] = 0
        self._outcomes.prompts[slot] = 0

    def propose(self, history: History, slots: Int32Array, out: Drafts, tail: int = 0) -> None:
        """Draft for the requests in ``slots`` [n], writing into ``out``.

        The last ``tail`` tokens of each are somebody's draft: gone on from, but not remembered.
        Raises InputError when arrays or slots do not fit; rows of good slots are written anyway.
        """
        self._checked.require(history, slots, out)
        refused = _propose(
            history.tokens,
            history.lengths,
            slots,
            tail,
            self._min_match,
            self._max_match,
            self.info.max_k,
            self._max_walk,
            self._heads,
            self._links,
            self._indexed,
            self._cache,
            self._cache_heads,
            self._cache_links,
            self._cached,
            self._matches,
            self._ranks,
            self._sources,
            self._outcomes,
            out.tokens,
            out.lengths,
            out.confidence,
        )
        if refused:
            raise bad_slots(self.info.name, refused, history, slots)

    def bind(self, history: History, slots: Int32Array, out: Drafts) -> Callable[[], None]:
        """``propose`` with these very arguments; see ``BindableLookup``."""
        self._checked.require(history, slots, out)
        kernel, arguments = self._propose_bound, self._arguments(history, slots, out)

        def propose() -> None:
            refused = kernel(arguments, self._cached)
            if refused:
                raise bad_slots(self.info.name, refused, history, slots)

        return propose

    def _arguments(self, history: History, slots: Int32Array, out: Drafts) -> _Arguments:
        return by_reference(
            _Arguments(
                history.tokens, history.lengths, slots, self._min_match, self._max_match,
                self.info.max_k, self._max_walk, self._heads, self._links, self._indexed,
                self._cache, self._cache_heads, self._cache_links, self._matches, self._ranks,
                self._sources, by_reference(self._outcomes), out.tokens, out.lengths,
                out.confidence,
            )
        )  # fmt: skip

    def retire(self, history: History, slot: int) -> None:
        """The request in ``slot`` ended well: its tokens enter the cache, if there is one."""
        if self._cache_tokens == 0:
            return
        check_arrays(self.info.name, self._slots, self._capacity, history)
        check_slot(self.info.name, history.tokens.shape[0], slot)
        self._cached = _retire(
            history.tokens,
            int(slot),
            min(int(history.lengths[slot]), history.tokens.shape[1]),
            self._min_match,
            self._cache,
            self._cache_heads,
            self._cache_links,
            self._cached,
        )

    def memory_bytes(self) -> int:
        """Bytes held now, and for ever at this number of slots and capacity."""
        index = (self._heads, self._links, self._indexed)
        cache = (self._cache, self._cache_heads, self._cache_links)
        scratch = (self._matches, self._ranks, self._sources)
        return sum(array.nbytes for array in (*index, *cache, *scratch, *self._outcomes))
