"""A block of requests on its way through a decoder."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autospec.bench.contention import read_cpu, was_disturbed
from autospec.bench.feed import Feed
from autospec.bench.phases import OFF, PLAIN, BlockResult, Choice
from autospec.bench.tap import Tap
from autospec.bench.turns import TURN_SECONDS
from autospec.engine.decoder import Decoder
from autospec.engine.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class StepView:
    """One step as a live view shows it."""

    running: int
    tokens: int
    seconds: float
    mode: str
    choices: Counter[Choice]


@dataclass(frozen=True, slots=True)
class Served:
    """A block served: its figures, and the token ids of every request in the block's order."""

    result: BlockResult
    outputs: tuple[tuple[int, ...], ...]


class Serving:
    """Serves ``requests``, ``load`` at a time, a step when asked; only the decoder's time counts.

    The load is held until the last of them ends (see ``Feed``). The tokens of repeats count as
    well, as far as they came; ``outputs`` are those of the requests themselves.
    """

    def __init__(
        self, decoder: Decoder, tap: Tap | None, requests: Sequence[GenerationRequest], load: int
    ) -> None:
        self._decoder = decoder
        self._tap = tap
        self._load = load
        self._feed = Feed(requests, [request.max_tokens for request in requests])
        self._numbers: dict[str, int] = {}  # of the running requests
        self._started: set[str] = set()  # their first token comes from the prompt
        self._outputs: dict[int, tuple[int, ...]] = {}
        self._tokens = self._request_steps = 0
        self._seconds = 0.0
        self._cpu = read_cpu()
        if tap is not None:
            tap.clear()

    @property
    def is_over(self) -> bool:
        """Whether every request of the block has ended."""
        return self._feed.is_over

    @property
    def share(self) -> float:
        """The part of the block's own tokens that is there; 1 where it is over."""
        return self._feed.share

    def step(self) -> StepView:
        """One step of the decoder, with as many requests as the load says."""
        feed, numbers = self._feed, self._numbers
        while len(numbers) < self._load:
            number, request = feed.take()
            if feed.is_repeat(number):
                request = replace(request, id=f"{request.id}~{number}")
            numbers[self._decoder.submit(request)] = number
        began = time.perf_counter()
        events = self._decoder.step()
        seconds = time.perf_counter() - began
        self._seconds += seconds
        if self._tap is not None:
            self._tap.count_step()
        tokens = 0
        for event in events:
            number = numbers[event.request_id]
            if event.token_ids:
                tokens += len(event.token_ids)
                self._request_steps += 1
                self._started.add(event.request_id)
                feed.advance(number, len(event.token_ids))
            if event.output is not None:
                del numbers[event.request_id]
                feed.finish(number)
                if not feed.is_repeat(number):
                    self._outputs[number] = event.output.token_ids
        self._tokens += tokens
        running = len(numbers)
        if self._tap is None:
            return StepView(running, tokens, seconds, PLAIN, Counter({Choice(OFF, 0): running}))
        return StepView(running, tokens, seconds, self._tap.mode, self._tap.last)

    def take_turn(self, show: Callable[[StepView, float], None] | None = None) -> float:
        """Step for a turn (see ``turns``); returns ``share``, as shown after each step."""
        seconds = 0.0
        while not self.is_over and seconds < TURN_SECONDS:
            step = self.step()
            seconds += step.seconds
            if show is not None:
                show(step, self.share)
        return self.share

    def end(self) -> Served:
        """What the block came to; the repeats under way are cut off."""
        disturbed = was_disturbed(self._cpu, read_cpu())
        for request_id in self._numbers:
            self._decoder.cancel(request_id)
        self._decoder.run_until_idle()
        tap = self._tap
        result = BlockResult(
            tokens=self._tokens,
            seconds=self._seconds,
            step_tokens=self._tokens - len(self._started),
            request_steps=self._request_steps - len(self._started),
            drafted=0 if tap is None else tap.drafted,
            accepted=0 if tap is None else tap.accepted,
            choices={} if tap is None else dict(tap.choices),
            requests=len(self._outputs),
            disturbed=int(disturbed),
        )
        outputs = tuple(self._outputs[number] for number in sorted(self._outputs))
        return Served(result, outputs)
