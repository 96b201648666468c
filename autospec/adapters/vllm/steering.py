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
from autospec.adapters.vllm.pilot import Pilot, Row, StepPlan, Tracked
from autospec.records import Int16Array

log = logging.getLogger("autospec")

T = TypeVar("T")

_MOST_BEHIND = 64
"""Tokens that the drafter may be behind a request before its cache is caught up or given up."""

_WARM_SHARE = 0.02
"""Share of a plain step that keeping idle draft caches warm may cost, on average."""

_STEPS_UNDER_WAY = 64


@dataclass(slots=True)
class Flight:
    """One scheduled step until its output is there."""

    started: float
    step: StepPlan | None = None
    requests: list[Any] = field(default_factory=list)  # vLLM requests, row by row; None: left out
    verify: Int16Array | None = None
    prefill_tokens: int = 0
    ordered: bool = False


class Steering:
    """Drives a Pilot from the calls that vLLM makes to its scheduler.

    ``scheduler`` is vLLM's; its public state is read, and ``spec_token_ids`` of its requests is
    written. Faults are counted, logged once, and leave the step to vLLM alone. Raises EngineError
    and ConfigError when AutoSpec cannot work with this configuration.
    """

    def __init__(self, scheduler: Any, vllm_config: Any, version: str) -> None:
        self._scheduler = scheduler
        self.options: AdapterOptions = parse_options(vllm_config.additional_config)
        self.drafting: Drafting = drafting_of(vllm_config, self.options.model_max_k)
        self._is_async = bool(vllm_config.scheduler_config.async_scheduling)
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
        self._is_closed = False
        model = self.drafting.model
        self._keeps_state = model is not None and model.needs_state
        if self.drafting.mode is Mode.AHEAD:
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
        if self.pilot.get(request.request_id) is not None:
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
        )

    def rewritten(self, request: Any) -> None:
        """A session went on: its last token may have changed."""
        self.pilot.rewrite(request.request_id)

    def freed(self, request: Any) -> None:
        """A request ended, however it did. The step that ended it is still to be learned from."""
        self._ahead.pop(request.request_id, None)
        self._ahead_k.pop(request.request_id, None)
        well = request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
        self._ended.append((request.request_id, well, request.all_token_ids))

    # A step ---------------------------------------------------------------------------------

    def before_schedule(self) -> None:
        """Plan the step that is about to be scheduled, where plans are made NOW."""
        self._settle()
        self._current = flight = Flight(self.clock())
        if self.drafting.mode is Mode.AHEAD:
            return
        requests: list[Any] = []
        rows: list[Row] = []
        prefill = 0
        for request in self._scheduler.running:
            behind = request.num_tokens - request.num_computed_tokens
            if behind != 1 or request.num_output_tokens == 0:
                prefill += max(0, behind)
                continue
            row = self._row(request, request.num_tokens)
            if row is not None:
                requests.append(request)
                rows.append(row)
        if not rows:
            flight.ordered = True
            return
        waiting = int(self._scheduler.get_request_counts()[1])
        step = self.pilot.plan(rows, waiting, prefill)
        if step.plan.mode == "fallback":
            return
        for index, request in enumerate(requests):
            tokens = step.lookup_tokens(index)
            if tokens is None:  # the worker drafts them
                tokens = [0] * int(step.plan.k[index]) if rows[index].model else []
            elif request.use_structured_output and tokens:
                tokens = self._scheduler.structured_output_manager.validate_tokens(request, tokens)
            request.spec_token_ids = tokens
        flight.step, flight.requests = step, requests
        flight.ordered = True

    def after_schedule(self, output: Any) -> None:
        """What was really scheduled; tells the workers."""
        flight = self._current
        self._current = None
        if flight is None or not output.num_scheduled_tokens:
            return
        if self.drafting.mode is Mode.AHEAD:
            self._take_ahead(flight, output)
        scheduled = output.scheduled_spec_decode_tokens
        decoding = 0
        if flight.step is not None:
            drafted = np.array(
                [
                    0 if request is None else len(scheduled.get(request.request_id, ()))
                    for request in flight.requests
                ],
                dtype=np.int16,
            )
            flight.step = self.pilot.drafted(flight.step, drafted)
            flight.verify = drafted
            decoding = int(drafted.sum()) + sum(
                request is not None and request.request_id in output.num_scheduled_tokens
                for request in flight.requests
            )
        flight.prefill_tokens = max(0, output.total_num_scheduled_tokens - decoding)
        for request_id in output.preempted_req_ids or ():
            self._preempted(request_id)
        if flight.ordered:
            order = DraftOrder()
            if self.pilot.model >= 0:
                order = self._order(flight, output)
            setattr(output, ORDER, order)
        self._flights[id(output)] = flight
        while len(self._flights) > _STEPS_UNDER_WAY:
            del self._flights[next(iter(self._flights))]

    def before_update(self, output: Any) -> list[int] | None:
        """Output tokens of the planned requests before the step's are added."""
        flight = self._flights.get(id(output))
        if flight is None:
            return None
        return [0 if request is None else request.num_output_tokens for request in flight.requests]

    def after_update(self, output: Any, result: Any, before: Sequence[int] | None) -> None:
        """Learn from a step whose output has been added to the requests."""
        flight = self._flights.pop(id(output), None)
        now = self.clock()
        if flight is None:
            return
        seconds = now - max(flight.started, self._last_end)
        self._last_end = now
        report: DraftReport | None = getattr(result, REPORT, None)
        self._note_worker(report, flight)
        sampled = result.sampled_token_ids
        rows = result.req_id_to_index
        if self._keeps_state and self.drafting.mode is Mode.NOW:
            self._note_behind(output, sampled, rows)
        step = flight.step
        if step is None or before is None:
            self._settle()
            return
        accepted = np.zeros(len(flight.requests), dtype=np.int16)
        committed: list[Sequence[int]] = []
        is_whole = True
        for index, request in enumerate(flight.requests):
            place = None if request is None else rows.get(request.request_id)
            if place is None or not sampled:
                committed.append(())
                is_whole = False
                continue
            committed.append(request.output_token_ids[before[index] :])
            accepted[index] = max(0, len(sampled[place]) - 1)
        self.pilot.observe(
            step,
            accepted,
            committed,
            seconds if is_whole else float("nan"),
            flight.prefill_tokens,
            None if report is None else report.seconds,
        )
        self._settle()

    def drafts_arrived(self, drafts: Any) -> None:
        """Cut vLLM's own drafts to the plan that was made AHEAD of them."""
        if self.drafting.mode is not Mode.AHEAD:
            return
        tokens = drafts.draft_token_ids
        for index, request_id in enumerate(drafts.req_ids):
            if request_id in self._ahead:
                tokens[index] = tokens[index][: self._ahead_k[request_id]]

    def plan_ahead(self, output: Any) -> None:
        """Plan the step after the one that was just scheduled; called while vLLM closes it."""
        if self.drafting.mode is not Mode.AHEAD:
            return
        scheduled = output.num_scheduled_tokens
        self._ahead_before = {
            each: self._ahead.pop(each) for each in scheduled if each in self._ahead
        }
        requests: list[Any] = []
        rows: list[Row] = []
        for request_id in scheduled:
            request = self._scheduler.requests[request_id]
            if request.is_prefill_chunk:
                continue
            row = self._row(request, request.num_tokens)
            if row is not None:
                requests.append(request)
                rows.append(row)
        if not rows:
            return
        waiting = int(self._scheduler.get_request_counts()[1])
        step = self.pilot.plan(rows, waiting, 0)
        if step.plan.mode == "fallback":
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
        self.pilot.close()
        if self._exposition is not None:
            self._exposition.close()

    # ----------------------------------------------------------------------------------------

    def _row(self, request: Any, count: int) -> Row | None:
        tracked = self.pilot.get(request.request_id)
        if tracked is None:
            return None
        model = self.pilot.model >= 0 and not tracked.cold
        if self.drafting.mode is Mode.NOW:
            model = model and self._worker_reports and not request.use_structured_output
        left = request.max_tokens - request.num_output_tokens - 1
        room = min(left, self._max_model_len - count - 1)
        return Row(tracked, request.all_token_ids, count, max(0, room), model)

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
        step = flight.step
        if step is not None and flight.verify is not None:
            for index, request in enumerate(flight.requests):
                k = int(flight.verify[index])
                if k > 0 and request is not None and step.plan.proposer[index] == self.pilot.model:
                    draft[request.request_id] = k
        catch_up: list[str] = []
        due: list[tuple[str, Tracked]] = []
        for request_id in output.num_scheduled_tokens:
            tracked = self.pilot.get(request_id)
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
            tracked = self.pilot.get(request_id)
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
            tracked = self.pilot.get(request_id)
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
        tracked = self.pilot.get(request_id)
        if tracked is not None:
            tracked.behind = tracked.last = tracked.prompt_behind = 0
            tracked.cold = False
            self.pilot.rewrite(request_id)

    def _note_worker(self, report: DraftReport | None, flight: Flight) -> None:
        """Model drafts are asked for once a worker has shown that the plugin is there."""
        if not flight.ordered:
            return
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
            return
        self._worker_reports = True
        for _ in range(report.faults):
            self.fault("drafting", None, "the configured drafter failed")
