"""An engine on a simulated clock: recorded requests, real lookups, step times of a cost file.

Recorded proposers answer from the trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autospec.compiled import compiled
from autospec.cost.shapes import round_up
from autospec.profile.tuned import ProposerSettings
from autospec.proposers.base import Drafts, History, LookupProposer
from autospec.proposers.settings import make_lookup, untuned_lookups
from autospec.proposers.suffix import SuffixProposer
from autospec.records import (
    BatchState,
    EngineInfo,
    Float32Array,
    Float64Array,
    Int16Array,
    Int32Array,
    Plan,
    ProposerInfo,
    Request,
    StepResult,
)
from autospec.replay.cost_file import AppendedSeconds, CostFile, LookupSeconds
from autospec.replay.latency import Finished
from autospec.replay.recorded import recorded_part
from autospec.replay.trace import TraceRequest

CACHE_TOKENS = 1 << 16
"""Tokens of ended requests in which the suffix lookup also looks."""

PREFILL_TOKENS = 512
"""Most prompt tokens in one step of the open loop."""


class Decider(Protocol):
    """The part of ``Controller`` that an engine drives in a step."""

    def start(self, request: Request) -> int: ...
    def finish(self, handle: int) -> None: ...
    def wants_offers(self) -> NDArray[np.bool_]: ...
    def plan(self, batch: BatchState) -> Plan: ...
    def trim(self, plan: Plan, drafted: Int16Array, confidence: Float32Array) -> Plan: ...
    def observe(self, plan: Plan, result: StepResult) -> None: ...


@compiled
def _matches(
    slots: Int32Array,
    tokens: Int32Array,
    lengths: Int32Array,
    ends: Int32Array,
    recorded: Int16Array,
    draft_tokens: Int32Array,
    limits: Int16Array,
    lookup: NDArray[np.bool_],
    correct: Int16Array,
) -> None:
    """How many tokens [p, n] of each proposer's draft are what the target says.

    ``limits`` [p, n] are the drafts' lengths. The last token of a request may be among them: an
    engine that has no room for a draft may still see that it was right.
    """
    for i in range(slots.shape[0]):
        s = slots[i]
        at = lengths[s]
        for p in range(lookup.shape[0]):
            limit = min(limits[p, i], ends[s] - at)
            same = 0
            if lookup[p]:
                while same < limit and draft_tokens[p, i, same] == tokens[s, at + same]:
                    same += 1
            else:
                same = min(limit, recorded[p, s, at])
            correct[p, i] = same


class _Append:
    """``suffix_after(head)``: the suffix lookup goes on from the first tokens of a model's draft.

    Where the model is right its draft is the output, so the lookup can really be run on it. Where
    it is wrong, what follows is lost whatever it is; the record has no wrong tokens, so as many
    are verified as behind the right ones, with the same confidence. A lookup on wrong tokens
    would mostly match less and so cost less: the assumption is on the dear side.
    """

    def __init__(
        self, part: AppendedSeconds, head: int, suffix: SuffixProposer, slots: int, k_max: int
    ) -> None:
        self.head = head
        self.head_k = part.head_k
        self._suffix = suffix
        self._most = part.max_k - part.head_k
        self._tokens = np.zeros((slots, k_max), dtype=np.int32)
        self._tail_lengths = np.zeros(slots, dtype=np.int16)
        self._sure = np.zeros((slots, k_max), dtype=np.float32)
        self.drafted = np.zeros(0, dtype=np.int16)
        self.confidence = np.zeros((0, k_max), dtype=np.float32)

    def draft(
        self, history: History, slots: Int32Array, ends: Int32Array, recorded: Int16Array
    ) -> Int16Array:
        """How many leading tokens [n] of each draft are right; fills ``drafted`` [n] and
        ``confidence`` [n, k], NaN for the model's tokens."""
        n = len(slots)
        head_k = self.head_k
        self.drafted = np.minimum(ends[slots] - history.lengths[slots], head_k).astype(np.int16)
        self.confidence = np.full((n, self._sure.shape[1]), np.nan, dtype=np.float32)
        correct = np.minimum(recorded, self.drafted)
        rows = np.flatnonzero(history.lengths[slots] + head_k < ends[slots])
        if len(rows) == 0:
            return correct
        m = len(rows)
        lengths = history.lengths.copy()
        lengths[slots[rows]] += head_k
        longer = History(history.tokens, lengths)
        drafts = Drafts(self._tokens[:m], self._tail_lengths[:m], self._sure[:m])
        self._suffix.propose(longer, slots[rows], drafts, tail=head_k)
        tail = np.minimum(drafts.lengths, self._most)
        right = np.zeros((1, m), dtype=np.int16)
        _matches(
            slots[rows], history.tokens, lengths, ends, np.zeros((1, 0, 0), dtype=np.int16),
            drafts.tokens[None], tail[None], np.ones(1, dtype=np.bool_), right,
        )  # fmt: skip
        self.drafted[rows] += tail
        width = self._sure.shape[1] - head_k
        self.confidence[rows, head_k:] = drafts.confidence[:, :width]
        correct[rows] += np.where(correct[rows] == head_k, right[0], 0).astype(np.int16)
        return correct


