"""Small recorded requests: repetitive ones, on which lookups are right, and random ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from autospec.replay.trace import TraceRequest, write_traces

COST = """
shape: packed
step: {fixed_seconds: 0.01, per_token_seconds: 0.0004}
proposers:
  ngram: {kind: lookup, step_fraction: 0.001}
  suffix: {kind: lookup, step_fraction: 0.001}
  draft: {kind: sequential, per_depth_seconds: 0.001, max_k: 4}
"""


def made_requests(count: int, tokens: int = 40) -> tuple[TraceRequest, ...]:
    """Half "copy" (the output repeats the prompt), half "new" (nothing repeats)."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        copies = number % 2 == 0
        prompt = rng.integers(0, 5000, tokens).astype(np.int32)
        output = prompt.copy() if copies else rng.integers(5000, 10000, tokens).astype(np.int32)
        accepted = np.minimum(rng.geometric(0.5, tokens) - 1, 4).astype(np.int16)
        label = "copy" if copies else "new"
        found.append(TraceRequest(f"r{number}", label, prompt, output, {"draft": accepted}))
    return tuple(found)


def write_inputs(folder: Path, count: int = 8, tokens: int = 40) -> tuple[Path, Path]:
    """A trace and a cost file."""
    traces, cost = folder / "traces.jsonl", folder / "cost.yaml"
    write_traces(traces, made_requests(count, tokens))
    cost.write_text(COST, encoding="utf-8")
    return traces, cost
