"""What a tuned profile saves: tokens until 95 % of the final goodput, cold and warm.

    autospec tune --engine replay --traces T.jsonl --cost cost.yaml --loads 1,8,32 -o p.json
    python benchmarks/warm_start.py T.jsonl --cost cost.yaml --profile p.json

Runs the requests that the profile was not tuned on (the held-out half of the same split) under the
default policy, on the simulated clock of the cost file, in many orders: once cold with the untuned
settings, once from the profile with its settings. The goodput in a window of tokens is the mean
over the orders, the final one that of the last half of the run. A run has arrived at the first
window from which this and the next windows together hold 95 % of the final goodput.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from autospec.config import load_settings
from autospec.controller import Controller
from autospec.cost_file import CostFile, read_cost_file
from autospec.profile import Profile, load_profile
from autospec.records import EngineInfo, Float64Array
from autospec.replay import ClosedLoop
from autospec.trace import TraceRequest, read_traces
from autospec.tune.traced import Bed, TracedEngine, in_order, proposers_of
from autospec.tune.tuner import split
from autospec.tuned import ProposerSettings

SHARE = 0.95
TOGETHER = 4  # windows that must hold it together


def window_seconds(
    requests: Sequence[TraceRequest],
    bed: Bed,
    settings: Mapping[str, ProposerSettings],
    profile: Profile | None,
    load: int,
    window: int,
    seed: int,
) -> Float64Array:
    """Seconds for each window of ``window`` tokens, the last, incomplete one left out."""
    engine = TracedEngine(requests, load, bed, settings)
    kept = bed.policy.profile.model_copy(update={"path": None})
    controller = Controller(
        bed.policy.model_copy(update={"profile": kept}),
        engine.proposers,
        engine.info,
        profile=profile,
        seed=seed,
    )
    loop = ClosedLoop(engine, controller, requests, load)
    tokens, seconds = [0], [0.0]
    while loop.step():
        tokens.append(engine.tokens)
        seconds.append(engine.seconds)
    edges = np.arange(0, tokens[-1] + 1, window)
    return np.diff(np.interp(edges, tokens, seconds))


def arrival(goodputs: Float64Array) -> tuple[int, float]:
    """The first window that has arrived, and the final goodput."""
    half = goodputs[len(goodputs) // 2 :]
    final = len(half) / float(np.sum(1.0 / half))
    for first in range(len(goodputs)):
        some = goodputs[first : first + TOGETHER]
        if len(some) / float(np.sum(1.0 / some)) >= SHARE * final:
            return first, final
    return len(goodputs), final


def main() -> None:
    """Print a line per load, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--cost", type=Path, required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--loads", default="1,8,32")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--window", type=int, default=200, help="tokens per window")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    requests = read_traces(given.traces)
    cost: CostFile = read_cost_file(given.cost)
    profile = load_profile(given.profile)
    if profile.tuned is None:
        parser.error(f"{given.profile} was never tuned")
    _, held_out = split(requests, profile.tuned.provenance.seed)
    info = EngineInfo("trace", "replay", "1", "simulated", "none", cost.shape, cost.captured_sizes)
    bed = Bed(info, load_settings("default"), cost)
    untuned = proposers_of(requests, cost)
    results = []
    for load in (int(part) for part in given.loads.split(",")):
        window = given.window
        line = f"load {load:>3}"
        found: dict[str, object] = {"load": load, "window_tokens": window}
        for name, start, settings in (
            ("cold", None, untuned),
            ("warm", profile, profile.tuned.proposers),
        ):
            rows = [
                window_seconds(
                    in_order(held_out, load, seed), bed, settings, start, load, window, seed
                )
                for seed in range(given.seeds)
            ]
            shortest = min(len(row) for row in rows)
            mean_seconds = np.mean([row[:shortest] for row in rows], axis=0)
            goodputs = window / mean_seconds
            at, final = arrival(goodputs)
            line += (
                f"   {name}: {at * window:>6} tokens, first window {goodputs[0]:.1f}, "
                f"final {final:.1f} tokens/s"
            )
            found[name] = {
                "tokens_until_95_percent": at * window,
                "final_tokens_per_second": round(final, 2),
                "goodputs": [round(float(each), 2) for each in goodputs],
            }
        print(line, flush=True)
        results.append(found)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
