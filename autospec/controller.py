"""The controller: plan, trim and observe around every engine step, and what is learned by it."""

from __future__ import annotations

import logging
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autospec.acceptance import hazard_table
from autospec.arrays import FLOAT32, FLOAT64, INT16, checked
from autospec.config import Settings
from autospec.cost import step_cost
from autospec.cost.regression import LEAST_SECONDS, MOST_SECONDS
from autospec.cost.shapes import SHAPES
from autospec.cost.step_cost import StepLoad
from autospec.errors import ConfigError
from autospec.estimators import Estimators
from autospec.journal.writer import Journal
from autospec.metrics import Event, Metrics
from autospec.policy import make_policy
from autospec.policy.base import NO_ARM, Outcome
from autospec.policy.program import LEARNED, NEW_WORKLOAD, Memory
from autospec.profile.file import warm_start
from autospec.profile.learned import Identity, Profile
from autospec.profile.saving import Saving
from autospec.profile.tuned import KCap
from autospec.rails.overruling import Rails
from autospec.records import (
    KINDS,
    NO_PROPOSER,
    BatchState,
    EngineInfo,
    Float32Array,
    Int16Array,
    Mode,
    Plan,
    ProposerInfo,
    Request,
    StepResult,
)
from autospec.step.counts import TokenCounts
from autospec.step.kernels import NOT_YET, bound_drafted, conclude
from autospec.step.record import Standing, StepRecord, StepRecords
from autospec.step.rows import UNKNOWN_SLOT, RequestRows
from autospec.step.stepwise import Stepwise
from autospec.step.warmup import warm_up
from autospec.workload import OTHER, Workloads

log = logging.getLogger("autospec")

_STEPS_UNDER_WAY = 32
MOST_K = 64
"""The longest draft of one request in one step that any proposer may have."""


