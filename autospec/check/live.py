"""The measurement of a live service: a probe, the ladder, the levels, other sampling."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from autospec.check.client import Answer, Endpoint, NoService, ServiceClient, Wanted
from autospec.check.gpu import GpuWatch, is_local
from autospec.check.load import open_loop, read_alone, together
from autospec.check.samples import ServerFacts
from autospec.check.server_metrics import Reading, metrics_urls, server_facts
from autospec.prompts import Prompt

_SCRAPE_SECONDS = 0.5
_PROBE_TOKENS = 2
READING_WORDS = (16, 64, 128, 256, 512)
_READING_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Sampling:
    """What requests are sent with; None leaves it to the prompt or the server."""

    temperature: float | None = None
    top_p: float | None = None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is sent. The first of ``samplings`` is used at every rate, each other at the lowest.

    ``ladder`` are requests at once, and ``reading`` words of prompts, that measure step times.
    """

    url: str
    prompts: tuple[Prompt, ...]
    rates: tuple[float, ...]
    samplings: tuple[Sampling, ...] = (Sampling(),)
    ladder: tuple[int, ...] = ()
    reading: tuple[int, ...] = ()
    duration_seconds: float = 60.0
    most_requests: int = 200
    most_in_flight: int = 256
    max_tokens: int = 256
    model: str | None = None
    api_key: str | None = None
    endpoint: Endpoint = "chat"
    metrics_url: str | None = None
    timeout_seconds: float = 120.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredLevel:
    """One rate under one sampling."""

    rate: float
    sampling: Sampling
    answers: tuple[Answer, ...]
    truncated: bool
    server: ServerFacts | None
    gpu_use: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """All that was heard. ``ladder`` are full batches and ``reading`` prompts of each of some
    lengths, for step times alone."""

    model: str
    levels: tuple[MeasuredLevel, ...]
    ladder: tuple[Answer, ...]
    reading: tuple[tuple[Answer, ...], ...]
    metrics_url: str | None


@dataclass(slots=True)
class _Watch:
    """Scrapes the server and reads the GPUs while a level runs."""

    client: ServiceClient
    url: str | None
    gpus: GpuWatch | None
    readings: list[Reading] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        self.readings = []
        await self._read()
        task = asyncio.create_task(self._repeat())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._read()

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(_SCRAPE_SECONDS)
            await self._read()

    async def _read(self) -> None:
        if self.gpus is not None:
            await asyncio.to_thread(self.gpus.read)
        if self.url is not None:
            text = await self.client.read_text(self.url)
            reading = None if text is None else Reading.parse(text)
            if reading is not None:
                self.readings.append(reading)


async def measure(plan: LoadPlan, say: Callable[[str], None]) -> Measured:
    """Put the load on and listen. Raises NoService when nothing comes back."""
    client = ServiceClient(
        plan.url,
        model=plan.model,
        api_key=plan.api_key,
        endpoint=plan.endpoint,
        timeout_seconds=plan.timeout_seconds,
        most_connections=plan.most_in_flight + max(plan.ladder, default=0) + 8,
    )
    try:
        model = await client.find_model()
        first = plan.samplings[0]
        await client.probe(_wanted(plan.prompts[0], first, _PROBE_TOKENS))
        gpus = GpuWatch() if is_local(plan.url) else None
        watch = _Watch(client, await _find_metrics(client, plan), gpus)
        told = watch.url or "none found"
        say(f"{plan.url}: model {model}, metrics: {told}")
        ladder: list[Answer] = []
        for count in plan.ladder:
            say(f"step times: {count} short request{'s' if count > 1 else ''} at once")
            ladder += await together(client, count, plan.seed)
        if plan.reading:
            say("step times: prompts of several lengths, one by one")
        reading = await read_alone(client, plan.reading, _READING_ROUNDS, plan.seed)
        levels = []
        for rate, sampling in _steps(plan):
            say(f"{rate:g} requests/s for {plan.duration_seconds:g} s{_told(sampling)}")
            level = await _level(client, plan, rate, sampling, watch)
            levels.append(level)
            failed = [each for each in level.answers if each.sample.error is not None]
            if len(failed) == len(level.answers):
                raise NoService(
                    f"{plan.url}: all {len(failed)} requests at {rate:g}/s failed, the first with: "
                    f"{failed[0].sample.error}"
                )
        return Measured(model, tuple(levels), tuple(ladder), reading, watch.url)
    finally:
        await client.close()


def _steps(plan: LoadPlan) -> Sequence[tuple[float, Sampling]]:
    first, *others = plan.samplings
    return [(rate, first) for rate in plan.rates] + [(plan.rates[0], each) for each in others]


async def _level(
    client: ServiceClient, plan: LoadPlan, rate: float, sampling: Sampling, watch: _Watch
) -> MeasuredLevel:
    requests = [
        _wanted(prompt, sampling, prompt.max_tokens or plan.max_tokens) for prompt in plan.prompts
    ]
    async with watch.watching():
        sent = await open_loop(
            client,
            requests,
            rate=rate,
            duration_seconds=plan.duration_seconds,
            most_requests=plan.most_requests,
            most_in_flight=plan.most_in_flight,
            seed=plan.seed,
        )
    return MeasuredLevel(
        rate,
        sampling,
        sent.answers,
        sent.truncated,
        server_facts(watch.readings),
        None if watch.gpus is None else watch.gpus.take(),
    )


def _wanted(prompt: Prompt, sampling: Sampling, max_tokens: int) -> Wanted:
    temperature = prompt.temperature if sampling.temperature is None else sampling.temperature
    return Wanted(prompt, max_tokens, temperature, sampling.top_p)


async def _find_metrics(client: ServiceClient, plan: LoadPlan) -> str | None:
    """The address that was given, which must answer, or one of the usual ones that does."""
    given = plan.metrics_url
    for url in (given,) if given is not None else metrics_urls(plan.url):
        text = await client.read_text(url)
        reading = None if text is None else Reading.parse(text)
        if reading is not None and (reading.names is not None or given is not None):
            return url
    if given is not None:
        raise NoService(f"--metrics-url: {given} does not answer with Prometheus metrics")
    return None


def _told(sampling: Sampling) -> str:
    parts = [
        f"{name} {value:g}"
        for name, value in (("temperature", sampling.temperature), ("top-p", sampling.top_p))
        if value is not None
    ]
    return f", {', '.join(parts)}" if parts else ""
