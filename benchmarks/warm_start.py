"""What a tuned profile saves: tokens until 95 % of the settled goodput, cold and warm.

    autospec tune --engine replay --traces T.jsonl --cost cost.yaml --loads 1,8,32 -o p.json
    python benchmarks/warm_start.py T.jsonl --cost cost.yaml --profile p.json

Runs the requests that the profile was not tuned on (the held-out half of the same split) under the
default policy, on the simulated clock of the cost file, in several orders: cold with the untuned
settings, from the profile with its settings, and settled: from all that was learned in a pass over
the same requests. Requests differ, and a lookup's cache fills, so a run is compared with the
settled one window by window, over the sum of the orders. It has arrived at the first window from
which on this and the next ones together hold 95 % of the settled goodput.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from autospec.config import load_settings
from autospec.controller import Controller
from autospec.profile.file import load_profile
from autospec.profile.learned import Profile
from autospec.profile.tuned import ProposerSettings
from autospec.records import EngineInfo, Float64Array
from autospec.replay.cost_file import CostFile, read_cost_file
from autospec.replay.run import ClosedLoop
from autospec.replay.trace import TraceRequest, read_traces
from autospec.tune.traced import Bed, TracedEngine, in_order, proposers_of
from autospec.tune.tuner import split

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
) -> tuple[Float64Array, Controller]:
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
    return np.diff(np.interp(edges, tokens, seconds)), controller


def arrival(seconds: Float64Array, settled: Float64Array) -> int:
    """The first window that has arrived."""
    for first in range(len(seconds)):
        some = slice(first, first + TOGETHER)
        if settled[some].sum() >= SHARE * seconds[some].sum():
            return first
    return len(seconds)


def summed(rows: Sequence[Float64Array], count: int) -> Float64Array:
    """Seconds of each window over all orders [count]."""
    total: Float64Array = np.sum([row[:count] for row in rows], axis=0)
    return total


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
        rows: dict[str, list[Float64Array]] = {"cold": [], "warm": [], "settled": []}
        for seed in range(given.seeds):
            order = in_order(held_out, load, seed)
            cold, controller = window_seconds(order, bed, untuned, None, load, given.window, seed)
            learned = controller.learned.take_fresh(controller.workloads.labels, "", 0.0)
            rows["cold"].append(cold)
            for name, start, settings in (
                ("warm", profile, profile.tuned.proposers),
                ("settled", learned, untuned),
            ):
                found, _ = window_seconds(order, bed, settings, start, load, given.window, seed)
                rows[name].append(found)
        count = min(len(row) for each in rows.values() for row in each)
        seconds = {name: summed(each, count) for name, each in rows.items()}
        result = {"load": load, "window_tokens": given.window}
        line = f"load {load:>3}:"
        for name in ("cold", "warm"):
            at = arrival(seconds[name], seconds["settled"]) * given.window
            first = float(seconds["settled"][0] / seconds[name][0])
            whole = float(seconds["settled"].sum() / seconds[name].sum())
            line += f"  {name} {at:>5} tokens, first window {first:.2f}, whole run {whole:.3f}"
            result[name] = {
                "tokens_until_95_percent": at,
                "first_window": round(first, 4),
                "whole_run": round(whole, 4),
            }
        print(f"{line}  (of the settled goodput)", flush=True)
        results.append(result)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
