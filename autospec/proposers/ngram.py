"""Prompt lookup: the last tokens occurred before in this request; draft what followed them.

Saxena, "Prompt Lookup Decoding" (2023). One hash table per match length holds the newest place
where each n-gram ended, so the longest match is found exactly with one probe per length,
whatever the length of the history.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log2
from typing import NamedTuple

import numpy as np

from autospec.compiled import by_reference, compiled, compiled_brief, prepared
from autospec.proposers.base import Drafts, History, smallest_call
from autospec.proposers.index import (
    Checked,
    bad_slots,
    check_match,
    check_positive,
    check_slot,
    match_length,
    table_size,
    window_hash,
)
from autospec.records import Float32Array, Int16Array, Int32Array, ProposerInfo

EVIDENCE_LIMIT = 32
"""Tokens of a match that still add to its confidence; finding it needs only ``max_match``."""


@compiled
def confidence(match: int, depth: int) -> float:
    """Raw score of draft position ``depth`` (0 first), P(accepted | all before it accepted).

    A logistic of log2 of the tokens that agree: the match and the draft before this position.
    Coefficients fitted on recorded greedy outputs of chat, code-edit, math and summarize requests.
    """
    evidence = log2(float(min(match, EVIDENCE_LIMIT) + depth))
    return 1.0 / (1.0 + exp(0.95 - 0.85 * evidence))


@compiled
def _find(
    tokens: Int32Array, slot: int, end: int, width: int, heads: Int32Array, order: int
) -> int:
    """Bucket that holds, or should hold, the ``width``-gram ending before ``end``."""
    mask = heads.shape[2] - 1
    bucket: int = window_hash(tokens, slot, end, width) & mask
    while True:
        source = heads[slot, order, bucket]
        if source == 0 or match_length(tokens, slot, source, end, width) == width:
            return bucket
        bucket = (bucket + 1) & mask


@compiled_brief
def _propose(
    tokens: Int32Array,
    lengths: Int32Array,
    slots: Int32Array,
    min_match: int,
    max_k: int,
    heads: Int32Array,
    indexed: Int32Array,
    sureness: Float32Array,
    out_tokens: Int32Array,
    out_lengths: Int16Array,
    out_confidence: Float32Array,
) -> int:
    """Catch up and draft for every row; returns how many slots were out of range.

    ``sureness`` is the confidence by number of tokens that agree.
    """
    orders = heads.shape[1]
    k = min(max_k, out_tokens.shape[1])
    refused = 0
    for row in range(slots.shape[0]):
        out_lengths[row] = 0
        slot = slots[row]
        if slot < 0 or slot >= tokens.shape[0]:
            refused += 1
            continue
        length = min(lengths[slot], tokens.shape[1])
        if length < indexed[slot]:  # rewound: what was indexed may no longer be there
            heads[slot] = 0
            indexed[slot] = 0
        # An n-gram is indexed once a token follows it: it ends before ``length``.
        for end in range(max(indexed[slot], 1), length):
            for order in range(min(orders, end - min_match + 1)):
                bucket = _find(tokens, slot, end, min_match + order, heads, order)
                heads[slot, order, bucket] = end
        indexed[slot] = max(length, 0)
        source = 0
        for order in range(min(orders, length - min_match + 1) - 1, -1, -1):
            bucket = _find(tokens, slot, length, min_match + order, heads, order)
            source = heads[slot, order, bucket]
            if source != 0:
                break
        if source == 0:
            continue
        match = match_length(tokens, slot, source, length, EVIDENCE_LIMIT)
        distance = length - source
        for depth in range(k):
            # Where the copy reaches the end of the text it goes on with the draft itself.
            if depth < distance:
                out_tokens[row, depth] = tokens[slot, source + depth]
            else:
                out_tokens[row, depth] = out_tokens[row, depth - distance]
            out_confidence[row, depth] = sureness[match + depth]
        out_lengths[row] = k
    return refused


class _Arguments(NamedTuple):
    """Those of ``_propose``, by reference."""

    tokens: Int32Array
    lengths: Int32Array
    slots: Int32Array
    min_match: int
    max_k: int
    heads: Int32Array
    indexed: Int32Array
    sureness: Float32Array
    out_tokens: Int32Array
    out_lengths: Int16Array
    out_confidence: Float32Array


@compiled_brief
def _propose_bound(of: _Arguments) -> int:
    return _propose(
        of.tokens, of.lengths, of.slots, of.min_match, of.max_k, of.heads, of.indexed,
        of.sureness, of.out_tokens, of.out_lengths, of.out_confidence,
    )  # fmt: skip


class NgramProposer:
    """Drafts what followed the newest of the longest matches of the last tokens.

    A match has ``min_match`` to ``max_match`` tokens and lies in the same request, prompt or
    output. A match that overlaps the end of the text is continued periodically, so a draft always
    has ``max_k`` tokens (or as many as ``out`` has room for). Memory is fixed at construction:
    ``4 * slots * (max_match - min_match + 1) * t`` bytes of tables, ``t`` the power of two at or
    above twice the capacity. Not to be shared between threads.
    """

    def __init__(
        self,
        slots: int,
        capacity: int,
        max_k: int = 8,
        min_match: int = 2,
        max_match: int = 4,
        name: str = "ngram",
    ) -> None:
        check_positive(name, "slots", slots)
        check_positive(name, "capacity", capacity)
        check_positive(name, "max_k", max_k)
        check_positive(name, "min_match", min_match)
        check_match(name, min_match, max_match)
        self.info = ProposerInfo(name, "lookup", max_k)
        self._slots = slots
        self._min_match = min_match
        # At most half full, so a probe is short and always meets an empty bucket.
        shape = (slots, max_match - min_match + 1, table_size(2 * capacity))
        self._heads = np.zeros(shape, np.int32)
        self._indexed = np.zeros(slots, np.int32)
        self._sureness = np.array(
            [0.0, *(confidence(1, others) for others in range(EVIDENCE_LIMIT + max_k - 1))],
            dtype=np.float32,
        )
        self._checked = Checked(name, slots, capacity)
        self._warm()

    def _warm(self) -> None:
        history, slots, drafts = smallest_call()
        self.propose(history, slots, drafts)
        arguments = self._arguments(history, slots, drafts)
        _propose_bound(arguments)
        self._propose_bound = prepared(_propose_bound, arguments)

    def reset(self, slot: int) -> None:
        """Forget the slot's last request; a new one starts there."""
        check_slot(self.info.name, self._slots, slot)
        self._heads[slot] = 0
        self._indexed[slot] = 0

    def propose(self, history: History, slots: Int32Array, out: Drafts) -> None:
        """Draft for the requests in ``slots`` [n], writing into ``out``.

        Raises InputError when arrays or slots do not fit; rows of good slots are written anyway.
        """
        self._checked.require(history, slots, out)
        refused = _propose(
            history.tokens,
            history.lengths,
            slots,
            self._min_match,
            self.info.max_k,
            self._heads,
            self._indexed,
            self._sureness,
            out.tokens,
            out.lengths,
            out.confidence,
        )
        if refused:
            raise bad_slots(self.info.name, refused, history, slots)

    def bind(self, history: History, slots: Int32Array, out: Drafts) -> Callable[[], None]:
        """``propose`` with these very arguments; see ``BindableLookup``."""
        self._checked.require(history, slots, out)
        name, kernel, arguments = (
            self.info.name, self._propose_bound, self._arguments(history, slots, out),
        )  # fmt: skip

        def propose() -> None:
            refused = kernel(arguments)
            if refused:
                raise bad_slots(name, refused, history, slots)

        return propose

    def _arguments(self, history: History, slots: Int32Array, out: Drafts) -> _Arguments:
        return by_reference(
            _Arguments(
                history.tokens, history.lengths, slots, self._min_match, self.info.max_k,
                self._heads, self._indexed, self._sureness, out.tokens, out.lengths,
                out.confidence,
            )
        )  # fmt: skip

    def retire(self, history: History, slot: int) -> None:
        """Nothing is kept across requests."""

    def memory_bytes(self) -> int:
        """Bytes held now, and for ever at this number of slots and capacity."""
        return self._heads.nbytes + self._indexed.nbytes
