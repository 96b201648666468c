"""The controller: plan, trim and observe around every engine step, and what is learned by it."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from autospec.acceptance import hazard_table
from autospec.arrays import FLOAT32, FLOAT64, INT16, checked
from autospec.config import Settings
from autospec.cost import step_cost
from autospec.cost.regression import LEAST_SECONDS, MOST_SECONDS
from autospec.cost.shapes import SHAPES
from autospec.cost.step_cost import StepLoad
from autospec.errors import AutoSpecError, ConfigError
from autospec.estimators import Estimators
from autospec.journal.writer import Journal, open_journal
from autospec.limits import most_of, target_of, usable
from autospec.metrics import Event, Metrics, MetricsServer
from autospec.policy import make_policy
from autospec.policy.base import NO_ARM, Outcome
from autospec.policy.program import LEARNED, NEW_WORKLOAD, Memory
from autospec.profile.file import warm_start
from autospec.profile.learned import Identity, Profile
from autospec.profile.place import own_place
from autospec.profile.saving import Saving
from autospec.profile.tuned import KCap
from autospec.rails.overruling import Rails
from autospec.records import (
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
from autospec.step.rows import NO_HANDLE, UNKNOWN_SLOT, RequestRows
from autospec.step.stepwise import Stepwise
from autospec.step.warmup import tell_compiling, warm_up
from autospec.troubles import Troubles
from autospec.workload import OTHER, Workloads

log = logging.getLogger("autospec")

_STEPS_UNDER_WAY = 32


class Controller:
    """Decides, for every step of one engine, who drafts, how many tokens, and how many to verify.

    ``plan``, ``trim`` and ``observe`` are called once per step, in this order, from one thread;
    they never raise. A fault in a policy makes the step plain, is counted and logged once.
    ``start`` and ``finish`` frame a request. ``caps`` on k by load are those that the profile was
    tuned to, unless given. The journal and the metrics endpoint that the settings name are opened
    here unless ``journal`` and ``metrics`` are given. ``faults`` counts what went wrong, by method,
    ``dropped`` what was not learned from, by reason; with ``strict`` both are raised instead, which
    is for the tests of whoever embeds this. Raises ConfigError when settings do not fit, and
    ProfileMismatch when ``profile`` does not.
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
        self._troubles = Troubles(is_strict=strict)
        self.faults, self.dropped = self._troubles.faults, self._troubles.dropped
        self.proposers = tuple(proposers)
        self.engine = engine
        self.identity = Identity.of(engine, self.proposers)
        self.k_max = max((info.max_k for info in proposers), default=0)
        self._clock = clock
        self._troubles.metrics = self._metrics = metrics
        self._journal = journal
        if engine.shape not in SHAPES:
            raise ConfigError(f"engine: shape is {engine.shape!r}; allowed: {', '.join(SHAPES)}")
        self._most = usable(settings, self.proposers)
        self._allowed = self._most > 0
        self._allows_all = bool(self._allowed.all())
        self._tell_missing(settings)
        if (path := settings.profile.path) is not None:
            settings = settings.with_profile(
                own_place(
                    path, self.identity, hazard_table.LAYOUT, step_cost.LAYOUT, is_strict=strict
                )
            )
        self.settings = settings
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
        tell_compiling()
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
        self._estimated_speedup: float | None = None
        self._has_targets = False
        self.last_decision_seconds = 0.0
        self._saving = Saving(
            settings.profile, self.learned, self.workloads,
            f"learned while serving, policy {type(self.policy).__name__.lower()}", wall_clock,
            partial(self._troubles.fault, "save"),
        )  # fmt: skip
        if profile is not None:
            faded = profile.faded(wall_clock(), settings.profile.half_life_days)
            try:
                self.learned.load(faded, self.workloads.labels)
            except Exception as error:  # arrays of other names or shapes
                self.is_warm = False
                self._troubles.fault("profile", error)
        self._server: MetricsServer | None = None
        if metrics is None and settings.metrics.port is not None:
            registry = CollectorRegistry()
            self._metrics = metrics = Metrics(registry)
            self._server = self._serve(settings.metrics.port, registry)
        self._troubles.metrics = metrics
        if metrics is not None:
            metrics.bind(
                [info.name for info in self.proposers], self._counts, self._rails.speedup.measured
            )
        if journal is None and settings.journal.path is not None:
            self._journal = journal = self._open_journal(settings.journal.path)
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
        """A request begins to run; returns its handle.

        Never raises: a bad ``max_k`` is 0, a bad target none; one request more than can run at once
        gets the handle of none.
        """
        workload, max_k, target = 0, 0, 0.0
        try:
            workload = self.workloads.index(request)
        except Exception as error:
            self._troubles.fault("workload", error)
        try:
            max_k = most_of(request, self.settings)
        except Exception as error:
            self._troubles.fault("max_k", error)
        try:
            target = target_of(request, self.settings)
        except Exception as error:
            self._troubles.fault("target", error)
        try:
            handle = self.rows.start(workload, max_k, target)
        except OverflowError as error:
            self._troubles.fault("start", error)
            return NO_HANDLE
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
            self._troubles.drop("unknown request", f"handle {handle} to finish is not running")
            return
        self.rows.finish(slot)
        if self._metrics is not None and self.rows.running == 0:
            self._metrics.set_load(0, 0)  # there may be no next plan to say so
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
            self._troubles.fault("plan", error)
            record = self._records.take(0, self._standing)
            handles = np.ravel(_handles_of(batch))
            zeros = np.zeros(handles.shape[0], dtype=np.int16)
            plan = Plan(
                plan_id, handles, np.full_like(zeros, NO_PROPOSER), zeros, zeros, "fallback"
            )
        self._under_way[place] = record
        record.decision_seconds = self._clock() - started
        return plan

    def trim(self, plan: Plan, drafted: Int16Array, confidence: Float32Array | None) -> Plan:
        """How many of the drafts to verify, once they are there.

        ``drafted`` [n] tokens were really drafted; ``confidence`` [n, k] is their proposers' own:
        the probability that each token is right if those before it are (NaN or None: unknown).
        """
        started = self._clock()
        record = None
        try:
            record = self._under_way[plan.id % _STEPS_UNDER_WAY]
            if confidence is not None and confidence.shape != (plan.k.shape[0], self.k_max):
                self._troubles.fault("trim", _misshapen(confidence, plan.k.shape[0], self.k_max))
                confidence = None
            plan = self._verify(plan, record, drafted, confidence)
        except Exception as error:
            self._troubles.fault("trim", error)
        if record is not None:
            record.decision_seconds += self._clock() - started
        return plan

    def observe(self, plan: Plan, result: StepResult) -> None:
        """Learn from what a planned step brought; late, repeated or broken results are dropped."""
        started = self._clock()
        record, place = None, 0
        try:
            place = plan.id % _STEPS_UNDER_WAY
            record = self._under_way[place]
            if plan.mode == "fallback":
                if self._metrics is not None and record is not None:
                    self._metrics.add_step("fallback", None, record.decision_seconds)
                self._troubles.drop("fallback step", f"step {plan.id} was not planned")
                return
            if record is None or record.plan_id != plan.id:
                self._troubles.drop(
                    "late or repeated",
                    f"step {plan.id} was observed before, or is {_STEPS_UNDER_WAY} or more steps "
                    "old",
                )
                return
            self._observe(plan, record, result, started)
        except Exception as error:
            self._troubles.fault("observe", error)
        if record is not None:
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
        """Save if the settings say where, and close journal and metrics endpoint. Never raises."""
        try:
            self.save()
        except Exception as error:
            self._troubles.fault("save", error)
        if self._journal is not None:
            self._journal.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    @property
    def measured_speedup(self) -> float | None:
        """Committed tokens over the estimate for plain decoding, lately; None without data."""
        return self._rails.speedup.measured()

    # ----------------------------------------------------------------------------------------

    def _plan(self, plan_id: int, record: StepRecord, batch: BatchState) -> Plan:
        n = record.n
        rails = self._rails
        offered = record.offered(batch, self._most_at(n) if self._caps else self._most)
        record.waiting = batch.waiting_requests
        record.prefill_seconds = batch.prefill_tokens * self.cost.prefill_token_seconds
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
            if switches:
                self._metrics.add_event("switch", switches)
            if mode == "probe":
                self._metrics.add_event("probe")
        if unknown:
            self._troubles.drop_handle(record, self.rows)
        record.plan_id = plan_id
        record.is_as_planned = True
        seconds = predicted + record.prefill_seconds if is_known else None
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
            plan.id, plan.handles, plan.proposer, plan.k, verify, plan.mode,
            seconds + record.prefill_seconds, expected,
        )  # fmt: skip

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
            (
                paid, verified, flawed, drifts, surprised, is_loss, is_told_apart, is_cheap, said,
            ) = self._fused.observe(record.reference, program, observed)  # fmt: skip
        else:
            paid, verified, flawed, drifts, surprised, is_loss, is_told_apart, is_cheap = conclude(
                record.reference, observed
            )
        if flawed:
            self._troubles.drop_flawed(record, result)
        if draft_seconds is not None and not is_told_apart:
            self._troubles.drop(
                "unusable draft time",
                f"draft_seconds of step {plan.id} are {draft_seconds} of {step_seconds}; "
                "allowed: from 0, together less than step_seconds",
            )
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
                paid, n, record.context_tokens, verified > 0,
                arrays.depth, arrays.draft_tokens, arrays.catch_up,
            )  # fmt: skip
            self.cost.observe(load, step_seconds, draft_seconds, result.prefill_tokens)
        if not is_timed:
            self._troubles.drop(
                "unusable step time",
                f"step_seconds of step {plan.id} is {step_seconds}; allowed: between "
                f"{LEAST_SECONDS:g} and {MOST_SECONDS:g}",
            )
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
            self._metrics.set_speedup(self._estimated_speedup)
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

    def _serve(self, port: int, registry: CollectorRegistry) -> MetricsServer | None:
        """The endpoint that the settings name; serving goes on without it."""
        try:
            return MetricsServer(port, registry, self.settings.metrics.address)
        except AutoSpecError as error:
            self._troubles.fault("metrics", error)
            return None

    def _open_journal(self, path: Path) -> Journal | None:
        """The journal that the settings name; serving goes on without it."""
        failed = None if self._metrics is None else self._metrics.add_journal_failure
        most = self.settings.journal.max_bytes
        if self._troubles.is_strict:
            return Journal(path, most, on_failure=failed)
        return open_journal(path, most, failed)

    def _tell_missing(self, settings: Settings) -> None:
        """Tell of proposers that the policy names and this engine has not.

        No error unless strict: one policy file may serve several engines.
        """
        names = [info.name for info in self.proposers]
        for name in dict.fromkeys(settings.policy.named()) if names else ():
            if name not in names:
                said = (
                    f"policy {type(settings.policy).__name__.removesuffix('Options').lower()}: "
                    f"{name!r} is no proposer of this engine and never drafts; "
                    f"it has {', '.join(names)}"
                )
                if self._troubles.is_strict:
                    raise ConfigError(said)
                log.warning("%s", said)


def _verifying(plan: Plan, verify: Int16Array) -> Plan:
    """The plan for so many tokens [n] to verify; itself where they are its own."""
    if verify is plan.verify:
        return plan
    return Plan(
        plan.id, plan.handles, plan.proposer, plan.k, verify, plan.mode, plan.predicted_seconds,
        plan.predicted_tokens,
    )  # fmt: skip


def _handles_of(batch: object) -> NDArray[np.int64]:
    """The handles of a batch that could not be planned, as far as they can be told."""
    try:
        return np.asarray(getattr(batch, "handles", ()), dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return np.zeros(0, dtype=np.int64)


def _misshapen(confidence: Float32Array, n: int, k_max: int) -> ValueError:
    return ValueError(
        f"confidence has shape {confidence.shape}, expected {(n, k_max)}: "
        "Controller.k_max columns, NaN where nothing is known"
    )
