"""Requests as they were seen from outside, and what a number of them say about a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autospec.records import Float64Array
from autospec.replay.latency import Percentiles


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times are seconds on one clock; ``chunks`` those at which output came.

    ``first`` is None where it is not known when the first token came, token ids where there is no
    tokenizer. ``error`` says why a request has no output.
    """

    id: str
    workload: str
    sent: float
    end: float
    first: float | None = None
    chunks: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    prompt_token_ids: tuple[int, ...] | None = None
    output_token_ids: tuple[int, ...] | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """From sending to the first token."""
        return None if self.first is None else self.first - self.sent

    @property
    def tpot(self) -> float | None:
        """Per token after the first; None for fewer than two."""
        if self.first is None or self.output_tokens < 2:
            return None
        return (self.end - self.first) / (self.output_tokens - 1)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Between one chunk and the next."""
        return tuple(b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the time of requests goes: waiting in the queue, reading prompts, decoding.

    They add up to one. The queue is what the time to the first token is above that of a request
    which found the service idle, per prompt token. Reading is the own prompt's and, while a request
    decodes, that of the others': engines read prompts in the steps in which others decode.
    """

    queue: float
    prefill: float
    decode: float

    @property
    def before_first_token(self) -> float:
        """Of all the time."""
        return self.queue + self.prefill

    @property
    def prefill_without_queue(self) -> float:
        """What would be before the first token if nobody had to wait."""
        busy = self.prefill + self.decode
        return self.prefill / busy if busy > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server's own metrics said during a level; None where it does not tell.

    ``accepted_per_draft_token`` is accepted over drafted tokens, ``tokens_per_step`` what a request
    got per step, both only while it speculates.
    """

    engine: str
    running: float | None = None
    waiting: float | None = None
    cache_usage: float | None = None
    accepted_per_draft_token: float | None = None
    tokens_per_step: float | None = None
    queue_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """One step of the load, or a whole log.

    ``rate`` is in requests per second, as sent or as logged; ``running`` the mean number of
    requests that were decoding while any was. ``gpu_use`` is from 0 to 1.
    """

    rate: float
    requests: int
    failed: int
    seconds: float
    running: float
    prompt_tokens: float
    output_tokens: float
    tokens_per_second: float
    ttft: Percentiles | None
    tpot: Percentiles | None
    inter_token: Percentiles | None
    end_to_end: Percentiles
    shares: Shares | None
    server: ServerFacts | None = None
    gpu_use: float | None = None
    truncated: bool = False


def summarize(
    samples: Sequence[Sample],
    rate: float,
    prefill_token_seconds: float | None,
    *,
    server: ServerFacts | None = None,
    gpu_use: float | None = None,
    truncated: bool = False,
) -> Level:
    """One level of those that came through, at least one. ``truncated``: not all could be sent."""
    done = [sample for sample in samples if sample.error is None]
    seconds = max(each.end for each in done) - min(each.sent for each in done)
    ttft = [each.ttft for each in done if each.ttft is not None]
    gaps = [gap for each in done for gap in each.gaps]
    tokens = sum(each.output_tokens for each in done)
    return Level(
        rate=rate,
        requests=len(done),
        failed=len(samples) - len(done),
        seconds=seconds,
        running=mean_running(done),
        prompt_tokens=float(np.mean([each.prompt_tokens for each in done])),
        output_tokens=tokens / len(done),
        tokens_per_second=tokens / seconds if seconds > 0.0 else 0.0,
        ttft=Percentiles.of(ttft) if ttft else None,
        tpot=_percentiles([each.tpot for each in done if each.tpot is not None]),
        inter_token=_percentiles(gaps),
        end_to_end=Percentiles.of([each.end - each.sent for each in done]),
        shares=time_shares(done, prefill_token_seconds),
        server=server,
        gpu_use=gpu_use,
        truncated=truncated,
    )


def _percentiles(seconds: Sequence[float]) -> Percentiles | None:
    return Percentiles.of(seconds) if seconds else None


def mean_running(samples: Sequence[Sample]) -> float:
    """Requests that were decoding, averaged over the time in which any was.

    Where the first token's time is not known a request counts from its beginning.
    """
    spans = [(each.sent if each.first is None else each.first, each.end) for each in samples]
    events = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    running, busy, area, at = 0, 0.0, 0.0, 0.0
    for time, change in events:
        if running > 0:
            busy += time - at
            area += running * (time - at)
        running += change
        at = time
    return area / busy if busy > 0.0 else float(min(1, len(samples)))


def prefill_seconds_per_token(samples: Sequence[Sample]) -> float | None:
    """Time to first token per prompt token of requests that found the service idle.

    The first one counts as one that did. None without a time to first token.
    """
    known = sorted(
        (each for each in samples if each.error is None and each.first is not None),
        key=lambda each: each.sent,
    )
    if not known:
        return None
    alone, busy_until = [], -np.inf
    for each in known:
        if each.sent >= busy_until:
            alone.append(_per_prompt_token(each))
        busy_until = max(busy_until, each.end)
    return float(np.median(alone))


def _per_prompt_token(sample: Sample) -> float:
    assert sample.ttft is not None
    return sample.ttft / max(1, sample.prompt_tokens)


def time_shares(samples: Sequence[Sample], prefill_token_seconds: float | None) -> Shares | None:
    """Of the time of all of them together; None where first tokens are not known."""
    known = [each for each in samples if each.first is not None]
    if not known or prefill_token_seconds is None:
        return None
    prompts = np.array([max(1, each.prompt_tokens) for each in known], dtype=np.float64)
    sent = np.array([each.sent for each in known])
    first = np.array([each.first for each in known], dtype=np.float64)
    end = np.array([each.end for each in known])
    own = np.minimum(first - sent, prefill_token_seconds * prompts)
    # What others are charged for is the quickest reading seen: short prompts mostly take what is
    # no reading at all, and it must not pass for the reason why others decode slowly.
    work = np.minimum(own, float(((first - sent) / prompts).min()) * prompts)
    disturbed = np.minimum(end - first, _reading_between(sent, first, work, first, end))
    queue, prefill = float((first - sent - own).sum()), float((own + disturbed).sum())
    decode = float((end - first - disturbed).sum())
    total = queue + prefill + decode
    return Shares(queue / total, prefill / total, decode / total) if total > 0.0 else None


def _reading_between(
    sent: Float64Array,
    first: Float64Array,
    work: Float64Array,
    begin: Float64Array,
    end: Float64Array,
) -> Float64Array:
    """Seconds in which prompts are being read between ``begin`` and ``end`` [m].

    Each prompt's ``work`` [n] is spread evenly over the time from sending to its first token; no
    more than a second is read in a second.
    """
    spans = np.maximum(first - sent, 1e-9)
    edges = np.concatenate((sent, first))
    order = np.argsort(edges, kind="stable")
    edges = edges[order]
    rates = np.cumsum(np.concatenate((work / spans, -work / spans))[order])
    read = np.concatenate(([0.0], np.cumsum(np.clip(rates[:-1], 0.0, 1.0) * np.diff(edges))))
    between: Float64Array = np.interp(end, edges, read) - np.interp(begin, edges, read)
    return between
