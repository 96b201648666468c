"""vLLM on this machine: plain, static k, its own table and AutoSpec, interleaved in one run.

    python benchmarks/vllm_serving.py [--quick] [--prompts FILE.jsonl] [--json OUT]

Every arm is a vLLM engine in a process of its own, loaded once and asleep while another one works.
All of them serve the same blocks of prompts (code edits, questions on passages, chat) at each
number of running requests, taking turns of a second (``autospec.bench.turns``), so that whatever
slows the machine down hits all alike.
The load is held until the last request of a block is done: those of the block come again meanwhile.
``plain`` is vLLM launched without speculation. ``table`` is vLLM's own
``num_speculative_tokens_per_batch_size`` with the n-gram k that was fastest at each load in the
first round, which is not counted for any arm: it warms all of them up, AutoSpec's estimates too.
Memory of what earlier requests were answered is off everywhere (suffix decoding would just recall
the answers when a later round asks the same again), and so is prefix caching.

Needs vLLM (``make install-vllm``). About 12 minutes on two idle cores, with ``--quick`` about 5. On
a machine that is busy with other things ``--threads 1 --clock cpu`` counts processor seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from vllm_arm import TABLE, ArmSetup, Request, Served, Step

from autospec.bench.phases import (
    ADAPTIVE,
    OFF,
    PLAIN,
    Block,
    BlockResult,
    Choice,
    Measurement,
    Phase,
    arm_order,
    plan_blocks,
    report,
    spread,
    staggered_tokens,
    tokens_per_second,
)
from autospec.bench.summary import print_summary
from autospec.bench.turns import take_turns
from autospec.prompts import Prompt, read_prompts

STATIC = ("ngram:2", "ngram:4", "ngram:8", "suffix:8")
WORKLOADS = ("code-edit", "rag", "chat")
LOADS = {1: 3, 4: 12, 16: 32}
"""Running requests -> requests in a block."""
QUICK_LOADS = {1: 3, 4: 9, 16: 24}
LEAST_OF_BEST = 0.97  # in every cell
LEAST_OF_STATIC = 1.05  # of the best single static arm, over all cells
MOST_OVERHEAD_MS = 0.5  # a step, at the greatest load
TURN_SECONDS = 1.0
SPIN_MS = "10"
"""How long OpenMP's threads wait awake for more work; by default 200 ms into another arm's turn."""
PRELOADS = ("libiomp5.so", "libtcmalloc_minimal.so.4")
MOST_SECONDS = 300.0  # for loading an engine, or a turn


class Arms:
    """The arms' processes, by name."""

    def __init__(self, setup: ArmSetup, logs: Path, console: Console) -> None:
        self._setup = setup
        self._logs = logs
        self._console = console
        self._running: dict[str, subprocess.Popen[str]] = {}

    def start(self, arm: str, table: Sequence[Sequence[int]] = ()) -> None:
        """Load an arm's engine. Exits with its log's end if it cannot."""
        began = time.monotonic()
        with self._log(arm).open("w") as log:
            self._running[arm] = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("vllm_arm.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        threads = self._ask(arm, asdict(replace(self._setup, arm=arm, table=table)))
        seconds = time.monotonic() - began
        self._console.print(f"{arm}: loaded in {seconds:.0f} s, {threads} threads", highlight=False)

    def serve(
        self, requests: Sequence[Request], load: int, names: Sequence[str]
    ) -> dict[str, Served]:
        """One block by every one of ``names``, which take turns."""
        block = {
            "requests": [[list(each.prompt), each.max_tokens, each.workload] for each in requests],
            "load": load,
        }
        served: dict[str, Served] = {}

        def take_turn(arm: str) -> float:
            answer = self._ask(arm, {"turn": TURN_SECONDS})
            if isinstance(answer, float):
                return answer
            answer["timeline"] = [Step(**each) for each in answer["timeline"]]
            served[arm] = Served(**answer)
            return 1.0

        for arm in names:
            self._ask(arm, block)
        take_turns({arm: partial(take_turn, arm) for arm in names})
        return served

    def stop(self) -> None:
        """End all of them."""
        for process in self._running.values():
            process.kill()
            process.wait()

    def _log(self, arm: str) -> Path:
        return self._logs / f"{arm.replace(':', '-')}.log"

    def _ask(self, arm: str, question: object) -> Any:
        process = self._running[arm]
        assert process.stdin is not None
        assert process.stdout is not None
        answer = ""
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], MOST_SECONDS)[0]:
                answer = process.stdout.readline()
        except BrokenPipeError:
            pass
        if not answer:
            log = self._log(arm).read_text()
            sys.exit(f"{arm}: the engine ended or hung; its log's end:\n{log[-3000:]}")
        return json.loads(answer)


