"""A suffix lookup behind a head's draft: what it adds, and what each token was drawn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autospec.engine.model import CausalModel
from autospec.engine.sampling import SamplingParameters
from autospec.errors import ModelError
from autospec.proposers.base import Drafts, History
from autospec.proposers.draft_model import DraftModelProposer
from autospec.proposers.suffix import SuffixProposer
from autospec.proposers.suffix_after import SuffixAfter
from autospec.records import Int32Array
from tests.engine.tiny_models import CAPACITY, greedy, tiny
from tests.proposers.head_folders import draft_task

torch.set_num_threads(1)

HEAD_K, SUFFIX_K = 2, 5


def attached(slots: int) -> tuple[SuffixAfter, History]:
    """A head that is always right, and an empty history."""
    head = DraftModelProposer(CausalModel(tiny("llama")), max_k=4)
    suffix = SuffixProposer(slots, CAPACITY, max_k=SUFFIX_K, min_match=1)
    proposer = SuffixAfter(head, suffix, head_k=HEAD_K)
    target = CausalModel(tiny("llama"))
    proposer.attach(target, target.new_cache(slots, CAPACITY))
    return proposer, History(np.zeros((slots, CAPACITY), np.int32), np.zeros(slots, np.int32))


def write(history: History, slot: int, tokens: list[int]) -> None:
    history.tokens[slot, : len(tokens)] = tokens
    history.lengths[slot] = len(tokens)


def looked_up(text: list[int], k: int) -> list[int]:
    """What follows the newest match of the longest end of ``text``, found the slow way."""
    for size in range(min(len(text) - 1, 32), 0, -1):
        for end in range(len(text) - HEAD_K - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                copied = list(text)
                for offset in range(k):
                    copied.append(copied[end + offset])
                return copied[len(text) :]
    return []


def test_the_lookup_goes_on_from_the_heads_tokens() -> None:
    proposer, history = attached(4)
    texts = [[1, 2, 3], [5, 6, 5, 6, 5], list(range(20)), [7, 7]]
    for text in texts:
        # So that there is something to find behind the head's tokens.
        ahead = greedy(tiny("llama"), text, 1)
        text[:0] = [*ahead, 9, 8, 7, 6, 5, 4]
    continued = 0
    for _ in range(2):
        for slot, text in enumerate(texts):
            write(history, slot, text)
        wanted = [7, 1, 0, 4]
        drafts = proposer.draft(draft_task(history, wanted))
        assert drafts.probs is None
        for slot, (text, k) in enumerate(zip(texts, wanted, strict=True)):
            first = greedy(tiny("llama"), text, min(k, HEAD_K))
            found = looked_up(text + first, min(k - HEAD_K, SUFFIX_K)) if k > HEAD_K else []
            assert drafts.lengths[slot] == len(first) + len(found)
            assert drafts.tokens[slot, : drafts.lengths[slot]].tolist() == first + found
            assert (drafts.confidence[slot, : drafts.lengths[slot]] > 0).all()
            assert history.lengths[slot] == len(text)
            continued += len(found)
            text += [*drafts.tokens[slot, :3].tolist(), 11]
    assert continued > 4


def test_only_the_heads_tokens_have_a_distribution_under_sampling() -> None:
    proposer, history = attached(2)
    write(history, 0, [*range(20), *range(20)])
    write(history, 1, [3])
    drafts = proposer.draft(draft_task(history, [7, 1], SamplingParameters(temperature=1.0)))
    assert drafts.probs is not None
    assert drafts.probs.shape[:2] == (2, HEAD_K)
    assert drafts.lengths.tolist() == [HEAD_K + SUFFIX_K, 1]
    assert drafts.probs_row.tolist() == [[0, 0, *[-1] * SUFFIX_K], [1, *[-1] * 6]]


def test_what_is_shared_is_left_to_the_engine() -> None:
    head = DraftModelProposer(CausalModel(tiny("llama")), max_k=4)
    suffix = SuffixProposer(1, CAPACITY, max_k=SUFFIX_K)
    target = CausalModel(tiny("llama"))
    head.attach(target, target.new_cache(1, CAPACITY))
    proposer = SuffixAfter(head, suffix, shared=True)
    proposer.attach(target, target.new_cache(1, 10))
    assert proposer.info.name == "suffix_after(draft_model)"
    assert proposer.info.max_k == 2 + SUFFIX_K
    assert proposer.memory_bytes() == 0
    history = History(np.zeros((1, CAPACITY), np.int32), np.zeros(1, np.int32))
    write(history, 0, [4, 5, 4, 5])
    slots: Int32Array = np.zeros(1, np.int32)
    found = Drafts(np.zeros((1, 4), np.int32), np.zeros(1, np.int16), np.zeros((1, 4), np.float32))
    suffix.propose(history, slots, found)
    before = found.tokens.copy()
    proposer.draft(draft_task(history, [6]))
    suffix.propose(history, slots, found)  # the draft has left no trace in the index
    assert found.tokens.tolist() == before.tolist()
    assert proposer.stale_tokens(history, slots).tolist() == [0]


def test_more_than_the_head_can_draft_is_refused() -> None:
    head = DraftModelProposer(CausalModel(tiny("llama")), max_k=4)
    with pytest.raises(
        ModelError, match="head_k is 5; it must be from 1 to 4, the most that draft_"
    ):
        SuffixAfter(head, SuffixProposer(1, 8), head_k=5)
