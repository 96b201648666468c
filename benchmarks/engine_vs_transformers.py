"""Plain decoding: the embedded engine against ``transformers.generate``, interleaved in one run.

    python benchmarks/engine_vs_transformers.py [--target FOLDER] [--batches 1,16] [--json OUT]

Both sides run the same prompts greedily for the same number of tokens, with the same weights,
dtype and threads, prefill included. A round runs both, the order swapping each time, and gives one
ratio of tokens per second; reported are the median ratio with the quartiles over the rounds, and
the ratio of the best rounds, which a busy machine disturbs least.
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
    ratio_of_best: float
    rounds: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, help="model folder; default: the demo's model")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--new-tokens", type=int, default=48)
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
            f"(quartiles {cell.ratio_quartiles[0]:.2f} to {cell.ratio_quartiles[1]:.2f}, "
            f"best against best {cell.ratio_of_best:.2f}, {cell.rounds} rounds)"
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
    requests = [
        GenerationRequest(prompt, max_tokens=options.new_tokens, ignore_eos=True)
        for prompt in prompts
    ]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def run_engine() -> float:
        began = time.perf_counter()
        outputs = decoder.generate(requests)
        seconds = time.perf_counter() - began
        assert all(len(output.token_ids) == options.new_tokens for output in outputs)
        return batch * options.new_tokens / seconds

    def run_reference() -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            output = reference.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=options.new_tokens,
                min_new_tokens=options.new_tokens,
            )
        seconds = time.perf_counter() - began
        assert output.shape[1] == longest + options.new_tokens
        return batch * options.new_tokens / seconds

    run_engine(), run_reference()  # warm
    engine, plain = [], []
    for number in range(options.rounds):
        if number % 2:
            plain.append(run_reference())
            engine.append(run_engine())
        else:
            engine.append(run_engine())
            plain.append(run_reference())
    ratios = [ours / theirs for ours, theirs in zip(engine, plain, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return Cell(
        batch,
        statistics.median(engine),
        statistics.median(plain),
        statistics.median(ratios),
        (low, high),
        max(engine) / max(plain),
        options.rounds,
    )


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
