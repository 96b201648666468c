"""Made requests: outputs that copy from their prompts, and ones that never repeat."""

from __future__ import annotations

import numpy as np

from autospec.replay.trace import TraceRequest

VOCAB = 5000


def copying(count: int, *, seed: int = 0, output: int = 120) -> list[TraceRequest]:
    """Outputs are the prompt with every twentieth token changed."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        prompt = rng.integers(0, VOCAB, output).astype(np.int32)
        answer = prompt.copy()
        answer[10::20] = rng.integers(0, VOCAB, len(answer[10::20]))
        found.append(TraceRequest(f"copy-{number}", "edit", prompt, answer, {}))
    return found


def fresh(count: int, *, seed: int = 1, output: int = 120) -> list[TraceRequest]:
    """Nothing is ever repeated."""
    rng = np.random.default_rng(seed)
    return [
        TraceRequest(
            f"fresh-{number}",
            "story",
            rng.permutation(VOCAB)[:60].astype(np.int32),
            (VOCAB + rng.permutation(VOCAB)[:output]).astype(np.int32),
            {},
        )
        for number in range(count)
    ]
