from __future__ import annotations

import urllib.error
import urllib.request

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from autospec.errors import AutoSpecError, ConfigError
from autospec.metrics import Metrics, MetricsServer
from autospec.records import NO_PROPOSER
from autospec.step.counts import TokenCounts, count_tokens


def make() -> tuple[CollectorRegistry, Metrics]:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    counts = TokenCounts.empty(2, 128)
    metrics.bind(("ngram", "suffix"), counts)
    metrics.name_workload(0, "chat")
    metrics.name_workload(1, "code")
    return registry, metrics


def add(metrics: Metrics, *rows: tuple[int, int, int, int, int, int]) -> None:
    """Count requests: proposer, workload, drafted, verified, accepted, committed."""
    proposer, workload, *tokens = np.array(rows, dtype=np.int16).reshape(-1, 6).T.copy()
    count_tokens(metrics.counts, proposer, workload.astype(np.int32) + 1, *tokens)


def add_batch(metrics: Metrics) -> None:
    add(
        metrics,
        (0, 0, 4, 3, 1, 2),
        (1, 0, 8, 8, 8, 9),
        (1, 1, 8, 5, 0, 1),
        (NO_PROPOSER, 1, 0, 0, 0, 1),
    )


def test_tokens_by_proposer_and_workload() -> None:
    registry, metrics = make()
    add_batch(metrics)
    add_batch(metrics)

    def value(count: str, proposer: str, workload: str) -> float | None:
        return registry.get_sample_value(
            f"autospec_{count}_total", {"proposer": proposer, "workload": workload}
        )

    assert value("drafted_tokens", "ngram", "chat") == 8
    assert value("verified_tokens", "ngram", "chat") == 6
    assert value("accepted_tokens", "ngram", "chat") == 2
    assert value("accepted_tokens", "suffix", "chat") == 16
    assert value("verified_tokens", "suffix", "code") == 10
    assert value("drafted_tokens", "ngram", "code") == 0
    assert value("drafted_tokens", "none", "code") is None
    assert value("request_steps", "none", "code") == 2
    assert value("request_steps", "suffix", "code") == 2
    committed = {"workload": "chat"}
    assert registry.get_sample_value("autospec_committed_tokens_total", committed) == 22


def test_an_empty_batch_adds_nothing() -> None:
    registry, metrics = make()
    add(metrics)
    labels = {"proposer": "ngram", "workload": "chat"}
    assert registry.get_sample_value("autospec_drafted_tokens_total", labels) == 0


def test_a_workload_is_counted_before_it_is_named_and_one_out_of_range_never() -> None:
    registry, metrics = make()
    add_batch(metrics)
    add(metrics, (1, 100, 2, 2, 1, 2), (1, 128, 9, 9, 9, 9), (1, -1, 9, 9, 9, 9))
    add(metrics, (2 + 1, 0, 9, 9, 9, 9))
    metrics.name_workload(100, "late")
    suffix = {"proposer": "suffix"}
    name = "autospec_drafted_tokens_total"
    assert registry.get_sample_value(name, {**suffix, "workload": "chat"}) == 8
    assert registry.get_sample_value(name, {**suffix, "workload": "late"}) == 2


def test_steps_and_histograms() -> None:
    registry, metrics = make()
    metrics.add_step("speculate", 0.03, 1e-4)
    metrics.add_step("speculate", 0.2, 1e-4)
    metrics.add_step("plain", None, 5.0)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"autospec_{name}", labels)

    assert value("steps_total", mode="speculate") == 2
    assert value("steps_total", mode="plain") == 1
    assert value("steps_total", mode="guard") == 0
    assert value("step_seconds_count") == 2
    assert value("step_seconds_sum") == pytest.approx(0.23)
    assert value("step_seconds_bucket", le="0.02") == 0
    assert value("step_seconds_bucket", le="0.03") == 1
    assert value("step_seconds_bucket", le="+Inf") == 2
    assert value("decision_seconds_count") == 3
    assert value("decision_seconds_bucket", le="0.1") == 2


def test_the_measured_speedup_is_that_at_the_scrape() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    measured: list[float | None] = [None]
    metrics.bind(("a",), TokenCounts.empty(1, 1), lambda: measured[0])
    assert registry.get_sample_value("autospec_measured_speedup") is None
    measured[0] = 1.25
    assert registry.get_sample_value("autospec_measured_speedup") == 1.25


def test_events_reasons_and_gauges() -> None:
    registry, metrics = make()
    metrics.add_event("probe")
    metrics.add_event("switch", 3)
    metrics.add_event("guard")
    metrics.add_fallback("plan")
    metrics.add_dropped("late")
    metrics.add_dropped("late")
    metrics.add_journal_failure()
    assert registry.get_sample_value("autospec_estimated_speedup") is None
    metrics.set_speedup(1.5)
    metrics.set_load(4, 2)
    values = {
        "probes_total": 1,
        "switches_total": 3,
        "guard_activations_total": 1,
        "drift_resets_total": 0,
        "journal_failures_total": 1,
        "estimated_speedup": 1.5,
        "measured_speedup": None,
        "running_requests": 4,
        "waiting_requests": 2,
    }
    for name, value in values.items():
        assert registry.get_sample_value(f"autospec_{name}") == value, name
    reason = {"reason": "late"}
    assert registry.get_sample_value("autospec_dropped_observations_total", reason) == 2
    assert registry.get_sample_value("autospec_fallbacks_total", {"reason": "plan"}) == 1


def test_reasons_are_bounded() -> None:
    registry, metrics = make()
    for number in range(1000):
        metrics.add_fallback(f"reason {number}")
    samples = [
        sample
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "autospec_fallbacks_total"
    ]
    assert len(samples) <= 33
    assert sum(sample.value for sample in samples) == 1000


def test_two_controllers_do_not_share_metrics() -> None:
    registry, metrics = make()
    with pytest.raises(ConfigError, match="another controller"):
        metrics.bind(("a",), TokenCounts.empty(1, 1))
    with pytest.raises(ConfigError, match="close those first"):
        Metrics(registry)


def test_a_registry_takes_the_metrics_of_the_controller_after_a_closed_one() -> None:
    registry, metrics = make()
    metrics.add_event("probe")
    metrics.close()
    metrics.close()
    assert registry.get_sample_value("autospec_probes_total") is None
    Metrics(registry).bind(("ngram",), TokenCounts.empty(1, 1))
    assert registry.get_sample_value("autospec_probes_total") == 0


def test_exposition_is_served_and_the_port_freed() -> None:
    registry, metrics = make()
    add_batch(metrics)
    server = MetricsServer(0, registry)
    try:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            text = response.read().decode()
        assert 'autospec_drafted_tokens_total{proposer="ngram",workload="chat"} 4.0' in text
        with pytest.raises(AutoSpecError, match="cannot listen on"):
            MetricsServer(server.port, registry)
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_every_family_is_documented() -> None:
    registry, _ = make()
    text = generate_latest(registry).decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    helped = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    assert names == helped
    assert all(name.startswith("autospec_") for name in names)
