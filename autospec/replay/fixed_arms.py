"""The best fixed (proposer, k) in hindsight, from all of them.

What a proposer's draft would have had accepted at an output position is the same in every run as
long as it depends on the request alone. Such proposers are tabulated once and all their k replayed
on the table by a compiled loop; the suffix lookup, which also sees requests that ended earlier,
is tabulated where their order is certain (one request at a time) and really run elsewhere.
Suffix lookups appended to a model are tabulated roughly, and their best k really run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autospec.compiled import compiled
from autospec.cost.shapes import SHAPES, round_up
from autospec.policy.static import StaticOptions
from autospec.profile.tuned import ProposerSettings
from autospec.proposers.base import Drafts, History
from autospec.proposers.settings import make_lookup
from autospec.records import Float32Array, Int16Array, Int32Array
from autospec.replay.cost_file import AppendedSeconds, CostFile, ModelSeconds
from autospec.replay.engine import untuned
from autospec.replay.hindsight import replay_bare
from autospec.replay.recorded import recorded_part
from autospec.replay.trace import TraceRequest

_TABLE_SLOTS = 64
_RERUN = 3  # of the k of a suffix lookup appended to a model


@dataclass(frozen=True, slots=True)
class FixedResult:
    """One arm's closed loop."""

    arm: StaticOptions
    tokens: int
    seconds: float
    steps: int

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens over simulated seconds."""
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class AcceptanceTable:
    """Per request and output position: the draft's length, its right tokens, and a lookup's raw
    confidence in the first of them."""

    drafted: Int16Array  # [requests, positions]
    correct: Int16Array  # [requests, positions]
    confidence: Float32Array  # [requests, positions]


def arm_name(options: StaticOptions) -> str:
    """As it is written in tables: ``eagle3:3``."""
    return f"{options.proposer}:{options.k}"


def fixed_arms(requests: Sequence[TraceRequest], cost: CostFile) -> tuple[StaticOptions, ...]:
    """Every (proposer, k) that these requests can be replayed with, k from 1 to its most.

    What is appended to a model begins behind the model's part: below that it would be the model.
    """
    arms = []
    for name, part in recorded_part(cost, requests).proposers.items():
        least = part.head_k + 1 if isinstance(part, AppendedSeconds) else 1
        arms += [StaticOptions(proposer=name, k=k) for k in range(least, part.max_k + 1)]
    return tuple(arms)


def replay_fixed(
    requests: Sequence[TraceRequest], cost: CostFile, proposer: str, concurrency: int
) -> Iterator[FixedResult]:
    """The closed loop of every k of one proposer, as ``replay_bare`` would have it."""
    arms = [arm for arm in fixed_arms(requests, cost) if arm.proposer == proposer]
    if proposer == "suffix" and concurrency > 1:
        for arm in arms:
            result = replay_bare(requests, cost, arm, concurrency)
            yield FixedResult(arm, result.tokens, result.seconds, result.steps)
        return
    part = cost.proposers[proposer]
    results = _tabulated(requests, cost, proposer, arms, concurrency)
    if isinstance(part, AppendedSeconds):
        best = sorted(results, key=lambda result: result.tokens_per_second)[-_RERUN:]
        for arm in (result.arm for result in best):
            run = replay_bare(requests, cost, arm, concurrency)
            yield FixedResult(arm, run.tokens, run.seconds, run.steps)
        return
    yield from results


def _tabulated(
    requests: Sequence[TraceRequest],
    cost: CostFile,
    proposer: str,
    arms: Sequence[StaticOptions],
    concurrency: int,
) -> list[FixedResult]:
    table = tabulate(requests, cost, proposer)
    step, part = cost.step, cost.proposers[proposer]
    fraction, depth_seconds, context_seconds = cost.charge(part)
    sequential = isinstance(part, ModelSeconds) and part.kind == "sequential"
    results = []
    prompts = np.array([len(each.prompt_token_ids) for each in requests], dtype=np.int32)
    outputs = np.array([len(each.output_token_ids) for each in requests], dtype=np.int32)
    for arm in arms:
        tokens, seconds, steps = _closed_loop(
            table.drafted, table.correct, prompts, outputs, arm.k, concurrency,
            step.fixed_seconds + step.overhead_seconds, step.per_token_seconds,
            step.per_context_token_seconds, fraction, depth_seconds, context_seconds, sequential,
            SHAPES[cost.shape], np.array(cost.captured_sizes, dtype=np.int32),
        )  # fmt: skip
        results.append(FixedResult(arm, tokens, seconds, steps))
    return results


def tabulate(
    requests: Sequence[TraceRequest],
    cost: CostFile,
    proposer: str,
    settings: ProposerSettings | None = None,
) -> AcceptanceTable:
    """Draft at every position; requests end one after the other, in order.

    ``settings`` are a lookup's, else those of the replay.
    """
    part = cost.proposers[proposer]
    if isinstance(part, AppendedSeconds):
        head, suffix = (tabulate(requests, cost, name) for name in (part.head, "suffix"))
        return _append_tables(requests, part, head, suffix)
    positions = max(len(request.output_token_ids) for request in requests)
    drafted = np.zeros((len(requests), positions), dtype=np.int16)
    correct = np.zeros_like(drafted)
    sure = np.zeros(drafted.shape, dtype=np.float32)
    if isinstance(part, ModelSeconds):
        drafted[:] = part.max_k
        for row, request in zip(correct, requests, strict=True):
            row[: len(request.output_token_ids)] = request.accepted[proposer]
        return AcceptanceTable(drafted, np.minimum(correct, drafted), sure)
    slots = 1 if proposer == "suffix" else min(_TABLE_SLOTS, len(requests))
    capacity = max(
        len(request.prompt_token_ids) + len(request.output_token_ids) for request in requests
    )
    own = settings or untuned(proposer, recorded_part(cost, requests))
    lookup = make_lookup(proposer, own, slots, capacity)
    history = History(np.zeros((slots, capacity), dtype=np.int32), np.zeros(slots, dtype=np.int32))
    draft_tokens = np.zeros((slots, part.max_k), dtype=np.int32)
    confidence = np.zeros((slots, part.max_k), dtype=np.float32)
    lengths = np.zeros(slots, dtype=np.int16)
    for first in range(0, len(requests), slots):
        group = requests[first : first + slots]
        ends = np.zeros(len(group), dtype=np.int32)
        for slot, request in enumerate(group):
            lookup.reset(slot)
            prompt, output = request.prompt_token_ids, request.output_token_ids
            ends[slot] = len(prompt) + len(output)
            history.tokens[slot, : ends[slot]] = np.concatenate((prompt, output))
            history.lengths[slot] = len(prompt)
        prompts = history.lengths[: len(group)].copy()
        for position in range(int((ends - prompts).max())):
            rows = np.flatnonzero(prompts + position < ends).astype(np.int32)
            history.lengths[rows] = prompts[rows] + position
            n = len(rows)
            lookup.propose(history, rows, Drafts(draft_tokens[:n], lengths[:n], confidence[:n]))
            drafted[first + rows, position] = lengths[:n]
            sure[first + rows, position] = confidence[:n, 0]
            _count(
                history.tokens, history.lengths, rows, ends, draft_tokens, lengths,
                correct, first, position,
            )  # fmt: skip
        for slot in range(len(group)):
            history.lengths[slot] = ends[slot]
            lookup.retire(history, slot)
    return AcceptanceTable(drafted, correct, sure)


def _append_tables(
    requests: Sequence[TraceRequest],
    part: AppendedSeconds,
    head: AcceptanceTable,
    suffix: AcceptanceTable,
) -> AcceptanceTable:
    """The suffix draft of ``head_k`` positions later, behind as many tokens of the model."""
    head_k, positions = part.head_k, head.drafted.shape[1]
    lengths = np.array([len(each.output_token_ids) for each in requests])
    room = np.maximum(lengths[:, None] - np.arange(positions), 0)
    drafted = np.minimum(head.drafted, np.minimum(room, head_k))
    correct = np.minimum(head.correct, drafted)
    tail, right = np.zeros_like(drafted), np.zeros_like(drafted)
    tail[:, :-head_k] = np.minimum(suffix.drafted[:, head_k:], part.max_k - head_k)
    right[:, :-head_k] = np.minimum(suffix.correct[:, head_k:], tail[:, :-head_k])
    whole = correct == head_k
    return AcceptanceTable(
        (drafted + tail).astype(np.int16),
        (correct + np.where(whole, right, 0)).astype(np.int16),
        np.zeros_like(suffix.confidence),
    )


@compiled
def _count(
    tokens: Int32Array,
    lengths: Int32Array,
    rows: Int32Array,
    ends: Int32Array,
    draft_tokens: Int32Array,
    draft_lengths: Int16Array,
    correct: Int16Array,
    first: int,
    position: int,
) -> None:
    """Leading draft tokens of each row that the output has too."""
    for i in range(rows.shape[0]):
        s = rows[i]
        limit = min(int(draft_lengths[i]), ends[s] - lengths[s])
        same = 0
        while same < limit and draft_tokens[i, same] == tokens[s, lengths[s] + same]:
            same += 1
        correct[first + s, position] = same


@compiled
def _closed_loop(
    drafted: Int16Array,
    correct: Int16Array,
    prompts: Int32Array,
    outputs: Int32Array,
    k: int,
    concurrency: int,
    fixed: float,
    per_token: float,
    per_context: float,
    fraction: float,
    per_depth: float,
    depth_context: float,
    sequential: bool,
    shape: int,
    captured: Int32Array,
) -> tuple[int, float, int]:
    """Tokens, seconds and steps; the same steps that the engine would make with ``static``."""
    running = np.empty(concurrency, dtype=np.int64)
    done = np.zeros(prompts.shape[0], dtype=np.int64)
    n, begun, steps, tokens = 0, 0, 0, 0
    seconds = 0.0
    while True:
        while n < concurrency and begun < prompts.shape[0]:
            running[n] = begun
            n += 1
            begun += 1
        if begun == prompts.shape[0] and n < max(1.0, concurrency / 2):
            return tokens, seconds, steps
        context, drafting_context, verified, longest, committed = 0, 0, 0, 0, 0
        for i in range(n):
            r = running[i]
            at = done[r]
            cached = prompts[r] + at
            context += cached
            left = outputs[r] - at
            verify = min(k, min(int(drafted[r, at]), left - 1))
            if verify > 0:
                drafting_context += cached
            verified += verify
            longest = max(longest, verify)
            kept = min(min(verify, int(correct[r, at])) + 1, left)
            done[r] += kept
            committed += kept
        paid = n + verified
        if shape == 1:
            paid = n * (1 + longest)
        elif shape == 2:
            paid = round_up(paid, captured)
        forward = fixed + per_token * paid + per_context * context
        depth = longest if sequential else min(longest, 1)
        seconds += forward + (
            fraction * forward + depth * (per_depth + depth_context * drafting_context)
        )
        tokens += committed
        steps += 1
        left_over = 0
        for i in range(n):
            r = running[i]
            if done[r] < outputs[r]:
                running[left_over] = r
                left_over += 1
        n = left_over