class ReplayEngine:
    """A simulated engine: slots, the lookups that really draft, and the clock of a cost file.

    ``proposers`` are those of the cost file that can be replayed: its lookups, the models that
    every request has a record of, and suffix lookups appended to these. ``cost`` may be exchanged
    between steps. ``correct`` [p, n] is how many leading tokens of each proposer's draft in the
    current step the target agrees with.
    """

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        cost: CostFile,
        slots: int,
        *,
        prefill_tokens: int = PREFILL_TOKENS,
        tuned: Mapping[str, ProposerSettings] | None = None,
    ) -> None:
        self.cost = cost = recorded_part(cost, requests)
        capacity = max(
            len(request.prompt_token_ids) + len(request.output_token_ids) for request in requests
        )
        self.lookups: list[LookupProposer | None] = []
        self.proposers: list[ProposerInfo] = []
        for name, part in cost.proposers.items():
            if isinstance(part, LookupSeconds):
                own = untuned(name, cost) if tuned is None else tuned[name]
                lookup = make_lookup(name, own, slots, capacity)
                self.lookups.append(lookup)
                self.proposers.append(lookup.info)
            elif isinstance(part, AppendedSeconds):
                self.lookups.append(None)
                info = ProposerInfo(
                    name, "parallel", part.max_k, head=part.head, head_k=part.head_k
                )
                self.proposers.append(info)
            else:
                self.lookups.append(None)
                self.proposers.append(ProposerInfo(name, part.kind, part.max_k))
        self.info = EngineInfo(
            "trace", "replay", "1", "simulated", "none", cost.shape, cost.captured_sizes
        )
        self.lookup = np.array([lookup is not None for lookup in self.lookups], dtype=np.bool_)
        self.max_k = np.array([info.max_k for info in self.proposers], dtype=np.int16)
        self.seconds = 0.0
        self.tokens = 0
        self.steps = 0
        self.finished: list[Finished] = []
        k_max = int(self.max_k.max(initial=0))
        p = len(self.proposers)
        self._prefill_tokens = prefill_tokens
        self._history = History(
            np.zeros((slots, capacity), dtype=np.int32), np.zeros(slots, dtype=np.int32)
        )
        self._ends = np.zeros(slots, dtype=np.int32)
        self._prefilled = np.zeros(slots, dtype=np.int32)
        self._recorded = np.zeros((p, slots, capacity), dtype=np.int16)
        self._appends = self._make_appends(slots, k_max)
        self._handles = np.zeros(slots, dtype=np.int64)
        self._arrival, self._first_token = np.zeros((2, slots))
        self._requests: list[TraceRequest | None] = [None] * slots
        self._draft_tokens = np.zeros((p, slots, k_max), dtype=np.int32)
        self._offer_lengths = np.zeros((p, slots), dtype=np.int16)
        self._confidence = np.zeros((p, slots, k_max), dtype=np.float32)
        self.correct = np.zeros((p, 0), dtype=np.int16)
        self._captured = np.array(cost.captured_sizes, dtype=np.int32)
        self._decoding: list[int] = []
        self._prefilling: deque[int] = deque()
        self._free = list(range(slots - 1, -1, -1))

    @property
    def running(self) -> int:
        """Requests in a slot."""
        return len(self._decoding) + len(self._prefilling)

    @property
    def has_room(self) -> bool:
        """Whether one more can start."""
        return bool(self._free)

    def start(
        self,
        request: TraceRequest,
        decider: Decider,
        *,
        arrival: float | None = None,
        tpot_target_seconds: float | None = None,
    ) -> None:
        """Put a request into a slot. With an ``arrival`` its prompt is still to be read."""
        slot = self._free.pop()
        prompt, output = request.prompt_token_ids, request.output_token_ids
        self._history.tokens[slot, : len(prompt)] = prompt
        self._history.tokens[slot, len(prompt) : len(prompt) + len(output)] = output
        self._history.lengths[slot] = len(prompt)
        self._ends[slot] = len(prompt) + len(output)
        for p, info in enumerate(self.proposers):
            lookup = self.lookups[p]
            if lookup is not None:
                lookup.reset(slot)
            elif p not in self._appends:
                at = slice(len(prompt), len(prompt) + len(output))
                self._recorded[p, slot, at] = request.accepted[info.name]
        self._handles[slot] = decider.start(
            Request(
                request.id,
                prompt,
                workload=request.workload,
                temperature=request.temperature,
                tpot_target_seconds=tpot_target_seconds,
            )
        )
        self._requests[slot] = request
        self._arrival[slot] = self.seconds if arrival is None else arrival
        self._first_token[slot] = -1.0
        if arrival is None:
            self._decoding.append(slot)
        else:
            self._prefilled[slot] = 0
            self._prefilling.append(slot)

    def step(self, decider: Decider, waiting: int = 0, limit: int | None = None) -> None:
        """One step of all that run, or of the ``limit`` decoding requests that came first."""
        slots = np.array(self._decoding[:limit], dtype=np.int32)
        chunks = self._take_chunks()
        prefill = sum(chunks.values())
        cached = int(sum(self._prefilled[slot] for slot in chunks))
        ended: list[int] = []
        if len(slots) == 0:
            self.seconds += self._verify_seconds(np.zeros(0, dtype=np.int16), cached, prefill)
        else:
            ended = self._decode(slots, decider, waiting, prefill, cached)
        self.steps += 1
        for slot, count in chunks.items():
            self._prefilled[slot] += count
            if self._prefilled[slot] == self._history.lengths[slot]:
                self._history.lengths[slot] += 1
                self.tokens += 1
                self._first_token[slot] = self.seconds
                self._prefilling.remove(slot)
                self._decoding.append(slot)
                if self._history.lengths[slot] >= self._ends[slot]:
                    ended.append(slot)
        for slot in ended:
            self._end(slot, decider)

    def _decode(
        self, slots: Int32Array, decider: Decider, waiting: int, prefill: int, cached: int
    ) -> list[int]:
        """Offer, plan, compare with the record, charge and report; returns the slots that ended."""
        n = len(slots)
        offers = self._offer_lengths[:, :n]
        confidence = self._confidence[:, :n]
        offers[:] = 0
        wanted = decider.wants_offers()
        for p, lookup in enumerate(self.lookups):
            if lookup is not None and wanted[p]:
                drafts = Drafts(self._draft_tokens[p, :n], offers[p], confidence[p])
                lookup.propose(self._history, slots, drafts)
        context = self._history.lengths[slots]
        left = self._ends[slots] - context
        correct = self._compare(slots)
        plan = decider.plan(
            BatchState(
                self._handles[slots],
                context,
                offers,
                confidence,
                last_tokens=self._history.tokens[slots, context - 1],
                room=(left - 1).astype(np.int16),
                waiting_requests=waiting,
                prefill_tokens=prefill,
            )
        )
        plan = self._trim(decider, plan)
        right = correct[plan.proposer, np.arange(n)] if len(correct) else plan.verify
        accepted = np.where(plan.proposer >= 0, np.minimum(plan.verify, right), 0)
        committed = np.minimum(accepted + 1, left)
        verify_seconds = self._verify_seconds(plan.verify, int(context.sum()) + cached, prefill)
        charged = self._charged_lookups(wanted, plan)
        draft_seconds = self._draft_seconds(plan, context, charged, verify_seconds)
        seconds = verify_seconds + float(draft_seconds.sum())
        matched = np.minimum(correct, committed)
        matched[~(wanted & self.lookup)] = -1
        decider.observe(
            plan,
            StepResult(
                plan.verify,
                accepted.astype(np.int16),
                committed.astype(np.int16),
                seconds,
                draft_seconds,
                matched.astype(np.int16),
                prefill,
            ),
        )
        self._history.lengths[slots] += committed
        self.seconds += seconds
        self.tokens += int(committed.sum())
        first = slots[self._first_token[slots] < 0.0]
        self._first_token[first] = self.seconds
        return [int(s) for s in slots[self._history.lengths[slots] >= self._ends[slots]]]

    def _trim(self, decider: Decider, plan: Plan) -> Plan:
        """A second look where the drafts tell more than was known before."""
        used = [p for p in self._appends if (plan.proposer == p).any()]
        if not used:
            return plan
        drafted = plan.k.copy()
        confidence = np.full(self._confidence[0, : len(drafted)].shape, np.nan, dtype=np.float32)
        for p in used:
            rows = plan.proposer == p
            drafted[rows] = np.minimum(plan.k[rows], self._appends[p].drafted[rows])
            confidence[rows] = self._appends[p].confidence[rows]
        return decider.trim(plan, drafted, confidence)

    def _make_appends(self, slots: int, k_max: int) -> dict[int, _Append]:
        names = [info.name for info in self.proposers]
        appends = {}
        for p, name in enumerate(names):
            part = self.cost.proposers[name]
            if isinstance(part, AppendedSeconds):
                suffix = self.lookups[names.index("suffix")]
                assert isinstance(suffix, SuffixProposer)
                head = names.index(part.head)
                appends[p] = _Append(part, head, suffix, slots, k_max)
        return appends

    def _compare(self, slots: Int32Array) -> Int16Array:
        n = len(slots)
        limits = np.where(self.lookup[:, None], self._offer_lengths[:, :n], self.max_k[:, None])
        self.correct = np.zeros((len(self.proposers), n), dtype=np.int16)
        _matches(
            slots, self._history.tokens, self._history.lengths, self._ends, self._recorded,
            self._draft_tokens[:, :n], limits, self.lookup, self.correct,
        )  # fmt: skip
        for p, append in self._appends.items():
            recorded = self._recorded[append.head, slots, self._history.lengths[slots]]
            self.correct[p] = append.draft(self._history, slots, self._ends, recorded)
        return self.correct

    def _charged_lookups(self, wanted: NDArray[np.bool_], plan: Plan) -> NDArray[np.bool_]:
        """Lookups whose time this step pays for: all that drafted, used or not."""
        return wanted

    def _take_chunks(self) -> dict[int, int]:
        """Prompt tokens to read in this step, by slot, first come first served."""
        chunks: dict[int, int] = {}
        budget = self._prefill_tokens
        for slot in self._prefilling:
            if budget == 0:
                break
            chunks[slot] = min(budget, int(self._history.lengths[slot] - self._prefilled[slot]))
            budget -= chunks[slot]
        return chunks

    def _verify_seconds(self, verify: Int16Array, cached: int, prefill: int) -> float:
        step = self.cost.step
        tokens = len(verify) + int(verify.sum())
        if self.cost.shape == "padded":
            tokens = len(verify) * (1 + int(verify.max(initial=0)))
        tokens += prefill
        if self.cost.shape == "stepped":
            tokens = int(round_up(tokens, self._captured))
        return (
            step.fixed_seconds
            + step.overhead_seconds
            + step.per_token_seconds * tokens
            + step.per_context_token_seconds * cached
        )

    def _draft_seconds(
        self, plan: Plan, context: Int32Array, charged: NDArray[np.bool_], verify_seconds: float
    ) -> Float64Array:
        seconds = np.zeros(len(self.proposers))
        for p, info in enumerate(self.proposers):
            part = self.cost.proposers[info.name]
            fraction, depth_seconds, context_seconds = self.cost.charge(part)
            rows = plan.proposer == p
            if isinstance(part, LookupSeconds):
                seconds[p] = fraction * verify_seconds if charged[p] else 0.0
            elif rows.any():
                forwards = int(plan.k[rows].max()) if info.kind == "sequential" else 1
                seconds[p] = fraction * verify_seconds + forwards * (
                    depth_seconds + context_seconds * float(context[rows].sum())
                )
        return seconds

    def _end(self, slot: int, decider: Decider) -> None:
        request = self._requests[slot]
        assert request is not None
        decider.finish(int(self._handles[slot]))
        for lookup in self.lookups:
            if lookup is not None:
                lookup.retire(self._history, slot)
        self._decoding.remove(slot)
        self._free.append(slot)
        self._requests[slot] = None
        self.finished.append(
            Finished(
                request.id,
                len(request.output_token_ids),
                float(self._arrival[slot]),
                float(self._first_token[slot]),
                self.seconds,
            )
        )


def untuned(name: str, cost: CostFile) -> ProposerSettings:
    """How the lookup ``ngram`` or ``suffix`` of a cost file drafts, unless tuned.

    Every model of the file counts as one that drafts beside it: see ``recorded_part``.
    """
    parts = cost.proposers
    update = {"max_k": parts[name].max_k}
    if name == "suffix":
        update["cache_tokens"] = CACHE_TOKENS
    beside_model = any(not isinstance(part, LookupSeconds) for part in parts.values())
    return untuned_lookups(beside_model=beside_model)[name].model_copy(update=update)
