"""Prometheus metrics, counters first, kept in arrays and read out when the registry is scraped."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Thread
from typing import Literal, TypeAlias, get_args

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from autospec.errors import AutoSpecError, ConfigError
from autospec.records import Mode
from autospec.step.counts import ACCEPTED, DRAFTED, STEPS, VERIFIED, TokenCounts

STEP_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
DECISION_BUCKETS = (
    1e-5, 2.5e-5, 5e-5, 7.5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2.5e-3, 1e-2, 1e-1,
)  # fmt: skip

Event: TypeAlias = Literal["probe", "switch", "guard", "drift"]

_EVENTS: dict[Event, tuple[str, str]] = {
    "probe": ("autospec_probes", "Steps that tried what was not in use."),
    "switch": ("autospec_switches", "Changes of a request's proposer, off included."),
    "guard": ("autospec_guard_activations", "Times the guard turned speculation off."),
    "drift": ("autospec_drift_resets", "Sudden changes after which statistics were shrunk."),
}
_NONE = "none"
_MAX_REASONS = 32
_PLANES = (("drafted", DRAFTED), ("verified", VERIFIED), ("accepted", ACCEPTED))


class Histogram:
    """Counts of seconds below ascending bounds."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration; the caller has checked that it is finite."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        """The cumulative form that Prometheus wants."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), list(self._counts), strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self._sum)


class Metrics(Collector):
    """AutoSpec's metrics in an injected registry; one Metrics serves one controller.

    Raises ConfigError where the registry has one already: ``close`` takes it out, for that of the
    controller after a closed one. The hot path counts, names and labels are made when the registry
    is scraped. ``bind`` says where a controller counts, and names its proposers,
    ``name_workload`` its workloads.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._proposers: tuple[str, ...] = (_NONE,)
        self._bound = False
        self._workloads: dict[int, str] = {}
        self.counts = TokenCounts.empty(0, 0)
        self._steps: dict[str, int] = dict.fromkeys(get_args(Mode), 0)
        self._events: dict[Event, int] = dict.fromkeys(_EVENTS, 0)
        self._fallbacks: dict[str, int] = {}
        self._dropped: dict[str, int] = {}
        self._journal_failures = 0
        self._step_seconds = Histogram(STEP_BUCKETS)
        self._decision_seconds = Histogram(DECISION_BUCKETS)
        self._running = 0
        self._waiting = 0
        self._estimated_speedup: float | None = None
        self._measured_speedup: Callable[[], float | None] = _unmeasured
        self._registry = registry
        try:
            registry.register(self)
        except ValueError:
            raise ConfigError(
                "this registry has AutoSpec's metrics already; close those first "
                "(Metrics.close), or use a registry of its own for each controller"
            ) from None

    def close(self) -> None:
        """Take them out of the registry, so that it may have those of another controller."""
        with suppress(KeyError):  # closed before
            self._registry.unregister(self)

    def bind(
        self,
        proposers: Sequence[str],
        counts: TokenCounts,
        measured_speedup: Callable[[], float | None] | None = None,
    ) -> None:
        """Show these proposers' counts and, when scraped, goodput over that of measured plain
        steps; ConfigError when another controller has done so before."""
        if self._bound:
            raise ConfigError("these metrics serve another controller; make a Metrics for each one")
        self._bound = True
        self._proposers = (*proposers, _NONE)
        self.counts = counts
        if measured_speedup is not None:
            self._measured_speedup = measured_speedup

    def name_workload(self, index: int, label: str) -> None:
        """Name workload ``index``. Cheap to repeat."""
        self._workloads[index] = label

    def add_step(self, mode: Mode, step_seconds: float | None, decision_seconds: float) -> None:
        """Count a step; ``step_seconds`` is None when the engine's figure was unusable."""
        self._steps[mode] += 1
        if step_seconds is not None:
            self._step_seconds.add(step_seconds)
        self._decision_seconds.add(decision_seconds)

    def add_event(self, event: Event, count: int = 1) -> None:
        """Count a probe, switch, guard activation or drift reset."""
        self._events[event] += count

    def add_fallback(self, reason: str) -> None:
        """Count a step that went on without the policy."""
        _add_reason(self._fallbacks, reason)

    def add_dropped(self, reason: str, count: int = 1) -> None:
        """Count observations that taught nothing."""
        _add_reason(self._dropped, reason, count)

    def add_journal_failure(self) -> None:
        """Count a journal that had to be switched off."""
        self._journal_failures += 1

    def set_load(self, running: int, waiting: int) -> None:
        """Requests that run and wait now."""
        self._running, self._waiting = running, waiting

    def set_speedup(self, estimated: float | None) -> None:
        """Goodput over that of plain decoding, by the model."""
        self._estimated_speedup = estimated

    def describe(self) -> Iterator[Metric]:
        """The families without samples; lets a registry refuse duplicates."""
        for family in self.collect():
            yield Metric(family.name, family.documentation, family.type)

    def collect(self) -> Iterator[Metric]:
        """Everything counted so far, in Prometheus form."""
        yield from self._token_families()
        committed = CounterMetricFamily(
            "autospec_committed_tokens", "Tokens added to requests.", labels=("workload",)
        )
        for index, label in sorted(self._workloads.items()):
            committed.add_metric((label,), int(self.counts.committed[index]))
        yield committed
        yield _by_label("autospec_steps", "Engine steps by mode.", "mode", self._steps)
        yield self._step_seconds.family("autospec_step_seconds", "Seconds of a whole step.")
        yield self._decision_seconds.family(
            "autospec_decision_seconds", "Seconds that plan, trim and observe took in a step."
        )
        for event, (name, documentation) in _EVENTS.items():
            yield CounterMetricFamily(name, documentation, value=self._events[event])
        yield _by_label(
            "autospec_fallbacks", "Steps without the policy.", "reason", self._fallbacks
        )
        yield _by_label(
            "autospec_dropped_observations", "Observations not used.", "reason", self._dropped
        )
        yield CounterMetricFamily(
            "autospec_journal_failures", "Journals switched off.", value=self._journal_failures
        )
        for name, documentation, value in (
            ("autospec_running_requests", "Requests that run.", self._running),
            ("autospec_waiting_requests", "Requests that wait.", self._waiting),
            ("autospec_estimated_speedup", "Modeled goodput over plain.", self._estimated_speedup),
            ("autospec_measured_speedup", "Measured goodput over plain.", self._measured_speedup()),
        ):
            gauge = GaugeMetricFamily(name, documentation)
            if value is not None:
                gauge.add_metric((), value)
            yield gauge

    def _token_families(self) -> Iterator[Metric]:
        drafts, labels = self.counts.drafts.copy(), ("proposer", "workload")
        cells = [
            (row, column, (proposer, label))
            for row, proposer in enumerate(self._proposers)
            for column, label in sorted(self._workloads.items())
        ]
        for count, plane in _PLANES:
            family = CounterMetricFamily(
                f"autospec_{count}_tokens", f"Draft tokens {count}.", labels=labels
            )
            for row, column, names in cells:
                if names[0] != _NONE:
                    family.add_metric(names, int(drafts[plane, row, column]))
            yield family
        steps = CounterMetricFamily(
            "autospec_request_steps", "Steps of single requests by who drafted.", labels=labels
        )
        for row, column, names in cells:
            steps.add_metric(names, int(drafts[STEPS, row, column]))
        yield steps


def _unmeasured() -> None:
    return None


def _add_reason(counts: dict[str, int], reason: str, count: int = 1) -> None:
    if reason not in counts and len(counts) >= _MAX_REASONS:
        reason = "other"
    counts[reason] = counts.get(reason, 0) + count


def _by_label(
    name: str, documentation: str, label: str, counts: dict[str, int]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, documentation, labels=(label,))
    for value, count in sorted(counts.items()):
        family.add_metric((value,), count)
    return family


class MetricsServer:
    """A ``/metrics`` endpoint over a registry, until ``close``."""

    def __init__(self, port: int, registry: CollectorRegistry, address: str = "127.0.0.1") -> None:
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            raise AutoSpecError(
                f"metrics: cannot listen on {address}:{port}: {error.strerror}; "
                "choose another metrics.port"
            ) from None
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        thread: Thread = self._thread
        thread.join()
