"""What it takes to look drafts up, measured here: a service cannot show it from outside."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autospec.profile.tuned import ProposerSettings
from autospec.proposers.base import Drafts, History
from autospec.proposers.settings import make_lookup
from autospec.replay.trace import TraceRequest

_MOST_ROWS = 64
_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class DraftingTime:
    """Seconds of a step's lookups, however many there are, and of each."""

    per_step: float
    per_request: float

    def seconds(self, running: float) -> float:
        """Of a step in which everybody's drafts are looked up."""
        return self.per_step + self.per_request * running


def drafting_time(
    requests: Sequence[TraceRequest], name: str, settings: ProposerSettings
) -> DraftingTime:
    """Medians over the middle of the longest outputs: of one row alone, and of many together."""
    rows = sorted(requests, key=lambda each: -len(each.output_token_ids))[:_MOST_ROWS]
    whole = [np.concatenate((each.prompt_token_ids, each.output_token_ids)) for each in rows]
    capacity = max(map(len, whole)) + 1
    history = History(
        np.zeros((len(rows), capacity), dtype=np.int32), np.zeros(len(rows), dtype=np.int32)
    )
    lookup = make_lookup(name, settings, len(rows), capacity)
    for slot, (tokens, request) in enumerate(zip(whole, rows, strict=True)):
        lookup.reset(slot)
        history.tokens[slot, : len(tokens)] = tokens
        history.lengths[slot] = len(tokens) - len(request.output_token_ids) // 2
    taken: dict[int, list[float]] = {1: [], len(rows): []}
    for number in range(_ROUNDS):
        for count in taken:
            slots = np.arange(count, dtype=np.int32)
            history.lengths[:count] = np.minimum(
                history.lengths[:count] + 1, [len(each) for each in whole[:count]]
            )
            out = Drafts(
                np.zeros((count, settings.max_k), dtype=np.int32),
                np.zeros(count, dtype=np.int16),
                np.zeros((count, settings.max_k), dtype=np.float32),
            )
            began = time.perf_counter()
            lookup.propose(history, slots, out)
            if number:  # the first one reads the prompts
                taken[count].append(time.perf_counter() - began)
    one = float(np.median(taken[1]))
    if len(rows) == 1:
        return DraftingTime(0.0, one)
    each = max(0.0, float(np.median(taken[len(rows)])) - one) / (len(rows) - 1)
    return DraftingTime(max(0.0, one - each), each)