def best_table(
    rounds: Mapping[str, Mapping[int, BlockResult]], max_requests: int
) -> list[list[int]]:
    """vLLM's table with the fastest n-gram k (or none) at each load of the first round.

    A load stands for the batch sizes around it, up to half way to the next one.
    """
    speeds: dict[int, dict[int, float]] = {}
    for arm, results in rounds.items():
        if arm == PLAIN or arm.startswith("ngram:"):
            k = 0 if arm == PLAIN else int(arm.split(":")[1])
            for load, result in results.items():
                speeds.setdefault(load, {})[k] = tokens_per_second(result) or 0.0
    loads = sorted(speeds)
    table, start = [], 1
    for load, following in zip(loads, [*loads[1:], None], strict=True):
        end = max_requests if following is None else (load + following) // 2
        table.append([start, end, max(speeds[load], key=lambda k: speeds[load][k])])
        start = end + 1
    return table


def encode(prompts: Sequence[Prompt], model: str) -> dict[str, list[int]]:
    """Prompt id -> token ids by the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    encoded = {}
    for prompt in prompts:
        messages = [{"role": each.role, "content": each.content} for each in prompt.messages]
        is_open = messages[-1]["role"] == "assistant"
        encoded[prompt.id] = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=not is_open,
            continue_final_message=is_open,
            return_dict=False,
        )
    return encoded


def set_environment(most_threads: int | None) -> int:
    """Have the arms run in process on that many cores, if there are; the number of threads."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("KMP_BLOCKTIME", SPIN_MS)
    # By itself vLLM leaves a core to its scheduler's process; here that is the engine's own.
    cores = sorted(os.sched_getaffinity(0))[:most_threads]
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    binding = ",".join(map(str, cores)) if len(cores) > 1 else "nobind"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = binding
    return len(cores)


