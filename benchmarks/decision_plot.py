"""The figure of decisions.py: speedup against concurrency, and choices through a shift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import decision_runs

CONCURRENCY = (1, 8, 32, 128)
_WINDOW = 25
_RIVAL_COLORS = "tab20"


def draw(
    path: Path,
    speeds: Mapping[str, Sequence[float]],
    timeline: dict[str, Any],
    places: Sequence[str],
    halves: Mapping[str, Sequence[float]],
) -> None:
    """``speeds`` are speedups over plain at CONCURRENCY by name, on the mix; the first is ours.

    ``timeline`` is what ``decision_runs.timeline`` returns; ``halves`` is the ratio to the best
    fixed choice at ``places`` by half of the requests. Needs matplotlib.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise SystemExit("--plot needs matplotlib: pip install 'autospec-llm[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(13, 9), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(5, 7), height_ratios=(5, 3))
    left, right = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    below = figure.add_subplot(grid[1, :])
    colors = pyplot.get_cmap(_RIVAL_COLORS)
    for index, (name, values) in enumerate(speeds.items()):
        ours, bound = index == 0, name in ("clairvoyant", "best fixed")
        left.plot(
            range(len(CONCURRENCY)),
            values,
            label=name,
            color="crimson" if ours else "black" if bound else colors(index % 20),
            linewidth=2.5 if ours else 1.2,
            linestyle={"clairvoyant": ":", "best fixed": "--"}.get(name, "-"),
            marker="o" if ours else ".",
            zorder=3 if ours else 2,
        )
    left.axhline(1.0, color="grey", linewidth=0.8)
    left.set_xticks(range(len(CONCURRENCY)), [str(each) for each in CONCURRENCY])
    left.set_xlabel("running requests")
    left.set_ylabel("speedup against plain decoding")
    left.set_title("All workloads mixed")
    left.legend(fontsize=7, ncols=2)

    steps = range(0, len(timeline["k"]), _WINDOW)
    bottom = [0.0] * len(steps)
    for name, shares in timeline["shares"].items():
        smooth = [_mean(shares[at : at + _WINDOW]) for at in steps]
        top = [low + each for low, each in zip(bottom, smooth, strict=True)]
        right.fill_between(steps, bottom, top, label=name, alpha=0.55, linewidth=0)
        bottom = top
    right.set_ylim(0, 1)
    right.set_ylabel("share of requests that draft with")
    right.set_xlabel("step")
    depth = right.twinx()
    k = [_mean(timeline["k"][at : at + _WINDOW]) for at in steps]
    depth.plot(steps, k, color="black", linewidth=1.2, label="mean k")
    depth.set_ylim(bottom=0)
    depth.set_ylabel("mean k")
    for at, name in zip(timeline["begins"], timeline["blocks"], strict=True):
        right.axvline(at, color="black", linewidth=0.8, linestyle=":")
        right.text(at, 1.01, f" {name}", fontsize=9)
    right.legend(loc="lower left", fontsize=8)
    depth.legend(loc="lower right", fontsize=8)
    for (half, ratios), marker in zip(halves.items(), "o^v", strict=False):
        below.plot(range(len(places)), ratios, marker, label=f"{half} lines", alpha=0.8)
    below.axhline(1.0, color="grey", linewidth=0.8)
    below.set_xticks(range(len(places)), places, rotation=45, ha="right", fontsize=8)
    below.set_ylabel("against the best fixed choice")
    below.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def timeline_spec() -> tuple[str, tuple[Any, ...]]:
    """The run that the right half shows."""
    return decision_runs.timeline.__name__, (8,)
