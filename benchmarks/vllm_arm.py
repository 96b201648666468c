"""One arm of vllm_serving.py: a vLLM engine in a process of its own.

Reads JSON lines from its standard input and answers each with one on its standard output: an
ArmSetup, and then blocks of requests, each followed by turns. In a turn the engine works for so
many seconds at least; at the end of the block the answer holds what it came to, else how far it is.
What vLLM prints goes to standard error. Of AutoSpec only the feed of requests is imported here: an
arm without it must be vLLM alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autospec.bench.feed import Feed

PLAIN, TABLE, ADAPTIVE = "plain", "table", "adaptive"
BLOCK_SIZE = 128
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, slots=True)
class ArmSetup:
    """What an engine is made of; ``table`` is vLLM's, for the arm of that name. ``clock`` "cpu"
    counts this process's processor time instead of the time that passes."""

    arm: str
    model: str
    dtype: str
    max_len: int
    max_requests: int
    adaptive_k: int
    policy: str
    clock: str = "wall"
    table: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a block."""

    prompt: Sequence[int]
    max_tokens: int
    workload: str


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step: whether prompts were read in it, and the ``drafted`` tokens of all requests
    that were ``decoding``. ``wakes`` says whether it was the first of a turn, after other engines
    had the processor and its caches; ``own_seconds`` are AutoSpec's."""

    seconds: float
    own_seconds: float
    wakes: bool
    has_prompts: bool
    decoding: int
    drafted: int


@dataclass(frozen=True, slots=True)
class Served:
    """A block as it was served. ``first_tokens`` of the ``tokens`` come from prompts. ``choices``
    counts request steps by number of draft tokens; ``steps`` are engine steps. Scheduling them and
    taking their results in took ``scheduler_seconds``. AutoSpec's own time are
    ``overhead_seconds``, of which ``learning_seconds`` are spent once a step is with the workers:
    nobody waits for that where they are other processes or a GPU. ``timeline`` is step by step."""

    tokens: int
    first_tokens: int
    seconds: float
    request_steps: int
    drafted: int
    choices: dict[int, int]
    steps: int
    scheduler_seconds: float
    overhead_seconds: float
    learning_seconds: float
    timeline: Sequence[Step]


def engine_arguments(setup: ArmSetup) -> dict[str, Any]:
    """vLLM's engine arguments of an arm."""
    arguments: dict[str, Any] = {
        "model": setup.model,
        "dtype": setup.dtype,
        "max_model_len": setup.max_len,
        "max_num_seqs": setup.max_requests,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 0,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": setup.max_requests * -(-setup.max_len // BLOCK_SIZE) + 1,
    }
    ngram = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    if setup.arm == PLAIN:
        return arguments
    if setup.arm == ADAPTIVE:
        arguments["speculative_config"] = ngram | {"num_speculative_tokens": setup.adaptive_k}
        arguments["scheduler_cls"] = "autospec.adapters.vllm.AutoSpecScheduler"
        options = {"policy": setup.policy, "cache_tokens": 0}
        arguments["additional_config"] = {"autospec": options}
        return arguments
    if setup.arm == TABLE:
        arguments["speculative_config"] = ngram | {
            "num_speculative_tokens": max(1, *(row[2] for row in setup.table)),
            "num_speculative_tokens_per_batch_size": [list(row) for row in setup.table],
        }
        return arguments
    method, k = setup.arm.split(":")
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": int(k)}
    if method == "ngram":
        config = ngram | config
    else:
        config["suffix_decoding_max_cached_requests"] = 0
    arguments["speculative_config"] = config
    return arguments


