"""Plain decoding: the embedded engine against ``transformers.generate``, interleaved in one run.

    python benchmarks/engine_vs_transformers.py [--target FOLDER] [--batches 1,16] [--json OUT]

Both sides run the same prompts greedily for the same number of tokens, with the same weights,
dtype and threads. A round runs both, the order swapping each time, and gives one ratio of tokens
per second, prefill included, and one of decoding alone: from the run's time, that of a run for one
token is taken off, the same for both. Reported are medians with the quartiles over the rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from autospec.engine.decoder import Decoder
from autospec.engine.demo_model import demo_model_path
from autospec.engine.model import DTYPES, CausalModel
from autospec.engine.request import GenerationRequest

TOPICS = (
    "the tide", "a broken clock", "bread", "a night train", "chess", "the moon", "a lost key",
    "bees", "an old bridge", "rain", "the number seven", "a lighthouse", "copper", "a violin",
    "maps", "snow",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch size; tokens per second are medians over the rounds."""

    batch: int
    engine_tokens_per_second: float
    transformers_tokens_per_second: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    decode_ratio: float
    decode_ratio_quartiles: tuple[float, float]
    rounds: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, help="model folder; default: the demo's model")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--context", type=int, default=192, help="about how many prompt tokens")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = options.target or demo_model_path()
    if folder is None:
        parser.error(
            "no --target given and the demo's model is not there yet: run `make demo` once"
        )
    torch.set_num_threads(options.threads)

    engine_model = CausalModel.load(folder, dtype=options.dtype)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[options.dtype]).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cells = [
        measure(engine_model, reference, tokenizer, batch, options)
        for batch in map(int, options.batches.split(","))
    ]
    for cell in cells:
        print(
            f"batch {cell.batch:2d}: engine {cell.engine_tokens_per_second:7.1f} tokens/s, "
            f"transformers {cell.transformers_tokens_per_second:7.1f}, ratio {cell.ratio:.2f} "
            f"({cell.ratio_quartiles[0]:.2f} to {cell.ratio_quartiles[1]:.2f}); "
            f"decoding alone {cell.decode_ratio:.2f} ({cell.decode_ratio_quartiles[0]:.2f} to "
            f"{cell.decode_ratio_quartiles[1]:.2f}); {cell.rounds} rounds"
        )
    if options.json is not None:
        report = {
            "target": Path(folder).name,
            "machine": {
                "cpu": platform.processor() or platform.machine(),
                "threads": options.threads,
            },
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "settings": {
                "dtype": options.dtype,
                "new_tokens": options.new_tokens,
                "context": options.context,
            },
            "cells": [asdict(cell) for cell in cells],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def measure(
    engine_model: CausalModel,
    reference: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    batch: int,
    options: argparse.Namespace,
) -> Cell:
    prompts = make_prompts(tokenizer, batch, options.context)
    decoder = Decoder(engine_model, slots=batch, capacity=options.context * 2 + options.new_tokens)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def run_engine(new_tokens: int) -> float:
        requests = [
            GenerationRequest(prompt, max_tokens=new_tokens, ignore_eos=True) for prompt in prompts
        ]
        began = time.perf_counter()
        outputs = decoder.generate(requests)
        seconds = time.perf_counter() - began
        assert all(len(output.token_ids) == new_tokens for output in outputs)
        return seconds

    def run_reference(new_tokens: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            output = reference.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
            )
        seconds = time.perf_counter() - began
        assert output.shape[1] == longest + new_tokens
        return seconds

    run_engine(options.new_tokens), run_reference(options.new_tokens)  # warm
    whole: list[tuple[float, float]] = []
    decode: list[tuple[float, float]] = []
    for number in range(options.rounds):
        order = (run_engine, run_reference) if number % 2 else (run_reference, run_engine)
        first = {run: run(1) for run in order}
        total = {run: run(options.new_tokens) for run in order}
        whole.append((total[run_engine], total[run_reference]))
        decode.append(
            (
                total[run_engine] - first[run_engine],
                total[run_reference] - first[run_reference],
            )
        )
    ratios = [theirs / ours for ours, theirs in whole]
    decode_ratios = [theirs / ours for ours, theirs in decode]
    tokens = batch * options.new_tokens
    return Cell(
        batch,
        tokens / statistics.median(ours for ours, _ in whole),
        tokens / statistics.median(theirs for _, theirs in whole),
        statistics.median(ratios),
        _quartiles(ratios),
        statistics.median(decode_ratios),
        _quartiles(decode_ratios),
        options.rounds,
    )


def _quartiles(ratios: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(ratios, n=4)
    return low, high


def make_prompts(
    tokenizer: transformers.PreTrainedTokenizerBase, batch: int, context: int
) -> list[list[int]]:
    """Different prompts of nearly ``context`` tokens."""
    prompts = []
    for number in range(batch):
        topic = TOPICS[number % len(TOPICS)]
        text = (
            f"Notes on {topic}. " + f"Here is what I know about {topic}, item by item. " * context
        )
        prompts.append(tokenizer(text).input_ids[: context - number % 7])
    return prompts


if __name__ == "__main__":
    main()
