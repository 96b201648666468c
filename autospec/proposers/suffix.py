"""Suffix lookup: the longest match of the text's end, with a vote among several occurrences.

After "SuffixDecoding" (Oliaro et al., arXiv 2411.04975), without its trees: every position is
chained to the previous one whose last ``min_match`` tokens hash alike (the match finder of LZ77
compressors). Drafting walks the newest links of a chain, measures each match backward, keeps
the longest and lets them vote token by token. All loops are capped, so no text is slow.
"""

from __future__ import annotations

from math import exp, log2

import numpy as np

from autospec.compiled import compiled
from autospec.errors import InputError
from autospec.proposers.base import Drafts, History
from autospec.proposers.index import (
    check_arrays,
    check_drafts,
    check_match,
    check_positive,
    check_slot,
    match_length,
    table_size,
    window_hash,
)
from autospec.records import Float32Array, Int16Array, Int32Array, Int64Array, ProposerInfo

VOTERS = 16
"""Occurrences that vote, the longest matches first."""

SEPARATOR = -1
"""Ends a request in the cache; equal to no token, so no match or draft crosses it."""

VOTE_DECAY = 0.5
"""Weight of a voter for each token that its match is shorter than the longest."""


@compiled
def confidence(match: int, share: float, depth: int) -> float:
    """Raw score of draft position ``depth`` (0 first).

    ``match`` is the length of the longest match, ``share`` the voters' weight behind this token.
    """
    evidence = log2(float(match))
    return share / (1.0 + exp(1.0 - 0.7 * evidence - 0.7 * log2(1.0 + depth)))


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
def _admit(count: int, match: int, source: int, matches: Int64Array, sources: Int64Array) -> int:
    """Insert behind all matches that are as long; the shortest falls out. Returns the count."""
    if count < matches.shape[0]:
        count += 1
    elif matches[count - 1] >= match:
        return count
    place = count - 1
    while place > 0 and matches[place - 1] < match:
        matches[place] = matches[place - 1]
        sources[place] = sources[place - 1]
        place -= 1
    matches[place] = match
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