class Server:
    """An engine in this process that serves blocks at a given number of running requests."""

    def __init__(self, setup: ArmSetup) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine = LLMEngine.from_engine_args(EngineArgs(**engine_arguments(setup)))
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._clock = CLOCKS[setup.clock]
        self._blocks = 0
        self._start_counting()
        self._watch()

    def begin(self, requests: Sequence[Request], load: int) -> None:
        """Begin a block of requests, ``load`` at a time."""
        self._start_counting()
        self._blocks += 1
        self._load = load
        self._feed = Feed(requests, [request.max_tokens for request in requests])
        self._numbers: dict[str, int] = {}  # of the running requests
        self._started: set[str] = set()
        self._tokens = 0
        self._seconds = 0.0
        self._timeline: list[Step] = []

    def take_turn(self, seconds: float) -> float:
        """Serve for so long at least, or to the end of the block (see ``bench.feed``): the part of
        its own tokens that is there, 1 at the end."""
        began = self._clock()
        self._wakes = True
        while not self._feed.is_over and self._clock() - began < seconds:
            self._step()
            self._wakes = False
        self._seconds += self._clock() - began
        return self._feed.share

    def end(self) -> Served:
        """What the block came to."""
        self._engine.abort_request(list(self._numbers))
        served = Served(
            tokens=self._tokens,
            first_tokens=len(self._started),
            seconds=self._seconds,
            request_steps=self._request_steps,
            drafted=sum(k * count for k, count in self._choices.items()),
            choices=dict(self._choices),
            steps=self._steps,
            scheduler_seconds=self._scheduling,
            overhead_seconds=self._overhead,
            learning_seconds=self._learning,
            timeline=self._timeline,
        )
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return served

    def _step(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        feed, numbers, overhead = self._feed, self._numbers, self._overhead
        while len(numbers) < self._load:
            number, request = feed.take()
            name = f"{self._blocks}-{number}"
            numbers[name] = number
            self._engine.add_request(
                name,
                {"prompt_token_ids": list(request.prompt)},
                SamplingParams(
                    temperature=0.0,
                    max_tokens=request.max_tokens,
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                    extra_args={"autospec": {"workload": request.workload}},
                ),
            )
        began = self._clock()
        outputs = self._engine.step()
        seconds = self._clock() - began
        decoding, drafted, has_prompts = self._scheduled
        own = self._overhead - overhead
        self._timeline.append(Step(seconds, own, self._wakes, has_prompts, decoding, drafted))
        for output in outputs:
            count = len(output.outputs[0].token_ids)
            self._tokens += count
            self._started.add(output.request_id)
            feed.advance(numbers[output.request_id], count)
            if output.finished:
                feed.finish(numbers.pop(output.request_id))

    def _start_counting(self) -> None:
        self._request_steps = self._steps = 0
        self._scheduling = self._overhead = self._learning = 0.0
        self._choices: Counter[int] = Counter()
        self._scheduled = (0, 0, False)  # requests that decode, their draft tokens, any prompts

    def _watch(self) -> None:
        """Count what is scheduled, the time of it and, where AutoSpec steers, its own part."""
        schedule, update = self._scheduler.schedule, self._scheduler.update_from_output

        def updated(*args: Any, **kwargs: Any) -> Any:
            began = self._clock()
            answer = update(*args, **kwargs)
            self._scheduling += self._clock() - began
            return answer

        def counted(*args: Any, **kwargs: Any) -> Any:
            began = self._clock()
            output = schedule(*args, **kwargs)
            self._scheduling += self._clock() - began
            self._steps += bool(output.num_scheduled_tokens)
            drafts = output.scheduled_spec_decode_tokens
            ks: list[int] = []
            for name, scheduled in output.num_scheduled_tokens.items():
                request = self._scheduler.requests[name]
                if request.num_computed_tokens - scheduled >= request.num_prompt_tokens:
                    ks.append(len(drafts.get(name, ())))
            self._request_steps += len(ks)
            self._choices.update(ks)
            self._scheduled = len(ks), sum(ks), len(ks) < len(output.num_scheduled_tokens)
            return output

        self._scheduler.schedule = counted
        self._scheduler.update_from_output = updated
        steering = getattr(self._scheduler, "steering", None)
        if steering is None:
            return
        safely = steering.safely

        def timed(place: str, *args: Any) -> Any:
            began = self._clock()
            answer = safely(place, *args)
            seconds = self._clock() - began
            self._overhead += seconds
            if place == "learn":
                self._learning += seconds
            return answer

        steering.safely = timed


def main() -> None:
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = Server(ArmSetup(**json.loads(sys.stdin.readline())))
    print(torch.get_num_threads(), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        answer: object = None
        if "turn" in question:
            answer = share = server.take_turn(question["turn"])
            if share >= 1.0:
                answer = asdict(server.end())
        else:
            server.begin([Request(*each) for each in question["requests"]], question["load"])
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # vLLM's threads and exit hooks need not be waited for


if __name__ == "__main__":
    main()
