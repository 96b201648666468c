"""Proposers whose drafts begin with the tokens of another one, their head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autospec.records import Int16Array, ProposerInfo


def shared_heads(proposers: Sequence[ProposerInfo]) -> Int16Array:
    """[p, 2]: the proposer whose tokens each one's drafts begin with, and how many they are."""
    names = [info.name for info in proposers]
    heads = np.zeros((len(names), 2), dtype=np.int16)
    for p, info in enumerate(proposers):
        if info.head in names:
            heads[p] = names.index(info.head), info.head_k
    return heads
