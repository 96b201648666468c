"""How well AutoSpec decides: the default policy against everything else, on recorded traces.

Run ``python benchmarks/decisions.py TRACE_DIR [--arrivals FILE.csv] [--json OUT] [--plot OUT]``.
The folder holds ``cost.yaml`` and one JSONL trace per workload. Every cell is printed with its
bound; everything is measured on all requests and on both halves (even and odd lines). Runs are
kept in the JSON file and reused while AutoSpec's code is the same, so it can be interrupted;
remove the file after changing decision_runs.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import decision_plot
import decision_runs
from fingerprint import fingerprint

from autospec.config import Settings, load_settings

WORKLOADS = ("chat", "code-edit", "math", "summarize")
MIX = "mix"
CONCURRENCY = (1, 8, 32, 128)
HALVES = ("all", "even", "odd")
RIVALS = (
    "ema:eagle3",
    "ema:suffix",
    "gate:eagle3",
    "gate:suffix",
    "heuristic:eagle3",
    "heuristic:suffix",
    "ucb",
    "exp3",
    "thompson",
    "nightjar",
    "hedge",
    "bayes",
    "ema+:eagle3",
    "gate+:eagle3",
    "heuristic+:eagle3",
    "bayes+",
)
"""``+`` has options nearer to what is best on these traces (decision_runs)."""
CHOOSING = ("ucb", "exp3", "thompson", "nightjar", "hedge", "bayes+")
"""Rivals that choose among proposers, and so are also run with the appended one."""
COSTS = ("base", "token x4", "token x10", "padded")
RATES = (0.2, 0.5, 0.8, 1.0, 1.2, 1.5)
BEHAVIOR_CONCURRENCY = (1, 8, 32)
DEADLINES = ((0.5, 6.0), (0.8, 8.0), (0.8, 12.0), (1.0, 12.0))
"""(share of plain's capacity, milliseconds per output token)."""

APPENDING = {"base": "", "given": ", nothing appended"}
"""Costs of decision_runs with and without the appended proposer, and what cells call them."""

MIX_BOUNDS = {1: 1.36, 8: 1.22, 32: 1.18, 128: 1.07}
"""Of the best fixed arm of the proposers that the traces come with; the appended one is ours."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure and the bound it must reach (``least``) or keep (``most``)."""

    section: str
    name: str
    value: float
    least: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """None where there is no bound."""
        if self.least is not None:
            return self.value >= self.least
        return self.value <= self.most if self.most is not None else None


Spec = tuple[str, tuple[Any, ...]]
"""A function of decision_runs by name, and its arguments: one run, or one search over runs."""


class Runs:
    """Runs by what they are, kept in a JSON file, made in processes of their own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._path: Path | None = options.json
        self._kept: dict[str, Any] = {}
        self._options = options
        self._settings = load_settings(options.policy)
        if self._path is not None and self._path.exists():
            self._kept = json.loads(self._path.read_text(encoding="utf-8")).get("runs", {})

    def __getitem__(self, spec: Spec) -> dict[str, Any]:
        found: dict[str, Any] = self._kept[self._key(spec)]
        return found

    def __contains__(self, spec: Spec) -> bool:
        return self._key(spec) in self._kept

    def _key(self, spec: Spec) -> str:
        name, arguments = spec
        code = _code(self._settings, name, arguments)
        return f"{name}({', '.join(map(str, arguments))}) {code}"

    def as_json(self) -> dict[str, Any]:
        """Everything that was run."""
        return self._kept

    def make(self, specs: Sequence[Spec], save: Callable[[], None]) -> None:
        """Run what is not there yet."""
        missing = [spec for spec in dict.fromkeys(specs) if spec not in self]
        print(f"{len(specs) - len(missing)} runs at hand, {len(missing)} to make", file=sys.stderr)
        began = saved = time.monotonic()
        with ProcessPoolExecutor(
            self._options.jobs,
            multiprocessing.get_context("spawn"),
            decision_runs.open_traces,
            (self._options.traces, self._options.arrivals, self._options.policy),
        ) as pool:
            pending = {pool.submit(decision_runs.run, spec): spec for spec in missing}
            for done, future in enumerate(as_completed(pending), start=1):
                spec = pending[future]
                self._kept[self._key(spec)] = future.result()
                now = time.monotonic()
                left = (now - began) / done * (len(missing) - done)
                print(
                    f"\r{done}/{len(missing)} runs, about {left:.0f} s left: "
                    f"{spec[0]} {' '.join(map(str, spec[1]))}"[:118].ljust(119),
                    end="",
                    file=sys.stderr,
                    flush=True,
                )
                if now - saved > 10.0:
                    save()
                    saved = now
        print(file=sys.stderr)
        save()


_IN_HINDSIGHT = (
    "autospec.replay.hindsight",
    "autospec.replay.fixed_arms",
    "autospec.policy.lookup_first",
)
_ONLINE = (
    "autospec.controller",
    "autospec.config",
    "autospec.cost.step_cost",
    "autospec.policy",
    "autospec.policy.offer_gate",
    "autospec.policy.program",
)
"""What a run in hindsight imports, but does not ask."""


def _code(settings: Settings, name: str, arguments: tuple[Any, ...]) -> str:
    """A fingerprint of the code and the settings that a run depends on."""
    if name in decision_runs.IN_HINDSIGHT or "plain" in arguments:
        return fingerprint(_IN_HINDSIGHT, _ONLINE)
    policy, text = settings.policy.name, settings.model_dump_json()
    if name == "closed" and arguments[0] != decision_runs.DEFAULT:
        policy, text = str(arguments[0]).partition(":")[0].rstrip("+"), ""
    modules = (*_IN_HINDSIGHT, "autospec.replay.run", f"autospec.policy.{policy}")
    return fingerprint(modules, ("autospec.policy",), text)  # not every policy there is


@dataclass(frozen=True, slots=True)
class Section:
    """Some rows of the table: the runs they need, and the cells made of them."""

    name: str
    specs: Callable[[argparse.Namespace], list[Spec]]
    cells: Callable[[Runs, argparse.Namespace], Iterator[Cell]]


def _places(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """(workload, half, concurrency)."""
    for half in options.halves:
        for workload in (MIX, *WORKLOADS):
            for concurrency in CONCURRENCY:
                yield workload, half, concurrency


def _closed(policy: str, place: tuple[str, str, int], cost: str = "base") -> Spec:
    return "closed", (policy, *place, cost)


def _adaptive(place: tuple[str, str, int], cost: str = "base") -> Spec:
    return _closed(decision_runs.DEFAULT, place, cost)


def _label(place: tuple[str, str, int]) -> str:
    workload, half, concurrency = place
    return f"{workload} {concurrency}" + ("" if half == "all" else f" {half}")


def fixed_specs(options: argparse.Namespace) -> list[Spec]:
    specs = [_adaptive(place, cost) for cost in APPENDING for place in _places(options)]
    return specs + [("best_fixed", place) for place in _places(options)]


def fixed_cells(runs: Runs, options: argparse.Namespace) -> Iterator[Cell]:
    for cost, arms, title in (
        ("base", "given", ""),
        ("given", "given", ", nothing appended"),
        ("base", "base", f", {decision_runs.APPENDED} among the arms"),
    ):
        for place in _places(options):
            speed = runs[_adaptive(place, cost)]["speed"]
            arm, best = _best_fixed(runs, place, arms)
            bound = MIX_BOUNDS[place[2]] if place[0] == MIX and arms == "given" else 0.985
            note = f"{speed:.0f} tokens/s against {arm} {best:.0f}"
            yield Cell(f"best fixed{title}", _label(place), speed / best, bound, note=note)


def _best_fixed(runs: Runs, place: tuple[str, str, int], cost: str) -> tuple[str, float]:
    """The best arm and its speed, of those that the cost file has."""
    arms: dict[str, float] = runs["best_fixed", place]["arms"]
    if cost == "given":
        arms = {n: v for n, v in arms.items() if not n.startswith(decision_runs.APPENDED)}
    best = max(arms, key=arms.__getitem__)
    return best, arms[best]


def lookup_specs(options: argparse.Namespace) -> list[Spec]:
    specs = [_adaptive(place, cost) for cost in APPENDING for place in _places(options)]
    specs += [("lookup_first", place) for place in _places(options)]
    return specs + [
        ("lookup_first", (*place, decision_runs.APPENDED)) for place in _places(options)
    ]


def lookup_cells(runs: Runs, options: argparse.Namespace) -> Iterator[Cell]:
    for cost, title in APPENDING.items():
        for place in _places(options):
            best = runs["lookup_first", place]
            ratio = runs[_adaptive(place, cost)]["speed"] / best["speed"]
            bound = 1.02 if place[0] == MIX else 0.985
            name = f"lookup first in hindsight{title}"
            yield Cell(name, _label(place), ratio, bound, note=best["options"])
    for place in _places(options):
        best = runs["lookup_first", (*place, decision_runs.APPENDED)]
        ratio = runs[_adaptive(place)]["speed"] / best["speed"]
        name = f"lookup first, else {decision_runs.APPENDED}, in hindsight"
        yield Cell(name, _label(place), ratio, note=best["options"])


def plain_specs(options: argparse.Namespace) -> list[Spec]:
    return [
        _closed(policy, place, cost)
        for cost in COSTS
        for place in _places(options)
        for policy in (decision_runs.DEFAULT, "plain")
    ]


def plain_cells(runs: Runs, options: argparse.Namespace) -> Iterator[Cell]:
    for cost in COSTS:
        for place in _places(options):
            plain = runs[_closed("plain", place, cost)]["speed"]
            ratio = runs[_adaptive(place, cost)]["speed"] / plain
            yield Cell(f"plain, {cost}", _label(place), ratio, 0.98)


def rival_specs(options: argparse.Namespace) -> list[Spec]:
    places = [(MIX, half, b) for half in options.halves for b in CONCURRENCY]
    specs = [_closed(rival, place, "given") for place in places for rival in RIVALS]
    specs += [_closed(rival, place) for place in places for rival in CHOOSING]
    return specs + [_adaptive(place) for place in places]


def rival_cells(runs: Runs, options: argparse.Namespace) -> Iterator[Cell]:
    for half in options.halves:
        for concurrency in CONCURRENCY:
            place = (MIX, half, concurrency)
            speed = runs[_adaptive(place)]["speed"]
            for rival in RIVALS:
                other = runs[_closed(rival, place, "given")]["speed"]
                yield Cell("rivals", f"{_label(place)} {rival}", speed / other, 1.02)
            for rival in CHOOSING:
                other = runs[_closed(rival, place)]["speed"]
                name = f"{_label(place)} {rival} with {decision_runs.APPENDED}"
                yield Cell("rivals", name, speed / other, 1.02)


def clairvoyant_specs(options: argparse.Namespace) -> list[Spec]:
    specs = [("clairvoyant", place) for place in _places(options)]
    return [*specs, *fixed_specs(options), *(_closed("plain", p) for p in _places(options))]


def clairvoyant_cells(runs: Runs, options: argparse.Namespace) -> Iterator[Cell]:
    for place in _places(options):
        plain = runs[_closed("plain", place)]["speed"]
        speed = runs[_adaptive(place)]["speed"] / plain
        fixed = runs["best_fixed", place]["speed"] / plain
        most = runs["clairvoyant", place]["speed"] / plain
        share = (speed - fixed) / (most - fixed)
        note = f"speedup {speed:.3f}; best fixed {fixed:.3f}, clairvoyant {most:.3f}"
        yield Cell("share of the way to clairvoyant", _label(place), share, note=note)


def shift_specs(options: argparse.Namespace) -> list[Spec]:
    return [("shift", (half, b)) for half in options.halves for b in BEHAVIOR_CONCURRENCY]


def shift_cells(runs: Runs, options: argparse.Namespace) -> Iterator[Cell]:
    for half in options.halves:
        for b in BEHAVIOR_CONCURRENCY:
            for block, ratio in runs["shift", (half, b)]["blocks"].items():
                yield Cell("shift", f"{_label((block, half, b))}", ratio, 0.97)


def swing_specs(options: argparse.Namespace) -> list[Spec]:
    return [("swing", (half,)) for half in options.halves]


def swing_cells(runs: Runs, options: argparse.Namespace) -> Iterator[Cell]:
    for half in options.halves:
        run = runs["swing", (half,)]
        note = (
            f"{run['swings']} swings; at 1: {run['ratio_1']:.3f}, at 128: {run['ratio_128']:.3f}; "
            f"{run['switches_1']:.1f} and {run['switches_128']:.1f} model switches per 100 steps"
        )
        yield Cell("load swing 1 <-> 128", half, run["ratio"], 0.97, note=note)


def bad_specs(options: argparse.Namespace) -> list[Spec]:
    return [
        (name, (half, b))
        for half in options.halves
        for b in BEHAVIOR_CONCURRENCY
        for name in ("never_accepted", "ten_times")
    ]


def bad_cells(runs: Runs, options: argparse.Namespace) -> Iterator[Cell]:
    for name, half, b in ((n, *arguments) for n, arguments in bad_specs(options)):
        run = runs[name, (half, b)]
        label = "never accepted" if name == "never_accepted" else "cost x10 midway"
        yield Cell(f"bad proposer, {label}", _label((MIX, half, b)), run["ratio"], 0.98)


def back_specs(options: argparse.Namespace) -> list[Spec]:
    return [
        ("off_and_back", (half, b, drafting))
        for half in options.halves
        for b in (1, 4)
        for drafting in ("all", "models")
    ]


def back_cells(runs: Runs, options: argparse.Namespace) -> Iterator[Cell]:
    for _, (half, b, drafting) in back_specs(options):
        run = runs["off_and_back", (half, b, drafting)]
        note = (
            f"in the last 100 of {run['overload']} steps of overload {run['before']:.1%} of the "
            "requests speculated"
        )
        name = f"{_label((MIX, half, b))}, {drafting} drafting"
        yield Cell("steps until back", name, run["steps"], most=50, note=note)


def warm_specs(options: argparse.Namespace) -> list[Spec]:
    return [
        (name, (half, w, b))
        for half in ("even", "odd")
        if half in options.halves
        for w in (MIX, *WORKLOADS)
        for name, loads in (("warm", (1, 8)), ("warm_speed", (32, 128)))
        for b in loads
    ]


def warm_cells(runs: Runs, options: argparse.Namespace) -> Iterator[Cell]:
    for name, (half, workload, b) in warm_specs(options):
        if name == "warm_speed":
            ratio = runs[name, (half, workload, b)]["ratio"]
            yield Cell("warm against cold", _label((workload, half, b)), ratio, 0.985)
            continue
        run = runs["warm", (half, workload, b)]
        note = (
            f"tokens to 95 %: cold {run['cold']}, warm {run['warm']}; first {run['window']} tokens "
            f"at {run['cold_start']:.3f} cold and {run['warm_start']:.3f} warm of a settled run"
        )
        share = run["warm"] / run["cold"] if run["cold"] else float(run["warm"] > 0)
        yield Cell("warm start", _label((workload, half, b)), share, most=1 / 3, note=note)


def open_specs(options: argparse.Namespace) -> list[Spec]:
    if options.arrivals is None:
        return []
    return [
        (name, (half, rate))
        for half in options.halves
        for rate in RATES
        for name in ("open_adaptive", "open_fixed")
    ]


def open_cells(runs: Runs, options: argparse.Namespace) -> Iterator[Cell]:
    for half in options.halves if options.arrivals is not None else ():
        for rate in RATES:
            mine, best = runs["open_adaptive", (half, rate)], runs["open_fixed", (half, rate)]
            note = (
                f"p99 {mine['p99']:.2f} s against {best['arm']} {best['p99']:.2f} s; "
                f"{mine['speed']:.0f} and {best['speed']:.0f} tokens/s"
            )
            name = f"{rate:g} of plain's capacity" + ("" if half == "all" else f" {half}")
            yield Cell("open loop, p99", name, mine["p99"] / best["p99"], most=1.03, note=note)


def deadline_specs(options: argparse.Namespace) -> list[Spec]:
    if options.arrivals is None:
        return []
    return [
        (name, (half, rate, target))
        for half in options.halves
        for rate, target in DEADLINES
        for name in ("slo_adaptive", "slo_fixed")
    ]


def deadline_cells(runs: Runs, options: argparse.Namespace) -> Iterator[Cell]:
    for half in options.halves if options.arrivals is not None else ():
        for rate, target in DEADLINES:
            mine = runs["slo_adaptive", (half, rate, target)]
            best = runs["slo_fixed", (half, rate, target)]
            name = f"{target:g} ms at {rate:g}" + ("" if half == "all" else f" {half}")
            note = f"{mine['share']:.3f} against {best['arm']} {best['share']:.3f}"
            difference = mine["share"] - best["share"]
            yield Cell("deadlines, share met: difference", name, difference, 0.0, note=note)
            ratio = mine["speed"] / best["speed"]
            yield Cell("deadlines, throughput", name, ratio, 1.0)


SECTIONS = (
    Section("fixed", fixed_specs, fixed_cells),
    Section("lookup", lookup_specs, lookup_cells),
    Section("plain", plain_specs, plain_cells),
    Section("clairvoyant", clairvoyant_specs, clairvoyant_cells),
    Section("rivals", rival_specs, rival_cells),
    Section("shift", shift_specs, shift_cells),
    Section("bad", bad_specs, bad_cells),
    Section("swing", swing_specs, swing_cells),
    Section("back", back_specs, back_cells),
    Section("warm", warm_specs, warm_cells),
    Section("open", open_specs, open_cells),
    Section("deadlines", deadline_specs, deadline_cells),
)


def table(cells: Sequence[Cell]) -> str:
    """Markdown, the cells below their bound first."""
    lines = []
    bounded = [cell for cell in cells if cell.passed is not None]
    failed = [cell for cell in bounded if not cell.passed]
    lines.append(f"{len(bounded) - len(failed)} of {len(bounded)} cells reach their bound.\n")
    for title, chosen in (("Below their bound", failed), ("All cells", cells)):
        if not chosen:
            continue
        lines += [f"## {title}\n", "| | cell | figure | bound | | |", "|---|---|---|---|---|---|"]
        for cell in chosen:
            bound = "" if cell.least is None else f">= {cell.least:g}"
            if cell.most is not None:
                bound = f"<= {cell.most:.3g}"
            verdict = {None: "", True: "pass", False: "FAIL"}[cell.passed]
            lines.append(
                f"| {cell.section} | {cell.name} | {cell.value:.3f} | {bound} | {verdict} "
                f"| {cell.note} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("traces", type=Path, metavar="TRACE_DIR")
    parser.add_argument("--arrivals", type=Path, help="CSV for the open loop; else left out")
    parser.add_argument("--policy", default="default", help="policy in the default's place")
    parser.add_argument("--json", type=Path, help="runs and cells; runs in it are reused")
    parser.add_argument("--markdown", type=Path, help="the table, as printed")
    parser.add_argument("--plot", type=Path, help=".svg or .png; needs matplotlib")
    parser.add_argument("--sections", default=",".join(section.name for section in SECTIONS))
    parser.add_argument("--quick", action="store_true", help="all requests only, not the halves")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    options.halves = HALVES[:1] if options.quick else HALVES
    names = options.sections.split(",")
    unknown = set(names) - {section.name for section in SECTIONS}
    if unknown:
        parser.error(f"--sections: unknown {', '.join(sorted(unknown))}")
    sections = [section for section in SECTIONS if section.name in names]
    runs = Runs(options)
    cells: list[Cell] = []

    def save() -> None:
        if options.json is not None:
            value = {
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "command": " ".join(["python", *sys.argv]),
                "cells": [_cell_json(cell) for cell in cells],
                "runs": runs.as_json(),
            }
            temporary = options.json.with_suffix(".tmp")
            temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
            temporary.replace(options.json)

    for section in sections:
        print(f"== {section.name}", file=sys.stderr)
        runs.make(section.specs(options), save)
        cells += section.cells(runs, options)
        if options.markdown is not None:
            options.markdown.write_text(table(cells), encoding="utf-8")
    save()
    print(table(cells))
    if options.plot is not None:
        draw(runs, options, save)


def draw(runs: Runs, options: argparse.Namespace, save: Callable[[], None]) -> None:
    """Make the runs that the figure shows and draw it."""
    places = [(MIX, "all", b) for b in CONCURRENCY]
    names = {"AutoSpec": decision_runs.DEFAULT, **{rival: rival for rival in RIVALS}}
    specs = {
        name: [
            _closed(policy, place, "base" if policy == decision_runs.DEFAULT else "given")
            for place in places
        ]
        for name, policy in names.items()
    }
    specs["lookup first"] = [("lookup_first", place) for place in places]
    specs["best fixed"] = [("best_fixed", place) for place in places]
    specs["clairvoyant"] = [("clairvoyant", place) for place in places]
    plain = [_closed("plain", place) for place in places]
    timeline = decision_plot.timeline_spec()
    needed = [*plain, timeline, *(spec for group in specs.values() for spec in group)]
    runs.make([*needed, *fixed_specs(options)], save)
    speeds = {
        name: [
            runs[spec]["speed"] / runs[reference]["speed"]
            for spec, reference in zip(group, plain, strict=True)
        ]
        for name, group in specs.items()
    }
    halves = {
        half: [
            runs[_adaptive(place)]["speed"] / runs["best_fixed", place]["speed"]
            for place in _places(options)
            if place[1] == half
        ]
        for half in options.halves
    }
    labels = [_label(place) for place in _places(options) if place[1] == "all"]
    decision_plot.draw(options.plot, speeds, runs[timeline], labels, halves)


def _cell_json(cell: Cell) -> Mapping[str, Any]:
    return {
        "section": cell.section,
        "cell": cell.name,
        "value": cell.value,
        "least": cell.least,
        "most": cell.most,
        "passed": cell.passed,
        "note": cell.note,
    }


if __name__ == "__main__":
    main()
