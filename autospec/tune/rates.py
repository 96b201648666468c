"""How often each proposer has a draft and how much of it is right, per workload: one pass each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from autospec.compiled import compiled
from autospec.profile.tuned import DraftRates, ProposerSettings, WorkloadRates
from autospec.prompts import DEFAULT_WORKLOAD
from autospec.proposers.base import Drafts, History
from autospec.proposers.settings import make_lookup
from autospec.records import Float32Array, Int16Array, Int64Array
from autospec.replay.trace import TraceRequest


def measure_rates(
    requests: Sequence[TraceRequest],
    settings: Mapping[str, ProposerSettings],
    confidence: Mapping[str, Mapping[str, Float32Array]] | None = None,
) -> tuple[dict[str, WorkloadRates], dict[str, float]]:
    """Rates by workload, and seconds per draft of each lookup.

    A model stops where its ``confidence`` (by model and request, [output, k]) is below its
    setting; it is always there to draft.
    """
    lengths: dict[str, list[tuple[Int16Array, Int16Array]]] = {}
    seconds: dict[str, float] = {}
    for name, each in settings.items():
        began = time.perf_counter()
        if each.kind == "lookup":
            lengths[name] = _look_up(name, each, requests)
            tokens = sum(len(request.output_token_ids) for request in requests)
            seconds[name] = (time.perf_counter() - began) / max(tokens, 1)
        elif all(name in request.accepted for request in requests):
            sure = None if confidence is None else confidence.get(name)
            lengths[name] = [_of_model(each, request, name, sure) for request in requests]
    labels = dict.fromkeys(request.workload or DEFAULT_WORKLOAD for request in requests)
    return {label: _workload(label, requests, lengths, settings) for label in labels}, seconds


def _workload(
    label: str,
    requests: Sequence[TraceRequest],
    lengths: Mapping[str, list[tuple[Int16Array, Int16Array]]],
    settings: Mapping[str, ProposerSettings],
) -> WorkloadRates:
    rows = [
        row
        for row, request in enumerate(requests)
        if (request.workload or DEFAULT_WORKLOAD) == label
    ]
    tokens = sum(len(requests[row].output_token_ids) for row in rows)
    context = sum(
        len(requests[row].output_token_ids)
        * (len(requests[row].prompt_token_ids) + len(requests[row].output_token_ids) / 2)
        for row in rows
    )
    proposers = {
        name: _rates([found[row] for row in rows], settings[name].max_k)
        for name, found in lengths.items()
    }
    return WorkloadRates(
        requests=len(rows),
        tokens=tokens,
        context_tokens=round(context / max(tokens, 1), 1),
        proposers=proposers,
    )


def _rates(lengths: Sequence[tuple[Int16Array, Int16Array]], max_k: int) -> DraftRates:
    """Walk through every request at every k, from step to step."""
    drafting, drafted, accepted = [], [], []
    for k in range(1, max_k + 1):
        sums = np.zeros(4, dtype=np.int64)
        for each, correct in lengths:
            _walk(each, correct, k, sums)
        steps = max(int(sums[0]), 1)
        drafting.append(round(int(sums[1]) / steps, 5))
        drafted.append(round(int(sums[2]) / steps, 5))
        accepted.append(round(int(sums[3]) / steps, 5))
    return DraftRates(drafting=tuple(drafting), drafted=tuple(drafted), accepted=tuple(accepted))


@compiled
def _walk(drafted: Int16Array, correct: Int16Array, k: int, sums: Int64Array) -> None:
    """Add a request's steps, steps with a draft, verified and accepted tokens to ``sums`` [4].

    As in serving: there is no room for a draft token where the last output token comes anyway.
    """
    at = 0
    while at < drafted.shape[0]:
        verify = min(k, min(int(drafted[at]), drafted.shape[0] - at - 1))
        kept = min(verify, int(correct[at]))
        sums[0] += 1
        sums[1] += 1 if verify > 0 else 0
        sums[2] += verify
        sums[3] += kept
        at += kept + 1


def _look_up(
    name: str, settings: ProposerSettings, requests: Sequence[TraceRequest]
) -> list[tuple[Int16Array, Int16Array]]:
    """Draft lengths and right tokens at every output position; requests end one by one."""
    capacity = max(len(each.prompt_token_ids) + len(each.output_token_ids) for each in requests)
    lookup = make_lookup(name, settings, 1, capacity)
    history = History(np.zeros((1, capacity), dtype=np.int32), np.zeros(1, dtype=np.int32))
    out = Drafts(
        np.zeros((1, settings.max_k), dtype=np.int32),
        np.zeros(1, dtype=np.int16),
        np.zeros((1, settings.max_k), dtype=np.float32),
    )
    slots = np.zeros(1, dtype=np.int32)
    found = []
    for request in requests:
        prompt, output = request.prompt_token_ids, request.output_token_ids
        lookup.reset(0)
        history.tokens[0, : len(prompt)] = prompt
        history.tokens[0, len(prompt) : len(prompt) + len(output)] = output
        drafted, correct = np.zeros((2, len(output)), dtype=np.int16)
        for position in range(len(output)):
            history.lengths[0] = len(prompt) + position
            lookup.propose(history, slots, out)
            drafted[position] = length = int(out.lengths[0])
            limit = min(length, len(output) - position)
            equal = out.tokens[0, :limit] == output[position : position + limit]
            correct[position] = int(np.logical_and.accumulate(equal).sum())
        history.lengths[0] = len(prompt) + len(output)
        lookup.retire(history, 0)
        found.append((drafted, correct))
    return found


def _of_model(
    settings: ProposerSettings,
    request: TraceRequest,
    name: str,
    confidence: Mapping[str, Float32Array] | None,
) -> tuple[Int16Array, Int16Array]:
    accepted = request.accepted[name]
    drafted = np.full_like(accepted, settings.max_k)
    if confidence is not None and settings.min_confidence:
        unsure = confidence[request.id] < settings.min_confidence
        stop = np.where(unsure.any(axis=1), unsure.argmax(axis=1), settings.max_k)
        drafted = np.minimum(drafted, stop).astype(np.int16)
    return drafted, np.minimum(accepted, drafted)
