"""What happens around each of a vLLM scheduler's steps. Nothing here may fail the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry

from autospec.adapters.vllm.exposition import Exposition
from autospec.adapters.vllm.graphs import captured_k, named_ks
from autospec.adapters.vllm.labels import read_labels
from autospec.adapters.vllm.modes import Drafting, Mode, drafting_of, engine_of
from autospec.adapters.vllm.options import AdapterOptions, parse_options
from autospec.adapters.vllm.orders import ORDER, REPORT, DraftOrder, DraftReport
from autospec.adapters.vllm.pilot import Pilot, StepPlan, Tracked
from autospec.adapters.vllm.seats import NO_SEAT
from autospec.records import StepResult

log = logging.getLogger("autospec")

T = TypeVar("T")

_MOST_BEHIND = 64
"""Tokens that the drafter may be behind a request before its cache is caught up or given up."""

_WARM_SHARE = 0.02
"""Share of a plain step that keeping idle draft caches warm may cost, on average."""

_STEPS_UNDER_WAY = 64

_NO_DRAFTS = DraftOrder()


@dataclass(slots=True)
class Flight:
    """One scheduled step until its output is there."""

    started: float
    step: StepPlan | None = None
    requests: list[Any] = field(default_factory=list)  # vLLM requests, row by row; None: left out
    asked: int | None = None  # draft tokens asked for, if nothing but the rows is to be scheduled
    prefill_tokens: int = 0
    ordered: bool = False


class Steering:
    """Drives a Pilot from the calls that vLLM makes to its scheduler.

    ``scheduler`` is vLLM's; its public state is read, and ``spec_token_ids`` of its requests is
    written. Faults are counted, logged once, and leave the step to vLLM alone. ``plans_ahead`` says
    whether ``plan_ahead`` and ``drafts_arrived`` have anything to do. Raises EngineError and
    ConfigError when AutoSpec cannot work with this configuration.
    """

    def __init__(self, scheduler: Any, vllm_config: Any, version: str) -> None:
        self._scheduler = scheduler
        self.options: AdapterOptions = parse_options(vllm_config.additional_config)
        self.drafting: Drafting = drafting_of(vllm_config, self.options.model_max_k)
        self.plans_ahead = self.drafting.mode is Mode.AHEAD
        self._is_async = bool(vllm_config.scheduler_config.async_scheduling)
        # Else the next step runs already when the results of one arrive.
        self._learns_late = (
            not self._is_async and int(vllm_config.parallel_config.pipeline_parallel_size) == 1
        )
        self._most = int(vllm_config.num_speculative_tokens)
        self._captured = named_ks(
            vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        )
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self.registry = CollectorRegistry()
        self.pilot = Pilot(
            self.options,
            engine_of(vllm_config, version),
            self.drafting.model,
            with_lookups=self.drafting.mode is Mode.NOW,
            max_requests=int(vllm_config.scheduler_config.max_num_seqs),
            max_tokens=self._max_model_len,
            max_k=self._most,
            registry=self.registry,
        )
        self._exposition = Exposition(self.registry) if self.options.metrics else None
        self._flights: dict[int, Flight] = {}
        self._has_model = self.pilot.model >= 0
        self._ahead: dict[str, tuple[StepPlan, int]] = {}  # of the next step
        self._ahead_k: dict[str, int] = {}
        self._ahead_before: dict[str, tuple[StepPlan, int]] = {}  # of the step being scheduled
        self._worker_reports = False
        self._worker_missing_steps = 0
        self._last_end = 0.0
        self._logged: set[str] = set()
        self.clock: Callable[[], float] = time.perf_counter
        self._current: Flight | None = None
        self._ended: list[tuple[str, bool, Sequence[int]]] = []
        self._lesson: tuple[StepPlan, StepResult] | None = None
        self._is_closed = False
        model = self.drafting.model
        self._keeps_state = model is not None and model.needs_state
        if self.plans_ahead:
            log.info(
                "AutoSpec plans one step ahead (%s): method %s only, without lookups",
                self.drafting.reason,
                "none" if self.drafting.model is None else self.drafting.model.name,
            )

    def safely(self, place: str, call: Callable[..., T], *arguments: Any) -> T | None:
        """The result of a part of AutoSpec, or None after a fault."""
        try:
            return call(*arguments)
        except Exception as error:
            self.fault(place, error)
            return None

    def fault(self, place: str, error: Exception | None, text: str = "AutoSpec failed") -> None:
        """Count a fault of ours; log the first of its kind."""
        self.pilot.metrics.add_fallback(f"vllm {place}")
        if place not in self._logged:
            self._logged.add(place)
            log.error("%s in %s; vLLM goes on alone (logged once)", text, place, exc_info=error)

    # Requests -------------------------------------------------------------------------------

    def added(self, request: Any) -> None:
        """A request came in, or a streaming session got another part."""
        self._settle()
        if self.pilot.requests.get(request.request_id) is not None:
            return
        parameters = request.sampling_params
        labels, mistakes = read_labels(None if parameters is None else parameters.extra_args)
        if mistakes:
            self.pilot.metrics.add_dropped("request label")
            if "labels" not in self._logged:
                self._logged.add("labels")
                log.warning(
                    "request %s: %s; the label is ignored (logged once)",
                    request.request_id,
                    "; ".join(mistakes),
                )
        self.pilot.start(
            request.request_id,
            request.prompt_token_ids or (),
            0.0 if parameters is None else float(parameters.temperature),
            labels,
            self._limit(request),
        )

    def rewritten(self, request: Any) -> None:
        """A session went on: its last token may have changed."""
        self.pilot.rewrite(request.request_id, self._limit(request))

    def freed(self, request: Any) -> None:
        """A request ended, however it did. The step that ended it is still to be learned from."""
        self._ahead.pop(request.request_id, None)
        self._ahead_k.pop(request.request_id, None)
        well = request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
        self._ended.append((request.request_id, well, request.all_token_ids))

    # A step ---------------------------------------------------------------------------------

    def before_schedule(self) -> None:
        """Plan the step that is about to be scheduled, where plans are made NOW."""
        if self._ended:
            self._settle()
        self._current = flight = Flight(self.clock())
        if self.plans_ahead:
            return
        requests, rows, prefill = self._decoding()
        if not rows:
            flight.ordered = True
            return
        waiting = int(self._scheduler.get_request_counts()[1])
        step = self.pilot.plan(rows, waiting, prefill)
        if step is None:
            return
        asked = 0
        for index, request in enumerate(requests):
            tokens = step.drafts[index]
            if tokens:
                tokens = self._allowed(step, index, request)
                asked += len(tokens)
            request.spec_token_ids = tokens
        if len(requests) == len(self._scheduler.running):
            flight.asked = asked
        flight.step, flight.requests = step, requests
        flight.ordered = True

    def after_schedule(self, output: Any) -> None:
        """What was really scheduled; tells the workers."""
        flight = self._current
        self._current = None
        if flight is None or not output.num_scheduled_tokens:
            return
        if self.plans_ahead:
            self._take_ahead(flight, output)
        if not _is_as_planned(flight, output):
            self._cut(flight, output)
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id)
        if flight.ordered:
            setattr(output, ORDER, self._order(flight, output) if self._has_model else _NO_DRAFTS)
        self._flights[id(output)] = flight
        while len(self._flights) > _STEPS_UNDER_WAY:
            del self._flights[next(iter(self._flights))]

    def after_update(self, output: Any, result: Any) -> None:
        """Note what a step brought, whose output has been added to the requests.

        It is learned from ``while_running`` of the next one, where there will be one soon.
        """
        self.while_running()
        flight = self._flights.pop(id(output), None)
        now = self.clock()
        if flight is None:
            return
        seconds = now - max(flight.started, self._last_end)
        self._last_end = now
        report: DraftReport | None = getattr(result, REPORT, None)
        if flight.ordered:
            self._note_worker(report)
        if self._keeps_state and not self.plans_ahead:
            self._note_behind(output, result.sampled_token_ids, result.req_id_to_index)
        if flight.step is not None:
            self._note(flight, flight.step, result, seconds, report)
        if not self._learns_late or not self._scheduler.running:
            self.while_running()
        if self._ended:
            self._settle()

    def while_running(self) -> None:
        """Learn from the last step; called while the workers are busy with the next one."""
        lesson, self._lesson = self._lesson, None
        if lesson is not None:
            self.pilot.learn(*lesson)

    def drafts_arrived(self, drafts: Any) -> None:
        """Cut vLLM's own drafts to the plan that was made AHEAD of them."""
        tokens = drafts.draft_token_ids
        for index, request_id in enumerate(drafts.req_ids):
            if request_id in self._ahead:
                tokens[index] = tokens[index][: self._ahead_k[request_id]]

    def plan_ahead(self, output: Any) -> None:
        """Plan the step after the one that was just scheduled; called while vLLM closes it."""
        scheduled = output.num_scheduled_tokens
        self._ahead_before = {
            each: self._ahead.pop(each) for each in scheduled if each in self._ahead
        }
        requests: list[Any] = []
        rows: list[Tracked] = []
        for request_id in scheduled:
            request = self._scheduler.requests[request_id]
            if request.is_prefill_chunk:
                continue
            tracked = self._seated(request, request.num_tokens)
            if tracked is not None:
                requests.append(request)
                rows.append(tracked)
        if not rows:
            return
        waiting = int(self._scheduler.get_request_counts()[1])
        step = self.pilot.plan(rows, waiting, 0)
        if step is None:
            return
        ks = [captured_k(k, self._captured) for k in step.plan.k.tolist()]
        depth = self._most if self.drafting.fixed_depth else max(ks)
        output.num_spec_tokens_to_schedule = depth
        if self._is_async:  # nobody may count on more drafts than there will be
            for request_id in scheduled:
                request = self._scheduler.requests[request_id]
                request.spec_token_ids = request.spec_token_ids[:depth]
        for index, request in enumerate(requests):
            self._ahead[request.request_id] = (step, index)
            self._ahead_k[request.request_id] = ks[index]
            if self._is_async:
                request.spec_token_ids = [-1] * ks[index]

    def close(self) -> None:
        """Save what was learned, once. Never raises."""
        if self._is_closed:
            return
        self._is_closed = True
        self.safely("learn", self.while_running)
        self.pilot.close()
        if self._exposition is not None:
            self._exposition.close()

    # ----------------------------------------------------------------------------------------

    def _limit(self, request: Any) -> int:
        """The most tokens that a request can come to."""
        return min(int(request.num_prompt_tokens) + int(request.max_tokens), self._max_model_len)

    def _decoding(self) -> tuple[list[Any], list[Tracked], int]:
        """The requests that decode in the next step, as vLLM and as the pilot know them, and the
        prompt tokens that others still need."""
        requests: list[Any] = []
        rows: list[Tracked] = []
        prefill = 0
        known = self.pilot.requests
        for request in self._scheduler.running:
            count = request.num_tokens
            behind = count - request.num_computed_tokens
            if behind != 1 or count == request.num_prompt_tokens:
                prefill += max(0, behind)
                continue
            tracked = known.get(request.request_id)
            if tracked is not None and (tracked.count != count or tracked.seat == NO_SEAT):
                tracked = self._seated(request, count)
            if tracked is not None:
                requests.append(request)
                rows.append(tracked)
        return requests, rows, prefill

    def _seated(self, request: Any, count: int) -> Tracked | None:
        """The request if it is followed and can be planned, all of its ``count`` tokens known."""
        tracked = self.pilot.requests.get(request.request_id)
        if tracked is None or (tracked.count == count and tracked.seat != NO_SEAT):
            return tracked
        return tracked if self.pilot.seat(tracked, request.all_token_ids, count) else None

    def _allowed(self, step: StepPlan, row: int, request: Any) -> list[int]:
        """The planned draft tokens that may be used for a request."""
        tokens = step.drafts[row]
        if self._has_model and step.plan.proposer[row] == self.pilot.model:
            is_ready = self._worker_reports and not step.rows[row].cold
            return tokens if is_ready and not request.use_structured_output else []
        if request.use_structured_output:
            manager = self._scheduler.structured_output_manager
            return manager.validate_tokens(request, tokens)  # type: ignore[no-any-return]
        return tokens

    def _cut(self, flight: Flight, output: Any) -> None:
        """Note what vLLM scheduled of a plan, and what else."""
        decoding = 0
        if flight.step is not None:
            counts = output.num_scheduled_tokens
            drafts = output.scheduled_spec_decode_tokens
            verify: list[int] = []
            for request in flight.requests:
                name = None if request is None else request.request_id
                verify.append(len(drafts.get(name, ())))
                decoding += name in counts
            decoding += sum(verify)
            if verify != flight.step.plan.verify.tolist():
                self.pilot.drafted(flight.step, np.array(verify, dtype=np.int16))
        flight.prefill_tokens = max(0, output.total_num_scheduled_tokens - decoding)

    def _note(
        self,
        flight: Flight,
        step: StepPlan,
        result: Any,
        seconds: float,
        report: DraftReport | None,
    ) -> None:
        sampled, places = result.sampled_token_ids, result.req_id_to_index
        counts: list[int] = []
        tokens: list[int] = []
        for request in flight.requests:
            place = None if request is None else places.get(request.request_id)
            added = sampled[place] if place is not None and sampled else ()
            counts.append(len(added))
            tokens += added
        is_whole = 0 not in counts
        lesson = self.pilot.note(
            step,
            counts,
            tokens,
            seconds if is_whole else float("nan"),
            flight.prefill_tokens,
            None if report is None else report.seconds,
        )
        if lesson is not None:
            self._lesson = step, lesson

    def _settle(self) -> None:
        """Let go of the requests that have ended."""
        ended, self._ended = self._ended, []
        for request_id, well, tokens in ended:
            self.pilot.finish(request_id, tokens if well else None)

    def _take_ahead(self, flight: Flight, output: Any) -> None:
        """The plan that most of the scheduled requests were given one step earlier."""
        found: dict[int, dict[int, Any]] = {}
        steps: dict[int, StepPlan] = {}
        for request_id in output.num_scheduled_tokens:
            planned = self._ahead_before.pop(request_id, None)
            if planned is not None:
                step, row = planned
                steps[step.plan.id] = step
                rows = found.setdefault(step.plan.id, {})
                rows[row] = self._scheduler.requests[request_id]
        if found:
            plan_id = max(found, key=lambda each: len(found[each]))
            flight.step, rows = steps[plan_id], found[plan_id]
            flight.requests = [rows.get(row) for row in range(flight.step.plan.k.shape[0])]

    def _order(self, flight: Flight, output: Any) -> DraftOrder:
        draft: dict[str, int] = {}
        if flight.step is not None:
            plan = flight.step.plan
            rows = zip(flight.requests, plan.proposer.tolist(), plan.verify.tolist(), strict=True)
            for request, proposer, k in rows:
                if k > 0 and request is not None and proposer == self.pilot.model:
                    draft[request.request_id] = k
        catch_up: list[str] = []
        due: list[tuple[str, Tracked]] = []
        for request_id in output.num_scheduled_tokens:
            tracked = self.pilot.requests.get(request_id)
            if tracked is None or tracked.cold or request_id in draft:
                continue
            if tracked.prompt_behind:
                catch_up.append(request_id)
            elif tracked.behind >= _MOST_BEHIND:
                due.append((request_id, tracked))
        forget: list[str] = []
        if due:
            pays = self._pays_to_catch_up(flight, [tracked for _, tracked in due])
            for _, tracked in due:
                tracked.cold = not pays
            (catch_up if pays else forget).extend(request_id for request_id, _ in due)
        for request_id in (*draft, *catch_up):
            tracked = self.pilot.requests.get(request_id)
            if tracked is not None:
                flight.prefill_tokens += tracked.prompt_behind
                tracked.behind = tracked.prompt_behind = 0
        return DraftOrder(draft, tuple(catch_up), tuple(forget))

    def _pays_to_catch_up(self, flight: Flight, due: Sequence[Tracked]) -> bool:
        """Whether keeping these caches usable costs little; the cost model's own figures."""
        cost = self.pilot.controller.cost
        requests = max(1, len(flight.requests))
        context = sum(request.num_tokens for request in flight.requests)
        plain = cost.plain_seconds(requests, context) if cost.is_known else 0.0
        if plain <= 0.0:
            return True
        active, _, _, catch_up = cost.draft_coefficients[self.pilot.model].tolist()
        tokens = sum(tracked.behind for tracked in due)
        return bool((active + catch_up * tokens) / _MOST_BEHIND <= _WARM_SHARE * plain)

    def _note_behind(self, output: Any, sampled: Any, rows: Any) -> None:
        """Count what the target has seen in a step and the drafter has not."""
        for request_id, count in output.num_scheduled_tokens.items():
            tracked = self.pilot.requests.get(request_id)
            place = rows.get(request_id)
            if tracked is None or tracked.cold or place is None:
                continue
            tokens = sampled[place] if sampled else ()
            rejected = len(output.scheduled_spec_decode_tokens.get(request_id, ())) + 1
            seen = count - rejected + len(tokens) if tokens else count
            tracked.behind += seen
            tracked.last = seen
            if not tokens or count > rejected:
                tracked.prompt_behind += seen

    def _preempted(self, request_id: str) -> None:
        tracked = self.pilot.requests.get(request_id)
        if tracked is not None:
            tracked.behind = tracked.last = tracked.prompt_behind = 0
            tracked.cold = False
            self.pilot.rewrite(request_id, tracked.limit)

    def _note_worker(self, report: DraftReport | None) -> None:
        """Model drafts are asked for once a worker has shown that the plugin is there."""
        if report is None:
            if self.pilot.model >= 0 and not self._worker_reports:
                self._worker_missing_steps += 1
                if self._worker_missing_steps == 2:
                    self.fault(
                        "plugin",
                        None,
                        "vLLM's workers did not load AutoSpec's plugin (entry point group "
                        "vllm.general_plugins; is VLLM_PLUGINS set without autospec?): the "
                        "configured drafter stays off",
                    )
            return
        if not report.supports:
            log.warning(
                "method %s cannot wait for orders: AutoSpec plans one step ahead, without lookups",
                "none" if self.drafting.model is None else self.drafting.model.name,
            )
            self.drafting = replace(self.drafting, mode=Mode.AHEAD, reason="an unknown drafter")
            self.plans_ahead = True
            return
        self._worker_reports = True
        for _ in range(report.faults):
            self.fault("drafting", None, "the configured drafter failed")


def _is_as_planned(flight: Flight, output: Any) -> bool:
    """Whether exactly what was asked for was scheduled, and nothing beside it."""
    step = flight.step
    if step is None or flight.asked != step.num_drafts:
        return False
    return bool(
        len(output.num_scheduled_tokens) == len(flight.requests)
        and output.total_num_scheduled_tokens == len(flight.requests) + step.num_drafts
        and not output.scheduled_new_reqs
        and not output.scheduled_cached_reqs.resumed_req_ids
    )