class Controller:
    """Decides, for every step of one engine, who drafts, how many tokens, and how many to verify.

    ``plan``, ``trim`` and ``observe`` are called once per step, in this order, from one thread;
    they never raise. A fault in a policy makes the step plain, is counted and logged once.
    ``start`` and ``finish`` frame a request. ``caps`` on k by load are those that the profile was
    tuned to, unless given. ``faults`` counts what went wrong, by method; with ``strict`` it is
    raised instead, which is for the tests of whoever embeds this. Raises ConfigError when settings
    do not fit.
    """

    def __init__(
        self,
        settings: Settings,
        proposers: Sequence[ProposerInfo],
        engine: EngineInfo,
        *,
        profile: Profile | None = None,
        caps: Sequence[KCap] | None = None,
        metrics: Metrics | None = None,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
        seed: int = 0,
        strict: bool = False,
    ) -> None:
        self.settings = settings
        self.proposers = tuple(proposers)
        self.engine = engine
        self.identity = Identity.of(engine, self.proposers)
        self.k_max = max((info.max_k for info in proposers), default=0)
        self._clock = clock
        self._metrics = metrics
        self._journal = journal
        if engine.shape not in SHAPES:
            raise ConfigError(f"engine: shape is {engine.shape!r}; allowed: {', '.join(SHAPES)}")
        self._most = _usable(settings, self.proposers)
        self._allowed = self._most > 0
        self._allows_all = bool(self._allowed.all())
        if profile is None and settings.profile.path is not None:
            profile = warm_start(
                settings.profile.path, self.identity, hazard_table.LAYOUT, step_cost.LAYOUT
            )
        elif profile is not None:
            profile.require(self.identity, hazard_table.LAYOUT, step_cost.LAYOUT)
        self.is_warm = profile is not None
        if caps is None:
            caps = () if profile is None or profile.tuned is None else profile.tuned.caps
        self._caps = tuple(sorted(caps, key=lambda cap: cap.load))
        self.workloads = Workloads(
            settings.workloads.rules, () if profile is None else profile.workloads
        )
        self.rows = RequestRows()
        self.rows.arrays.workload[UNKNOWN_SLOT] = self.workloads.labels.index(OTHER)
        self.learned = Estimators(
            self.proposers, engine, settings.learning, self.workloads.capacity, len(self.rows)
        )
        self.cost = self.learned.cost
        self._num_slots = len(self.rows)
        self._counts = TokenCounts.empty(len(self.proposers), self.workloads.capacity)
        self.policy = make_policy(settings.policy, self.proposers, np.random.default_rng(seed))
        self._rails = Rails(settings, self.policy, self.cost)
        self._stepwise = Stepwise(self.policy, self.cost, self._rails)
        self._standing = self._stand()
        self._num_named = 0
        self._next_plan_id = 0
        self._records = StepRecords(len(self.proposers), self.k_max)
        self._under_way: list[StepRecord | None] = [None] * _STEPS_UNDER_WAY
        self.faults: Counter[str] = Counter()
        self._is_strict = strict
        self._estimated_speedup: float | None = None
        self._has_targets = False
        self.last_decision_seconds = 0.0
        self._saving = Saving(
            settings.profile, self.learned, self.workloads,
            f"learned while serving, policy {type(self.policy).__name__.lower()}", wall_clock,
            lambda error: self._fault("save", error),
        )  # fmt: skip
        if profile is not None:
            faded = profile.faded(wall_clock(), settings.profile.half_life_days)
            try:
                self.learned.load(faded, self.workloads.labels)
            except Exception as error:  # arrays of other names or shapes
                self.is_warm = False
                self._fault("profile", error)
        if metrics is not None:
            metrics.bind([info.name for info in self.proposers], self._counts)
        if journal is not None:
            journal.begin(
                settings.model_dump(mode="json"),
                asdict(self.identity),
                tuple(info.name for info in self.proposers),
                {"python": platform.python_version(), "numpy": np.__version__},
            )
        self._name_workloads()
        self._fused = warm_up(settings.policy, self.proposers, engine, self.k_max)

    # Requests -------------------------------------------------------------------------------

    def start(self, request: Request) -> int:
        """A request begins to run; returns its handle. Never raises for a bad request."""
        try:
            workload = self.workloads.index(request)
        except Exception as error:
            self._fault("workload", error)
            workload = 0
        target = request.tpot_target_seconds
        if target is None:
            target = (self.settings.tpot_target_ms or 0.0) / 1000.0
        max_k = self.settings.max_k if request.max_k is None else request.max_k
        handle = self.rows.start(workload, max(0, min(max_k, self.settings.max_k)), target)
        self._has_targets |= target > 0.0
        num_slots = len(self.rows)
        self.learned.start(self.rows.slot_of(handle), workload, num_slots)
        if num_slots != self._num_slots:
            self._num_slots = num_slots
            self._standing = self._stand()
        self._name_workloads()
        return handle

    def finish(self, handle: int) -> None:
        """The request ended, however it did. Unknown handles are counted and ignored."""
        slot = self.rows.slot_of(handle)
        if slot == UNKNOWN_SLOT:
            self._dropped("unknown request")
            return
        self.rows.finish(slot)
        self._saving.save_when_due()

    # The hot path ---------------------------------------------------------------------------

    def wants_offers(self) -> NDArray[np.bool_]:
        """Which lookups should draft before the next plan [p]; not to be changed."""
        wanted = self.policy.lookup if self._rails.ask else self.policy.wants_offers()
        return wanted if self._allows_all else wanted & self._allowed

    def plan(self, batch: BatchState) -> Plan:
        """Decide the next step. Plain decoding if anything is wrong."""
        started = self._clock()
        plan_id = self._next_plan_id
        self._next_plan_id += 1
        place = plan_id % _STEPS_UNDER_WAY
        unobserved = self._under_way[place]
        if unobserved is not None:
            self._records.give_back(unobserved)
        try:
            record = self._records.take(batch.handles.shape[0], self._standing)
            plan = self._plan(plan_id, record, batch)
        except Exception as error:
            self._fault("plan", error)
            record = self._records.take(0, self._standing)
            handles = np.ravel([] if batch.handles is None else batch.handles)
            zeros = np.zeros(handles.shape[0], dtype=np.int16)
            plan = Plan(
                plan_id, handles, np.full_like(zeros, NO_PROPOSER), zeros, zeros, "fallback"
            )
        self._under_way[place] = record
        record.decision_seconds = self._clock() - started
        return plan

    def trim(self, plan: Plan, drafted: Int16Array, confidence: Float32Array | None) -> Plan:
        """How many of the drafts to verify, once they are there.

        ``drafted`` [n] tokens were really drafted; ``confidence`` [n, k] is their proposers' own
        (NaN or None: unknown).
        """
        started = self._clock()
        record = self._under_way[plan.id % _STEPS_UNDER_WAY]
        try:
            plan = self._verify(plan, record, drafted, confidence)
        except Exception as error:
            self._fault("trim", error)
        if record is not None:
            record.decision_seconds += self._clock() - started
        return plan

    def observe(self, plan: Plan, result: StepResult) -> None:
        """Learn from what a planned step brought; late, repeated or broken results are dropped."""
        started = self._clock()
        place = plan.id % _STEPS_UNDER_WAY
        record = self._under_way[place]
        if plan.mode == "fallback":
            self._dropped("fallback step")
            if self._metrics is not None and record is not None:
                self._metrics.add_step("fallback", None, record.decision_seconds)
            return
        if record is None or record.plan_id != plan.id:
            self._dropped("late or repeated")
            return
        try:
            self._observe(plan, record, result, started)
        except Exception as error:
            self._fault("observe", error)
        self._under_way[place] = None
        self._records.give_back(record)

    # What was learned -----------------------------------------------------------------------

    def save(self, path: Path | str | None = None) -> Path | None:
        """Add what was learned since the last save to a profile; returns its path.

        Without ``path`` the settings' one is used; None if there is neither. Raises ProfileError.
        """
        path = self.settings.profile.path if path is None else Path(path)
        if path is not None:
            self._saving.save(path)
        return path

    def close(self) -> None:
        """Save if the settings say where, and close the journal. Never raises."""
        try:
            self.save()
        except Exception as error:
            self._fault("save", error)
        if self._journal is not None:
            self._journal.close()

    @property
    def measured_speedup(self) -> float | None:
        """Committed tokens over the estimate for plain decoding, lately; None without data."""
        return self._rails.speedup.measured

    # ----------------------------------------------------------------------------------------

    def _plan(self, plan_id: int, record: StepRecord, batch: BatchState) -> Plan:
        n = record.n
        rails = self._rails
        offered = record.offered(batch, self._most_at(n) if self._caps else self._most)
        record.waiting = batch.waiting_requests
        record.is_trimmed = False
        record.arm = NO_ARM
        mode: Mode = "speculate"
        proposer, k = np.empty(n, INT16), np.empty(n, INT16)
        is_known = n > 0 and self.cost.is_known
        program = self._program(n) if is_known else None
        planned = NOT_YET
        if program is not None:
            planned = self._fused.plan(
                record.reference, program, *offered, self.cost.most_tokens,
                rails.probes is not None, rails.guard is not None, proposer, k,
            )  # fmt: skip
        if not planned[0]:
            requests = self.rows.arrays if self._has_targets else None
            mode, planned = self._stepwise.plan(record, batch, offered, requests, proposer, k)
        (
            _, unknown, record.context_tokens, record.plain_seconds,
            expected, verified, switches, predicted, record.has_models,
        ) = planned  # fmt: skip
        if verified == 0 and mode == "speculate":
            mode = "plain"
        is_known = record.plain_seconds > 0.0
        if self._metrics is not None:
            if is_known:
                self._estimated_speedup = expected / predicted * record.plain_seconds / n
            self._metrics.set_load(n, batch.waiting_requests)
            if unknown:
                self._metrics.add_dropped("unknown request")
            if switches:
                self._metrics.add_event("switch", switches)
            if mode == "probe":
                self._metrics.add_event("probe")
        record.plan_id = plan_id
        record.is_as_planned = True
        seconds = predicted if is_known else None
        return Plan(plan_id, offered[0], proposer, k, k, mode, seconds, expected)

    def _most_at(self, requests: int) -> Int16Array:
        """The most tokens each proposer may draft [p], under the cap tuned for this load."""
        k = None
        for cap in self._caps:
            if cap.load <= requests:
                k = cap.k
        return self._most if k is None else np.minimum(self._most, np.int16(k))

    def _program(self, requests: int) -> Memory | None:
        """The policy in compiled code, if it is a program."""
        return self.policy.program(requests, self.k_max, self.cost)

    def _verify(
        self,
        plan: Plan,
        record: StepRecord | None,
        drafted: Int16Array,
        confidence: Float32Array | None,
    ) -> Plan:
        """The plan with how many tokens of each draft to verify; itself where that stands."""
        if record is None or record.plan_id != plan.id:
            drafted = checked(drafted, INT16, plan.k.shape, "drafted")
            return _verifying(plan, np.clip(drafted, 0, plan.k))
        if confidence is not None and record.has_models and self.policy.adaptive:
            return self._trim(plan, record, drafted, confidence)
        if drafted is plan.k and record.is_as_planned:
            return _verifying(plan, plan.k)
        drafted = checked(drafted, INT16, (record.n,), "drafted")
        record.is_as_planned = False
        record.refer_to(self._standing)
        is_less = bound_drafted(record.reference, drafted)
        return _verifying(plan, record.arrays.drafted.copy() if is_less else plan.k)

    def _trim(
        self, plan: Plan, record: StepRecord, drafted: Int16Array, confidence: Float32Array
    ) -> Plan:
        """With what is worth verifying of models' drafts, by their own confidence."""
        n, arrays = record.n, record.arrays
        drafted = checked(drafted, INT16, (n,), "drafted")
        confidence = checked(confidence, FLOAT32, (n, self.k_max), "confidence")
        record.is_as_planned = False
        record.refer_to(self._standing)
        program = self._program(n) if record.view is None else None
        if program is not None:
            is_less, record.is_trimmed, expected, seconds = self._fused.trim(
                record.reference, program, drafted, confidence, record.context_tokens,
                record.plain_seconds, self.cost.most_tokens, plan.mode == "probe",
            )  # fmt: skip
        else:
            is_less, record.is_trimmed, expected, seconds = self._stepwise.trim(
                record, plan, drafted, confidence
            )
        is_cut = record.is_trimmed and plan.mode == "speculate"
        verify = plan.k
        if is_cut or is_less:
            verify = (arrays.kept if is_cut else arrays.drafted).copy()
        if not record.is_trimmed:
            return _verifying(plan, verify)
        if self._metrics is not None and record.plain_seconds > 0.0:
            self._estimated_speedup = expected / seconds * record.plain_seconds / n
        return Plan(
            plan.id, plan.handles, plan.proposer, plan.k, verify, plan.mode, seconds, expected
        )

    def _observe(self, plan: Plan, record: StepRecord, result: StepResult, started: float) -> None:
        n, p, rails = record.n, len(self.proposers), self._rails
        step_seconds, draft_seconds = float(result.step_seconds), result.draft_seconds
        is_timed = LEAST_SECONDS < step_seconds < MOST_SECONDS
        plain_seconds = record.plain_seconds if is_timed else 0.0
        has_prefill = result.prefill_tokens > 0
        is_routine = is_timed and n > 0 and not has_prefill and self.cost.is_settled
        record.refer_to(self._standing)
        arrays = record.arrays
        matched, times = arrays.unmatched, self.cost.no_times
        if result.matched is not None:
            matched = checked(result.matched, INT16, (p, n), "matched")
        if draft_seconds is not None:
            times = checked(draft_seconds, FLOAT64, (p,), "draft_seconds")
        observed = (
            checked(result.verified, INT16, (n,), "verified"),
            checked(result.accepted, INT16, (n,), "accepted"),
            checked(result.committed, INT16, (n,), "committed"),
            matched, times, step_seconds, 0.0 if has_prefill else plain_seconds,
            record.context_tokens, record.is_trimmed,
            plan.mode == "probe", plan.mode == "speculate", draft_seconds is not None, is_timed,
            is_routine, rails.probes is not None, rails.guard is not None,
        )  # fmt: skip
        program, said = self._program(n), NEW_WORKLOAD
        if program is not None:
            paid, drifts, surprised, is_loss, is_told_apart, is_cheap, said = self._fused.observe(
                record.reference, program, observed
            )
        else:
            paid, drifts, surprised, is_loss, is_told_apart, is_cheap = conclude(
                record.reference, observed
            )
        if draft_seconds is not None and not is_told_apart:
            self._dropped("unusable draft time")
            draft_seconds = None
        if drifts:
            self._event("drift", drifts)
        if is_loss:
            self._event("guard")
        if is_routine:
            if surprised or paid > self.cost.most_tokens:
                self.cost.learned(paid, record.context_tokens, step_seconds, surprised)
        elif n > 0 and is_timed:
            load = StepLoad(
                paid, n, record.context_tokens, bool(arrays.verified.any()),
                arrays.depth, arrays.draft_tokens, arrays.catch_up,
            )  # fmt: skip
            self.cost.observe(load, step_seconds, draft_seconds, result.prefill_tokens)
        if not is_timed:
            self._dropped("unusable step time")
        elif self._has_targets:
            self.rows.arrays.decode_seconds[arrays.slots] += step_seconds
            self.rows.arrays.decode_tokens[arrays.slots] += arrays.committed
        if said == NEW_WORKLOAD:
            self.policy.learn(
                Outcome(
                    n, arrays.workloads, plan.proposer, plan.k, arrays.drafted, arrays.kept,
                    arrays.verified, arrays.accepted, arrays.committed, matched,
                    arrays.offer_lengths, step_seconds, draft_seconds, plain_seconds, has_prefill,
                    plan.handles, arrays.promised,
                    record.arm,
                )
            )  # fmt: skip
        elif said != LEARNED:
            self.policy.learned(said, n)
        if is_cheap and self.policy.gate is not None:
            self.policy.gate.end_pauses()  # what was not worth its time may be now
        decision_seconds = record.decision_seconds + self._clock() - started
        self.last_decision_seconds = decision_seconds
        if self._metrics is not None:
            self._metrics.set_speedup(self._estimated_speedup, self._rails.speedup.measured)
            self._metrics.add_step(plan.mode, step_seconds if is_timed else None, decision_seconds)
        if self._journal is not None:
            self._journal.write_step(
                plan, result, arrays.workloads - 1, record.waiting, record.context_tokens,
                decision_seconds,
            )  # fmt: skip

    def _stand(self) -> Standing:
        return self.learned.standing(self.rows.arrays, self._counts, self._rails.watch)

    def _name_workloads(self) -> None:
        labels = self.workloads.labels
        for index in range(self._num_named, len(labels)):
            if self._metrics is not None:
                self._metrics.name_workload(index, labels[index])
            if self._journal is not None:
                self._journal.name_workload(index, labels[index])
        self._num_named = len(labels)

    def _event(self, event: Event, count: int = 1) -> None:
        if self._metrics is not None:
            self._metrics.add_event(event, count)

    def _dropped(self, reason: str) -> None:
        if self._metrics is not None:
            self._metrics.add_dropped(reason)

    def _fault(self, place: str, error: Exception) -> None:
        """Count a fault; log the first of its kind with its traceback."""
        if self._is_strict and place != "save":
            raise error
        self.faults[place] += 1
        if self._metrics is not None:
            self._metrics.add_fallback(place)
        if self.faults[place] == 1:
            log.error(
                "AutoSpec failed in %s; serving goes on without it (logged once)",
                place,
                exc_info=error,
            )