@compiled
def _propose(
    tokens: Int32Array,
    lengths: Int32Array,
    slots: Int32Array,
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
    sources: Int64Array,
    votes: Int32Array,
    out_tokens: Int32Array,
    out_lengths: Int16Array,
    out_confidence: Float32Array,
) -> int:
    """Catch up and draft for every row; returns how many slots were out of range.

    A source is the position after a match: in the slot's own text if not negative, else
    ``-1 - source`` in the cache.
    """
    k = min(max_k, out_tokens.shape[1])
    oldest = max(cached - cache.shape[0], 0)
    cache_mask = cache.shape[0] - 1
    refused = 0
    for row in range(slots.shape[0]):
        out_lengths[row] = 0
        slot = slots[row]
        if slot < 0 or slot >= tokens.shape[0]:
            refused += 1
            continue
        length = min(lengths[slot], tokens.shape[1])
        _catch_up(tokens, slot, length, min_match, heads, links, indexed)
        if length < min_match:
            continue
        hashed = window_hash(tokens, slot, length, min_match)

        count = 0
        walked = 0
        source = np.int64(heads[slot, hashed & (heads.shape[1] - 1)])
        while source != 0 and walked < max_walk:
            match = match_length(tokens, slot, source, length, max_match)
            if match >= min_match:
                count = _admit(count, match, source, matches, sources)
                if matches[count - 1] == max_match and count == matches.shape[0]:
                    break
            source = np.int64(links[slot, source])
            walked += 1
        if cached > 0:
            walked = 0
            source = cache_heads[hashed & (cache_heads.shape[0] - 1)]
            while source - min_match >= oldest and source > 0 and walked < max_walk:
                match = _cached_match(cache, source, oldest, tokens, slot, length, max_match)
                if match >= min_match:
                    count = _admit(count, match, -1 - source, matches, sources)
                    if matches[count - 1] == max_match and count == matches.shape[0]:
                        break
                distance = cache_links[source & cache_mask]
                if distance == 0:
                    break
                source -= distance
                walked += 1
        if count == 0:
            continue

        longest = matches[0]
        depth = 0
        while depth < k:
            # Each voter's next token; one that has none left or was outvoted is out.
            alive = 0
            total = 0.0
            for voter in range(count):
                source = sources[voter]
                if source >= 0:
                    position = source + depth
                    if position < length:
                        token = tokens[slot, position]
                    else:  # the copy reached the end of the text: go on with the draft itself
                        token = out_tokens[row, position - length]
                else:
                    position = -1 - source + depth
                    if position >= cached:
                        continue
                    token = cache[position & cache_mask]
                    if token == SEPARATOR:
                        continue
                votes[alive] = token
                sources[alive] = source
                matches[alive] = matches[voter]
                alive += 1
                total += VOTE_DECAY ** (longest - matches[voter])
            if alive == 0:
                break
            count = alive
            best_token = votes[0]
            best_weight = 0.0
            for voter in range(count):
                token = votes[voter]
                if voter > 0 and token == best_token:
                    continue
                weight = 0.0
                for other in range(voter, count):
                    if votes[other] == token:
                        weight += VOTE_DECAY ** (longest - matches[other])
                if weight > best_weight:
                    best_weight = weight
                    best_token = token
            out_tokens[row, depth] = best_token
            out_confidence[row, depth] = confidence(longest, best_weight / total, depth)
            alive = 0
            for voter in range(count):
                if votes[voter] == best_token:
                    sources[alive] = sources[voter]
                    matches[alive] = matches[voter]
                    alive += 1
            count = alive
            depth += 1
        out_lengths[row] = depth
    return refused


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
    """Drafts what followed the longest matches of the end of the text, by weighted vote.

    Matches have ``min_match`` to ``max_match`` tokens and lie in the same request (prompt or
    output) or, if ``cache_tokens`` is not 0, among the last ``cache_tokens`` (rounded up to a power
    of two) tokens of retired requests. Of equally long matches the request's own, newest weigh
    first. Only the newest ``max_walk`` places that share the last ``min_match`` tokens are
    looked at, in the request and in the cache each.

    A draft ends early only when no voter has a next token, which happens in cached text alone:
    in the request's own text, copying goes on periodically. Memory is fixed at construction:
    ``4 * slots * (capacity + t)`` plus ``16`` to ``24`` bytes per cached token, ``t`` the power of
    two at or above the capacity.
    """

    def __init__(
        self,
        slots: int,
        capacity: int,
        max_k: int = 16,
        min_match: int = 2,
        max_match: int = 32,
        cache_tokens: int = 0,
        max_walk: int = 64,
        name: str = "suffix",
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
        self._matches = np.zeros(VOTERS, np.int64)
        self._voters = np.zeros(VOTERS, np.int64)
        self._votes = np.zeros(VOTERS, np.int32)
        self._warm()

    def _warm(self) -> None:
        history = History(np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
        drafts = Drafts(
            np.zeros((1, 1), np.int32), np.zeros(1, np.int16), np.zeros((1, 1), np.float32)
        )
        self.propose(history, np.zeros(1, np.int32), drafts)
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

    def propose(self, history: History, slots: Int32Array, out: Drafts) -> None:
        """Draft for the requests in ``slots`` [n], writing into ``out``.

        Raises InputError when arrays or slots do not fit; rows of good slots are written anyway.
        """
        check_arrays(self.info.name, self._slots, self._capacity, history)
        check_drafts(self.info.name, slots, out)
        refused = _propose(
            history.tokens,
            history.lengths,
            slots,
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
            self._voters,
            self._votes,
            out.tokens,
            out.lengths,
            out.confidence,
        )
        if refused:
            raise InputError(
                f"proposer {self.info.name}: {refused} of the slots {slots.tolist()} are outside "
                f"the history's 0..{history.tokens.shape[0] - 1}"
            )

    def retire(self, history: History, slot: int) -> None:
        """The request in ``slot`` ended well: its newest tokens enter the cache, if there is one."""
        if self._cache_tokens == 0:
            return
        check_arrays(self.info.name, self._slots, self._capacity, history)
        check_slot(self.info.name, history.tokens.shape[0], slot)
        self._cached = _retire(
            history.tokens,
            slot,
            min(int(history.lengths[slot]), history.tokens.shape[1]),
            self._min_match,
            self._cache,
            self._cache_heads,
            self._cache_links,
            self._cached,
        )

    def memory_bytes(self) -> int:
        """Bytes held now, and for ever at this number of slots and capacity."""
        arrays = (self._heads, self._links, self._indexed, self._matches, self._voters)
        cached = (self._cache, self._cache_heads, self._cache_links, self._votes)
        return sum(array.nbytes for array in (*arrays, *cached))
