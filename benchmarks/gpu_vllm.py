"""vLLM on a GPU: plain, static k, vLLM's own table and AutoSpec, in under 8 minutes.

    python benchmarks/gpu_vllm.py --model meta-llama/Llama-3.1-8B-Instruct \\
        --method eagle3 --draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --ks 2,4 --json out.json
    python benchmarks/gpu_vllm.py --tiny        # tiny random models on a CPU: does the script work?

The engines are loaded one after the other, each in a process of its own, and serve the same prompts
(the demo's, or those of ``--prompts``) greedily, at each number of running requests for as many
seconds as ``--seconds``, after a warm-up of a third of that. ``table`` is vLLM's
``num_speculative_tokens_per_batch_size`` with what was fastest at each load among plain and the
static arms before it. A budget (``--minutes``) is kept: the seconds at a load are cut to fit it,
once it is known how long an engine takes to load. Needs ``autospec-llm[vllm]`` and vLLM.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PLAIN, TABLE, ADAPTIVE = "plain", "table", "autospec"
WINDOWS = 5
"""Parts of a load's seconds; the spread is over them."""
LOADING_SECONDS = 420.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What the arms have in common; ``method`` and ``draft`` are vLLM's speculative config."""

    model: str
    method: str
    draft: str | None
    max_k: int
    loads: tuple[int, ...]
    max_tokens: int
    max_len: int
    policy: str
    engine: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm at one load: output tokens per second, whole and by window."""

    tokens_per_second: float
    windows: tuple[float, ...]


def engine_arguments(arm: str, setup: Setup, table: Sequence[Sequence[int]]) -> Any:
    """vLLM's EngineArgs of an arm."""
    from vllm import EngineArgs

    config: dict[str, Any] = {"method": setup.method, "num_speculative_tokens": setup.max_k}
    if setup.draft is not None:
        config["model"] = setup.draft
    if setup.method == "ngram":
        config |= {"prompt_lookup_max": 3, "prompt_lookup_min": 2}
    common = {
        "model": setup.model,
        "max_model_len": setup.max_len,
        "max_num_seqs": max(setup.loads),
        "enable_prefix_caching": False,
        "seed": 0,
        **setup.engine,
    }
    if arm == PLAIN:
        return EngineArgs(**common)
    if arm == ADAPTIVE:
        from autospec.adapters.vllm import configure

        # Prompts come round again: without this, lookups would recall the answers given before.
        options = {"autospec": {"cache_tokens": 0}}
        given = EngineArgs(**common, speculative_config=config, additional_config=options)
        return configure(given, policy=setup.policy)
    if arm == TABLE:
        config["num_speculative_tokens_per_batch_size"] = [list(each) for each in table]
    else:
        config["num_speculative_tokens"] = int(arm.removeprefix("k="))
    return EngineArgs(**common, speculative_config=config)


