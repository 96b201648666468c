"""What vLLM, SGLang, TensorRT-LLM and AutoSpec's own server say of themselves in Prometheus form.

Names as read in their sources in November 2026:

- vLLM 0.32: ``vllm/v1/metrics/loggers.py`` and ``vllm/v1/spec_decode/metrics.py``;
  ``vllm:gpu_cache_usage_perc`` is what releases before 0.10 called the cache's use
  (``docs/design/v1/metrics.md``).
- SGLang 0.5: ``python/sglang/srt/metrics/collector.py``, served with ``--enable-metrics``.
- TensorRT-LLM: ``tensorrt_llm/metrics/collector.py``, prefix ``trtllm_``, served by
  ``trtllm-serve`` at ``/prometheus/metrics`` (``/metrics`` is JSON there) with
  ``return_perf_metrics: true``; the load and speculation figures since early 2026.
- AutoSpec: ``autospec/serve/counters.py`` and ``autospec/metrics.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from autospec.check.samples import ServerFacts

PATHS = ("/metrics", "/prometheus/metrics")


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one engine. Gauges first, then counters, of which differences are taken.

    ``accept_length`` is a gauge of tokens per step; ``draft_steps`` a counter of request-steps that
    drafted; ``queue`` the prefix of a histogram of seconds.
    """

    engine: str
    running: str
    waiting: str
    cache_usage: tuple[str, ...]
    queue: str | None = None
    drafted: str | None = None
    accepted: str | None = None
    draft_steps: str | None = None
    accept_length: str | None = None


ENGINES: tuple[Names, ...] = (
    Names(
        "vllm",
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        cache_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        queue="vllm:request_queue_time_seconds",
        drafted="vllm:spec_decode_num_draft_tokens_total",
        accepted="vllm:spec_decode_num_accepted_tokens_total",
        draft_steps="vllm:spec_decode_num_drafts_total",
    ),
    Names(
        "sglang",
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        cache_usage=("sglang:token_usage",),
        queue="sglang:queue_time_seconds",
        accept_length="sglang:spec_accept_length",
    ),
    Names(
        "tensorrt-llm",
        running="trtllm_num_requests_running",
        waiting="trtllm_num_requests_waiting",
        cache_usage=("trtllm_kv_cache_utilization",),
        queue="trtllm_request_queue_time_seconds",
        drafted="trtllm_spec_decode_num_draft_tokens_total",
        accepted="trtllm_spec_decode_num_accepted_tokens_total",
        accept_length="trtllm_spec_decode_acceptance_length",
    ),
    Names(
        "autospec",
        running="autospec_engine_running_requests",
        waiting="autospec_engine_waiting_requests",
        cache_usage=("autospec_engine_cache_usage_ratio",),
        drafted="autospec_verified_tokens_total",
        accepted="autospec_accepted_tokens_total",
        draft_steps="autospec_request_steps_total",
    ),
)


@dataclass(frozen=True, slots=True)
class Reading:
    """One scrape: every name with the sum of its samples over all labels."""

    values: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Reading | None:
        """None for what is not in Prometheus form."""
        values: dict[str, float] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.labels.get("proposer") != "none":  # steps in which nobody drafted
                        values[sample.name] = values.get(sample.name, 0.0) + sample.value
        except (ValueError, KeyError, IndexError):
            return None
        return cls(values) if values else None

    @property
    def names(self) -> Names | None:
        """The engine whose metrics these are."""
        return next((each for each in ENGINES if each.running in self.values), None)


def metrics_urls(url: str) -> tuple[str, ...]:
    """Where the metrics of the server with this API address may be."""
    parts = urlsplit(url)
    return tuple(urlunsplit((parts.scheme, parts.netloc, path, "", "")) for path in PATHS)


def server_facts(readings: Sequence[Reading]) -> ServerFacts | None:
    """Means of the gauges and differences of the counters over one level; None for no engine's."""
    if not readings or (names := readings[-1].names) is None:
        return None
    first, last = readings[0].values, readings[-1].values

    def mean(*choices: str | None) -> float | None:
        found = [
            each.values[name]
            for name in choices
            if name
            for each in readings
            if name in each.values
        ]
        return float(np.mean(found)) if found else None

    def grown(name: str | None) -> float:
        return 0.0 if name is None else last.get(name, 0.0) - first.get(name, 0.0)

    drafted, accepted, steps = (
        grown(names.drafted), grown(names.accepted), grown(names.draft_steps),
    )  # fmt: skip
    waits = 0.0 if names.queue is None else grown(f"{names.queue}_count")
    per_step = mean(names.accept_length) or None
    if names.draft_steps is not None:
        per_step = 1.0 + accepted / steps if steps > 0.0 and drafted > 0.0 else None
    return ServerFacts(
        names.engine,
        running=mean(names.running),
        waiting=mean(names.waiting),
        cache_usage=mean(*names.cache_usage),
        accepted_per_draft_token=accepted / drafted if drafted > 0.0 else None,
        tokens_per_step=per_step,
        queue_seconds=grown(f"{names.queue}_sum") / waits if waits > 0.0 else None,
    )