def preload() -> list[str]:
    """Have the arms' processes preload what vLLM's CPU build wants; the names that were found."""
    places = (Path(sys.prefix) / "lib", *Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64"))
    found = [
        next((place / name for place in places if (place / name).exists()), None)
        for name in PRELOADS
    ]
    paths = [str(path) for path in found if path is not None]
    os.environ["LD_PRELOAD"] = ":".join([*os.environ.get("LD_PRELOAD", "").split(), *paths])
    return [Path(path).name for path in paths]


def verdict(
    console: Console,
    measurement: Measurement,
    overheads: Mapping[int, list[float]],
    awake: Mapping[int, list[float]],
    learning: Mapping[int, list[float]],
    scheduling: Mapping[str, Mapping[int, list[float]]],
) -> dict[str, Any]:
    """AutoSpec against the best of the others, cell by cell and in all; with the bounds.

    ``overheads``, those without the first step of every turn (``awake``) and their part
    ``learning`` by load, and ``scheduling`` by arm and load, are in milliseconds a step, by round.
    """
    rivals = [arm for arm in measurement.arms if arm != ADAPTIVE]
    table = Table(title="AutoSpec against the best of the others", title_justify="left")
    for name in ("cell", "best other", "AutoSpec / best", "rounds", "bound"):
        table.add_column(name, no_wrap=True)
    cells: list[dict[str, Any]] = []

    def add(name: str, sums: Mapping[str, BlockResult], names: list[str], bound: float) -> str:
        speeds = {arm: tokens_per_second(sums[arm]) or 0.0 for arm in measurement.arms}
        best = max(names, key=lambda arm: speeds[arm])
        ratio = speeds[ADAPTIVE] / speeds[best]
        cells.append({"cell": name, "best": best, "ratio": round(ratio, 4), "bound": bound})
        return best

    for index, phase in enumerate(measurement.phases):
        name = f"{phase.load} running"
        best = add(name, measurement.sums(index), rivals, LEAST_OF_BEST)
        found = spread(measurement.ratios(ADAPTIVE, best, index))
        if found is not None:
            cells[-1]["low"], cells[-1]["high"] = round(found.low, 4), round(found.high, 4)
    static = [arm for arm in rivals if arm != TABLE]
    add("all, best single static", measurement.total(), static, LEAST_OF_STATIC)
    add("all, best of all", measurement.total(), rivals, LEAST_OF_BEST)
    for cell in cells:
        extremes = f"{cell['low']:.2f}-{cell['high']:.2f}" if "low" in cell else ""
        is_met = "met" if cell["ratio"] >= cell["bound"] else "MISSED"
        table.add_row(
            cell["cell"],
            cell["best"],
            f"{cell['ratio']:.3f}",
            extremes,
            f">= {cell['bound']:.2f} {is_met}",
        )
    console.print(table)
    by_load, learning_by_load = _medians(overheads), _medians(learning)
    awake_by_load = _medians(awake)
    for load, milliseconds in by_load.items():
        console.print(
            f"AutoSpec's own time a step at {load} running: {milliseconds:.3f} ms"
            + (f" (bound {MOST_OVERHEAD_MS})" if load == max(by_load) else "")
            + f", of which learning while the next step runs {learning_by_load[load]:.3f}"
            + f"; without the first step of each turn {awake_by_load[load]:.3f}",
            highlight=False,
        )
    by_arm = {arm: _medians(scheduling[arm]) for arm in measurement.arms}
    for load in by_load:
        told = ", ".join(f"{arm} {each[load]:.2f}" for arm, each in by_arm.items())
        console.print(
            f"schedule and update_from_output, ms a step at {load} running: {told}",
            markup=False,
            highlight=False,
        )
    return {
        "cells": cells,
        "overhead_ms_per_step": by_load,
        "awake_overhead_ms_per_step": awake_by_load,
        "learning_ms_per_step": learning_by_load,
        "scheduler_ms_per_step": by_arm,
    }


def _medians(by_load: Mapping[int, list[float]]) -> dict[int, float]:
    return {load: sorted(each)[len(each) // 2] for load, each in by_load.items() if each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="model folder; default: the demo's model")
    parser.add_argument("--prompts", type=Path, help="JSONL; default: the demo's prompts")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds")
    parser.add_argument("--max-tokens", type=int, default=80, help="most tokens of a request")
    parser.add_argument("--adaptive-k", type=int, default=16, help="AutoSpec's greatest k")
    parser.add_argument("--policy", default="default")
    parser.add_argument("--arms", default=",".join((PLAIN, *STATIC, TABLE, ADAPTIVE)))
    parser.add_argument("--quick", action="store_true", help="one counted round, smaller blocks")
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=120)
    threads = set_environment(options.threads)
    if options.clock == "cpu" and threads > 1:
        parser.error("--clock cpu needs --threads 1: threads that wait for each other use time too")
    console.print(f"preloaded: {', '.join(preload()) or 'nothing'}", highlight=False)

    import autospec
    from autospec.engine.demo_model import demo_model_path

    model = options.model or demo_model_path()
    if model is None:
        parser.error("no --model given, and the demo's is not there yet: run `make model` once")
    prompts = read_prompts(options.prompts or Path(autospec.__file__).parent / "demo_prompts.jsonl")
    names = {prompt.workload for prompt in prompts}
    workloads = tuple(name for name in WORKLOADS if name in names) or tuple(sorted(names))
    loads = QUICK_LOADS if options.quick else LOADS
    rounds = 1 + (1 if options.quick else options.rounds)
    phases = [
        Phase(load, workloads, requests, options.max_tokens, rounds)
        for load, requests in loads.items()
    ]
    blocks = sorted(plan_blocks(phases, prompts), key=lambda block: (block.round, block.phase))
    tokens = encode(prompts, str(model))
    longest = max(map(len, tokens.values())) + options.max_tokens
    setup = ArmSetup(
        arm=PLAIN,
        model=str(model),
        dtype=options.dtype,
        max_len=max(1024, -(-longest // 256) * 256),
        max_requests=max(loads),
        adaptive_k=options.adaptive_k,
        policy=options.policy,
        clock=options.clock,
    )
    arms = options.arms.split(",")
    measurement = Measurement.empty(phases, arms)
    overheads: dict[int, list[float]] = {load: [] for load in loads}
    awake: dict[int, list[float]] = {load: [] for load in loads}
    learning: dict[int, list[float]] = {load: [] for load in loads}
    scheduling: dict[str, dict[int, list[float]]] = {
        arm: {load: [] for load in loads} for arm in arms
    }
    warm_up: dict[str, dict[int, BlockResult]] = {arm: {} for arm in arms}
    table: list[list[int]] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as logs:
        processes = Arms(setup, Path(logs), console)
        try:
            for arm in arms:
                if arm != TABLE:
                    processes.start(arm)
            for number, block in enumerate(blocks):
                if block.round == 1 and block.phase == 0 and TABLE in arms:
                    table = best_table(warm_up, setup.max_requests)
                    processes.start(TABLE, table)
                    console.print(f"table from the first round: {table}", highlight=False)
                    for warm in blocks[: len(phases)]:
                        serve(processes, [TABLE], warm, phases, tokens)
                turns = [arm for arm in arm_order(arms, number) if block.round or arm != TABLE]
                load = phases[block.phase].load
                results = {}
                for arm, served in serve(processes, turns, block, phases, tokens).items():
                    results[arm] = as_result(arm, served, len(block.prompts))
                    if block.round:
                        scheduling[arm][load].append(1000 * served.scheduler_seconds / served.steps)
                    if arm == ADAPTIVE and block.round:
                        overheads[load].append(1000 * served.overhead_seconds / served.steps)
                        learning[load].append(1000 * served.learning_seconds / served.steps)
                        own = [each.own_seconds for each in served.timeline if not each.wakes]
                        awake[load].append(1000 * sum(own) / max(1, len(own)))
                speeds = ", ".join(
                    f"{arm} {tokens_per_second(results[arm]) or 0.0:.1f}"
                    for arm in arms
                    if arm in results
                )
                console.print(
                    f"[{time.monotonic() - began:4.0f} s] "
                    f"{'warm-up' if block.round == 0 else f'round {block.round}'}, "
                    f"{phases[block.phase].load} running: tokens/s {speeds}",
                    markup=False,
                    highlight=False,
                )
                if block.round == 0:
                    for arm, result in results.items():
                        warm_up[arm][phases[block.phase].load] = result
                else:
                    measurement.add_round(block.phase, results)
        finally:
            processes.stop()
    print_summary(console, measurement)
    found: dict[str, Any] = {"options": vars(options), "table": table, **report(measurement)}
    if ADAPTIVE in arms:
        found["verdict"] = verdict(console, measurement, overheads, awake, learning, scheduling)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1, default=str) + "\n")
    console.print(f"{time.monotonic() - began:.0f} s in all", highlight=False)


def serve(
    processes: Arms,
    names: Sequence[str],
    block: Block,
    phases: Sequence[Phase],
    tokens: Mapping[str, list[int]],
) -> dict[str, Served]:
    """One block by these arms."""
    phase = phases[block.phase]
    requests = [
        Request(
            tokens[prompt.id],
            staggered_tokens(
                min(phase.max_tokens, prompt.max_tokens or phase.max_tokens), index, phase
            ),
            prompt.workload,
        )
        for index, prompt in enumerate(block.prompts)
    ]
    return processes.serve(requests, phase.load, names)


def as_result(arm: str, served: Served, requests: int) -> BlockResult:
    """A served block as measurements count it: a request's first token comes from its prompt."""
    name = {ADAPTIVE: "drafts", TABLE: "ngram"}.get(arm, arm.split(":")[0])
    return BlockResult(
        tokens=served.tokens,
        seconds=served.seconds,
        step_tokens=served.tokens - served.first_tokens,
        request_steps=served.request_steps,
        drafted=served.drafted,
        accepted=max(0, served.tokens - served.first_tokens - served.request_steps),
        choices={
            Choice(name if int(k) else OFF, int(k)): count for k, count in served.choices.items()
        },
        requests=requests,
    )


if __name__ == "__main__":
    main()