def run_arm(
    connection: Connection,
    arm: str,
    setup: Setup,
    table: Sequence[Sequence[int]],
    prompts: Sequence[tuple[str, list[int]]],
    log: Path,
) -> None:
    """An arm's process: loads its engine, says so, is told the seconds, and answers Figures."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(engine_arguments(arm, setup, table))
    connection.send("ready")
    seconds: float = connection.recv()
    for load in setup.loads:
        connection.send(measure(engine, setup, prompts, load, seconds))
    engine.engine_core.shutdown()
    os._exit(0)  # nothing of the engine is left that could hang


def measure(
    engine: Any, setup: Setup, prompts: Sequence[tuple[str, list[int]]], load: int, seconds: float
) -> Figures:
    """Keep ``load`` requests running; count the tokens that come out in each window."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    started = 0
    window = seconds / WINDOWS
    # The warm-up also lets the first requests' prefills pass and spreads the ends of requests.
    start = time.perf_counter() + seconds / 3.0
    counts = [0] * WINDOWS
    running = set()
    while True:
        while len(running) < load:
            workload, tokens = prompts[started % len(prompts)]
            name = f"{load}-{started}"
            # Requests of the first wave end at different times, as in a server that has run.
            most = setup.max_tokens
            if started < load:
                most = max(2, most * (started + 1) // load)
            engine.add_request(
                name,
                {"prompt_token_ids": tokens},
                SamplingParams(
                    temperature=0.0,
                    max_tokens=most,
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                    extra_args={"autospec": {"workload": workload}},
                ),
            )
            running.add(name)
            started += 1
        outputs = engine.step()
        now = time.perf_counter()
        place = int((now - start) // window)
        if place >= WINDOWS:
            break
        for output in outputs:
            if place >= 0:
                counts[place] += len(output.outputs[0].token_ids)
            if output.finished:
                running.discard(output.request_id)
    engine.abort_request(list(running))
    while engine.has_unfinished_requests():
        engine.step()
    return Figures(sum(counts) / seconds, tuple(count / window for count in counts))


def best_table(
    found: Mapping[str, Mapping[int, Figures]], loads: Sequence[int]
) -> list[tuple[int, int, int]]:
    """vLLM's table: at each load what was fastest, from half way after the load before it."""
    table, first = [], 1
    for load, following in zip(loads, [*loads[1:], None], strict=True):
        best = max(found, key=lambda arm: found[arm][load].tokens_per_second)
        k = 0 if best == PLAIN else int(best.removeprefix("k="))
        last = max(load, max(loads)) if following is None else (load + following) // 2
        table.append((first, last, k))
        first = last + 1
    return table


def encode(model: str, path: Path | None) -> list[tuple[str, list[int]]]:
    """Workload and token ids of the prompts, workloads in turn."""
    from transformers import AutoTokenizer

    import autospec
    from autospec.prompts import read_prompts

    own = read_prompts(path or Path(autospec.__file__).parent / "demo_prompts.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(model)
    groups: dict[str, list[list[int]]] = {}
    for prompt in own:
        messages = [{"role": each.role, "content": each.content} for each in prompt.messages]
        is_open = messages[-1]["role"] == "assistant"
        if tokenizer.chat_template is None:
            tokens = tokenizer.encode(prompt.text)
        else:
            tokens = tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=not is_open,
                continue_final_message=is_open,
                return_dict=False,
            )
        groups.setdefault(prompt.workload, []).append(tokens)
    return [
        (name, group[turn])
        for turn in range(max(map(len, groups.values())))
        for name, group in groups.items()
        if turn < len(group)
    ]


def make_tiny(folder: Path) -> str:
    """A tiny random Llama with the demo model's tokenizer, if that is there."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from autospec.engine.demo_model import demo_model_path

    source = demo_model_path()
    if source is None:
        sys.exit("--tiny takes the demo model's tokenizer: run `make model` once")
    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def show(found: Mapping[str, Mapping[int, Figures]], loads: Sequence[int]) -> None:
    """Tokens per second, and the ratio to plain and its spread over windows."""
    print("\n" + "arm".ljust(10) + "".join(f"{f'{load} running':>32}" for load in loads))
    for arm, by_load in found.items():
        cells = []
        for load in loads:
            mine, plain = by_load[load], found[PLAIN][load]
            base = statistics.median(plain.windows)
            low, high = min(mine.windows), max(mine.windows)
            ratio = mine.tokens_per_second / plain.tokens_per_second
            cells.append(
                f"{mine.tokens_per_second:.1f} {ratio:.2f}x ({low / base:.2f}-{high / base:.2f})"
            )
        print(arm.ljust(10) + "".join(f"{cell:>32}" for cell in cells))
    rivals = [arm for arm in found if arm != ADAPTIVE]
    if ADAPTIVE not in found:
        return
    for load in loads:
        best = max(rivals, key=lambda arm: found[arm][load].tokens_per_second)
        ratio = found[ADAPTIVE][load].tokens_per_second / found[best][load].tokens_per_second
        print(f"{load} running: AutoSpec at {ratio:.3f} of the best of the others, {best}")
    speeds = {
        arm: statistics.geometric_mean(each.tokens_per_second for each in by_load.values())
        for arm, by_load in found.items()
    }
    static = max((arm for arm in rivals if arm != TABLE), key=lambda arm: speeds[arm])
    print(
        f"all loads (geometric mean): AutoSpec at {speeds[ADAPTIVE] / speeds[static]:.3f} of the "
        f"best single static arm, {static}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="target; a folder or a hub name")
    parser.add_argument("--method", default="ngram", help="vLLM's speculative method")
    parser.add_argument("--draft", help="draft model or head, for methods that have one")
    parser.add_argument("--ks", default="2,4", help="static k; the greatest is AutoSpec's cap too")
    parser.add_argument("--loads", default="1,8,32,128", help="running requests")
    parser.add_argument("--seconds", type=float, default=12.0, help="at each load, most")
    parser.add_argument("--minutes", type=float, default=7.5, help="budget of the whole run")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--prompts", type=Path, help="JSONL; default: the demo's prompts")
    parser.add_argument("--policy", default="default")
    parser.add_argument("--engine-args", default="{}", help="JSON of further vLLM engine arguments")
    parser.add_argument("--tiny", action="store_true", help="tiny random models, eager, on a CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = json.loads(options.engine_args)
        if options.tiny:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            options.model = make_tiny(folder / "target")
            options.loads, options.seconds, options.max_tokens = "1,4", 3.0, 48
            engine = {"enforce_eager": True, **engine}
        if options.model is None:
            parser.error("--model is missing (or use --tiny)")
        prompts = encode(options.model, options.prompts)
        ks = sorted(int(k) for k in options.ks.split(","))
        loads = tuple(sorted(int(load) for load in options.loads.split(",")))
        longest = max(len(tokens) for _, tokens in prompts) + options.max_tokens + max(ks) + 1
        setup = Setup(
            options.model,
            options.method,
            options.draft,
            max(ks),
            loads,
            options.max_tokens,
            -(-longest // 256) * 256,
            options.policy,
            engine,
        )
        arms = [PLAIN, *(f"k={k}" for k in ks), TABLE, ADAPTIVE]
        found: dict[str, dict[int, Figures]] = {}
        table: list[tuple[int, int, int]] = []
        slowest_load = 0.0
        for number, arm in enumerate(arms):
            if arm == TABLE:
                table = best_table(found, loads)
                print(f"vLLM's table, from the arms so far: {table}", flush=True)
            loading = time.monotonic()
            context = multiprocessing.get_context("spawn")
            mine, theirs = context.Pipe()
            log = folder / f"{number}.log"
            process = context.Process(
                target=run_arm, args=(theirs, arm, setup, table, prompts, log)
            )
            process.start()
            theirs.close()
            receive(mine, arm, log, LOADING_SECONDS)
            slowest_load = max(slowest_load, time.monotonic() - loading)
            left = 60.0 * options.minutes - (time.monotonic() - began)
            left -= slowest_load * (len(arms) - number - 1)
            share = left / (len(arms) - number) / len(loads) / (4.0 / 3.0)
            seconds = max(1.0, min(options.seconds, share))
            print(
                f"[{time.monotonic() - began:4.0f} s] {arm}: loaded in "
                f"{time.monotonic() - loading:.0f} s; {seconds:.1f} s at each load",
                flush=True,
            )
            mine.send(seconds)
            found[arm] = {}
            for load in loads:
                figures: Figures = receive(mine, arm, log, 10.0 * seconds + 60.0)
                found[arm][load] = figures
                print(
                    f"[{time.monotonic() - began:4.0f} s] {arm} at {load} running: "
                    f"{figures.tokens_per_second:.1f} tokens/s",
                    flush=True,
                )
            process.join()
    show(found, loads)
    if options.json is not None:
        written = {
            "options": vars(options),
            "host": platform.platform(),
            "table": table,
            "arms": {
                arm: {load: asdict(each) for load, each in by_load.items()}
                for arm, by_load in found.items()
            },
        }
        options.json.write_text(json.dumps(written, indent=1, default=str) + "\n")
    print(f"{time.monotonic() - began:.0f} s in all")


def receive(connection: Connection, arm: str, log: Path, seconds: float) -> Any:
    """What an arm's process answers. Exits with its log's end if it ends or hangs."""
    try:
        if connection.poll(seconds):
            return connection.recv()
    except EOFError:
        pass
    sys.exit(f"{arm}: the engine ended or hung; its log's end:\n{log.read_text()[-4000:]}")


if __name__ == "__main__":
    main()
