"""A swing of the load in vLLM, from 1 running request to many and back: stalls, and how k settles.

    python benchmarks/vllm_swing.py [--most 24] [--swings 2] [--json OUT]

Plain vLLM and AutoSpec, each an engine in a process of its own, serve the same phases in turn: a
stall of both is the machine's, one of AutoSpec alone is its own, and what only the first swing
shows is what is compiled or learned once. Steps in which prompts are read take as long as the
prompts are, so they are shown apart. ``settled`` is the first step from which the mean k of the
decoding requests, over the ``WINDOW`` steps that follow, stays within one of that over the phase's
second half. It is judged at the peak alone: with one request k follows what that one is writing.

Needs vLLM (``make install-vllm``). About 3 minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from vllm_arm import ADAPTIVE, PLAIN, ArmSetup, Request, Step
from vllm_serving import WORKLOADS, Arms, encode, preload, set_environment

from autospec.prompts import read_prompts

WINDOW = 20
MOST_OF_MEDIAN = 5.0
MOST_SETTLING = 50


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One arm in one phase; ``ratio`` is that of the longest step without prompts to the median."""

    arm: str
    swing: int
    load: int
    steps: int
    median_ms: float
    longest_ms: float
    longest_prompt_ms: float
    ratio: float
    mean_k: float
    settled: int


def settled_at(ks: Sequence[float]) -> int:
    """The first step from which the mean k over the next steps stays within one of its end's."""
    width = min(WINDOW, len(ks))
    end = statistics.fmean(ks[len(ks) // 2 :])
    means = [statistics.fmean(ks[at : at + width]) for at in range(len(ks) - width + 1)]
    away = [at for at, mean in enumerate(means) if abs(mean - end) > 1.0]
    return away[-1] + 1 if away else 0


def figures(arm: str, swing: int, load: int, steps: Sequence[Step]) -> PhaseFigures:
    """What a phase looked like; there must be steps in it that only decode."""
    decoding = [step for step in steps if step.decoding and not step.has_prompts]
    seconds = [step.seconds for step in decoding]
    median = statistics.median(seconds)
    ks = [step.drafted / step.decoding for step in steps if step.decoding]
    return PhaseFigures(
        arm,
        swing,
        load,
        len(steps),
        1000 * median,
        1000 * max(seconds),
        1000 * max((step.seconds for step in steps if step.has_prompts), default=0.0),
        max(seconds) / median,
        statistics.fmean(ks),
        settled_at(ks),
    )


def show(console: Console, found: Sequence[PhaseFigures]) -> None:
    """All phases, and those that missed a bound."""
    table = Table(title="A swing of the load in vLLM", title_justify="left")
    names = ("swing", "running", "arm", "steps", "median", "longest", "ratio", "with prompts")
    for name in (*names, "mean k", "settled"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        table.add_row(
            str(each.swing + 1),
            str(each.load),
            each.arm,
            str(each.steps),
            f"{each.median_ms:.0f} ms",
            f"{each.longest_ms:.0f} ms",
            f"{each.ratio:.1f}",
            f"{each.longest_prompt_ms:.0f} ms",
            f"{each.mean_k:.2f}",
            "" if each.arm == PLAIN else str(each.settled),
        )
    console.print(table)
    for each in found:
        where = f"swing {each.swing + 1}, {each.load} running, {each.arm}"
        if each.ratio > MOST_OF_MEDIAN:
            console.print(f"{where}: a step of {each.ratio:.1f} times the median", highlight=False)
        is_peak = each.load > 1
        if each.arm == ADAPTIVE and is_peak and each.settled > MOST_SETTLING:
            console.print(f"{where}: k settled at step {each.settled} only", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder; default: the demo's")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--most", type=int, default=24, help="running requests at the peak")
    parser.add_argument("--swings", type=int, default=2)
    parser.add_argument("--requests", type=int, default=3, help="in each phase of 1 running")
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--adaptive-k", type=int, default=16)
    parser.add_argument("--policy", default="default")
    parser.add_argument("--threads", type=int, help="default: all cores")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    set_environment(options.threads)
    console = Console(width=120)
    preload()
    import autospec
    from autospec.engine.demo_model import demo_model_path

    model = options.model or demo_model_path()
    if model is None:
        parser.error("no --model given, and the demo's is not there yet: run `make model` once")
    own = read_prompts(Path(autospec.__file__).parent / "demo_prompts.jsonl")
    prompts = [prompt for prompt in own if prompt.workload in WORKLOADS]
    tokens = encode(prompts, str(model))
    requests = [Request(tokens[each.id], options.max_tokens, each.workload) for each in prompts]
    longest = max(len(each.prompt) for each in requests) + options.max_tokens
    setup = ArmSetup(
        arm=PLAIN,
        model=str(model),
        dtype=options.dtype,
        max_len=max(1024, -(-longest // 256) * 256),
        max_requests=options.most,
        adaptive_k=options.adaptive_k,
        policy=options.policy,
    )
    found: list[PhaseFigures] = []
    timelines: dict[str, list[Sequence[Step]]] = {PLAIN: [], ADAPTIVE: []}
    with tempfile.TemporaryDirectory() as logs:
        arms = Arms(setup, Path(logs), console)
        try:
            for arm in timelines:
                arms.start(arm)
            for swing in range(options.swings):
                for load in (1, options.most, 1):
                    count = options.requests if load == 1 else options.most
                    turn = len(timelines[PLAIN])
                    block = [requests[(7 * turn + at) % len(requests)] for at in range(count)]
                    for arm, timeline in timelines.items():
                        steps = arms.serve(block, load, [arm])[arm].timeline
                        timeline.append(steps)
                        found.append(figures(arm, swing, load, steps))
        finally:
            arms.stop()
    show(console, found)
    if options.json is not None:
        written = {
            "options": vars(options),
            "phases": [asdict(each) for each in found],
            "steps": {
                arm: [[asdict(step) for step in steps] for steps in phases]
                for arm, phases in timelines.items()
            },
        }
        options.json.write_text(json.dumps(written, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
