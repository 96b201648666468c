"""What the server counts besides AutoSpec's own metrics: its load, tokens, requests, latencies."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from autospec.engine.decoder import Decoder
from autospec.engine.request import GenerationOutput
from autospec.metrics import STEP_BUCKETS, Histogram

FIRST_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip


class EngineCounters(Collector):
    """The engine's side of ``/metrics``; read from the decoder when scraped."""

    def __init__(self, decoder: Decoder, registry: CollectorRegistry) -> None:
        self._decoder = decoder
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._ended: dict[str, int] = {"stop": 0, "length": 0, "cancelled": 0}
        self._refused = 0
        self._first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self._per_token = Histogram(STEP_BUCKETS)
        registry.register(self)

    def add_tokens(self, count: int) -> None:
        """Tokens that a step added to a request."""
        self._generated_tokens += count

    def add_refused(self) -> None:
        """A request that found the queue full."""
        self._refused += 1

    def add_ended(self, output: GenerationOutput) -> None:
        """A request that came to its end."""
        self._prompt_tokens += output.prompt_tokens
        self._ended[output.finish_reason] += 1
        first = output.first_token_seconds
        if first is None:
            return
        self._first_token.add(first)
        if len(output.token_ids) > 1:
            self._per_token.add((output.total_seconds - first) / (len(output.token_ids) - 1))

    def describe(self) -> Iterator[Metric]:
        """The families without samples; lets a registry refuse duplicates."""
        for family in self.collect():
            yield Metric(family.name, family.documentation, family.type)

    def collect(self) -> Iterator[Metric]:
        """Everything counted so far, and the load of this moment."""
        decoder = self._decoder
        room = decoder.cache.slots * decoder.cache.capacity
        for name, documentation, value in (
            ("autospec_engine_running_requests", "Requests in a slot.", decoder.running_requests),
            (
                "autospec_engine_waiting_requests",
                "Requests in the queue.",
                decoder.waiting_requests,
            ),
            ("autospec_engine_slots", "Requests that can run at once.", decoder.cache.slots),
            (
                "autospec_engine_cache_usage_ratio",
                "Share of the cache that holds tokens.",
                float(decoder.cache.lengths.sum()) / room,
            ),
        ):
            yield GaugeMetricFamily(name, documentation, value=value)
        yield CounterMetricFamily(
            "autospec_prompt_tokens", "Prompt tokens of ended requests.", value=self._prompt_tokens
        )
        yield CounterMetricFamily(
            "autospec_generated_tokens", "Tokens generated.", value=self._generated_tokens
        )
        ended = CounterMetricFamily("autospec_requests", "Requests that ended.", labels=("reason",))
        for reason, count in self._ended.items():
            ended.add_metric((reason,), count)
        yield ended
        yield CounterMetricFamily(
            "autospec_refused_requests", "Requests that found the queue full.", value=self._refused
        )
        yield self._first_token.family(
            "autospec_time_to_first_token_seconds", "From arrival to the first token."
        )
        yield self._per_token.family(
            "autospec_time_per_output_token_seconds", "Per token after the first, of a request."
        )