def _verifying(plan: Plan, verify: Int16Array) -> Plan:
    """The plan for so many tokens [n] to verify; itself where they are its own."""
    if verify is plan.verify:
        return plan
    return Plan(
        plan.id, plan.handles, plan.proposer, plan.k, verify, plan.mode, plan.predicted_seconds,
        plan.predicted_tokens,
    )  # fmt: skip


def _usable(settings: Settings, proposers: Sequence[ProposerInfo]) -> Int16Array:
    """The most tokens each proposer may draft [p]; 0 for those that the settings leave out."""
    names = [info.name for info in proposers]
    if len(set(names)) < len(names):
        raise ConfigError(f"proposers: every name must differ, found {names}")
    for info in proposers:
        if not 1 <= info.max_k <= MOST_K:
            raise ConfigError(
                f"proposers: {info.name!r} has max_k {info.max_k}; it must be 1 to {MOST_K}"
            )
        if info.kind not in KINDS:
            raise ConfigError(
                f"proposers: {info.name!r} is of kind {info.kind!r}; allowed: {', '.join(KINDS)}"
            )
    allowed = names if settings.proposers is None else settings.proposers
    for name in allowed:
        if name not in names:
            raise ConfigError(
                f"proposers: {name!r} is not a proposer of this engine; it has {names}"
            )
    return np.array(
        [info.max_k if info.name in allowed else 0 for info in proposers], dtype=np.int16
    )
