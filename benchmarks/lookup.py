"""Cost of drafting by lookup: mean microseconds per request and step, and memory.

Run ``python benchmarks/lookup.py``. Texts are 2,000 tokens with local repetition (half of the
spans copied from earlier text) or a worst case; between two steps each request grows by three.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from autospec.proposers.base import Drafts, History, LookupProposer
from autospec.proposers.ngram import NgramProposer
from autospec.proposers.suffix import SuffixProposer
from autospec.records import Int32Array

CAPACITY = 4096
LENGTH = 2000
STEPS = 200
GROWTH = 3

Text = Callable[[np.random.Generator, int], Int32Array]


def repetitive(rng: np.random.Generator, length: int) -> Int32Array:
    """Zipf-like tokens; every other span of 8 to 40 tokens is copied from earlier."""
    text = np.minimum(rng.zipf(1.3, length), 100_000).astype(np.int32)
    position = 64
    while position < length:
        span = min(int(rng.integers(8, 40)), length - position)
        source = int(rng.integers(0, max(1, position - span)))
        text[position : position + span] = text[source : source + span]
        position += 2 * span
    return text


def constant(rng: np.random.Generator, length: int) -> Int32Array:
    """One token only."""
    return np.full(length, int(rng.integers(0, 100_000)), np.int32)


def period_two(rng: np.random.Generator, length: int) -> Int32Array:
    """Two tokens in turn."""
    return np.resize(rng.integers(0, 100_000, 2).astype(np.int32), length)


def microseconds(
    proposer: LookupProposer, text: Text, requests: int, length: int, capacity: int
) -> float:
    """Mean over STEPS steps per request, catch-up with GROWTH new tokens included."""
    rng = np.random.default_rng(0)
    history = History(
        np.stack([text(rng, capacity) for _ in range(requests)]),
        np.full(requests, length - STEPS * GROWTH // 2, np.int32),
    )
    k = proposer.info.max_k
    drafts = Drafts(
        np.zeros((requests, k), np.int32),
        np.zeros(requests, np.int16),
        np.zeros((requests, k), np.float32),
    )
    slots = np.arange(requests, dtype=np.int32)
    proposer.propose(history, slots, drafts)
    seconds = 0.0
    for _ in range(STEPS):
        history.lengths[:] += GROWTH
        start = time.perf_counter()
        proposer.propose(history, slots, drafts)
        seconds += time.perf_counter() - start
    return seconds / STEPS / requests * 1e6


def filled(proposer: SuffixProposer, tokens: int) -> SuffixProposer:
    """The proposer with ``tokens`` tokens of other requests in its cache."""
    rng = np.random.default_rng(1)
    history = History(
        np.empty((1, LENGTH), np.int32),
        np.full(1, LENGTH, np.int32),
    )
    for _ in range(tokens // LENGTH):
        history.tokens[0] = repetitive(rng, LENGTH)
        proposer.retire(history, 0)
    return proposer


def main() -> None:
    """Print the table."""
    print("proposer        text         requests  tokens  us/request/step  memory MB")
    texts: tuple[tuple[str, Text], ...] = (
        ("repetitive", repetitive),
        ("constant", constant),
        ("period two", period_two),
    )
    for requests, length, capacity in (
        (1, LENGTH, CAPACITY),
        (32, LENGTH, CAPACITY),
        (256, LENGTH, CAPACITY),
        (1, 100_000, 131_072),
    ):
        for label, text in texts:
            arms: tuple[tuple[str, LookupProposer], ...] = (
                ("ngram", NgramProposer(requests, capacity)),
                ("suffix", SuffixProposer(requests, capacity)),
                (
                    "suffix, cache",
                    filled(SuffixProposer(requests, capacity, cache_tokens=2**18), 2**18),
                ),
            )
            for name, proposer in arms:
                mean = microseconds(proposer, text, requests, length, capacity)
                print(
                    f"{name:15} {label:12} {requests:8d} {length:7d} {mean:16.2f} "
                    f"{proposer.memory_bytes() / 1e6:10.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
