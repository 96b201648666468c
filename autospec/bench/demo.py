"""``autospec demo``: a small real model served under changing load and workloads, live."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from autospec.bench.arms import parse_arms
from autospec.bench.command import (
    checked_heads,
    kept_settings,
    load_model,
    run_comparison,
    tell_heads,
)
from autospec.bench.comparison import Comparison
from autospec.bench.live import say
from autospec.bench.phases import ADAPTIVE, Phase
from autospec.config import load_settings
from autospec.engine.demo_model import ensure_demo_model
from autospec.json_file import check_writable
from autospec.prompts import read_prompts
from autospec.report import check_report
from autospec.user_cache import cache_folder

PROMPTS = Path(__file__).parents[1] / "demo_prompts.jsonl"
HEAD = Path(__file__).parents[1] / "heads" / "smollm2-135m-instruct"
"""A head for the demo's own model, made by ``autospec train-proposer``; see its README."""

ARMS = ("plain", "ngram:4", "suffix:8")
HEAD_K = 3
BUDGET_SECONDS = 280.0
PHASES = (
    Phase(1, ("code-edit",), requests=1, max_tokens=112, rounds=3),
    Phase(4, ("rag", "code-edit"), requests=8, max_tokens=64, rounds=2),
    Phase(16, ("chat", "story"), requests=32, max_tokens=40, rounds=2),
    Phase(16, ("code-edit", "chat", "rag", "story"), requests=32, max_tokens=48, rounds=2),
    Phase(1, ("chat", "story"), requests=2, max_tokens=48, rounds=3),
)
"""Load 1 -> 4 -> 16 -> 1 with shifting workloads, about five minutes on two cores.

Under load more requests wait than run, so that a place is taken again as soon as it is free: with
just as many as places, a block would end with its slowest request alone, which is no load of 16.
"""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What ``autospec demo`` was asked for. ``target`` None is the demo's own model, which brings a
    head along; paths that are None lie in the cache; ``cold`` ignores what an earlier run learned.
    """

    target: Path | None = None
    heads: tuple[Path, ...] = ()
    policy: str = "default"
    json_path: Path | None = None
    report_path: Path | None = None
    profile: Path | None = None
    journal: Path | None = None
    metrics_port: int | None = None
    cold: bool = False
    seed: int = 0


def run_demo(options: DemoOptions, console: Console) -> int:
    """Fetch the model where needed, measure, show; returns the exit code."""
    heads = options.heads
    if options.target is None and not heads:
        heads = (HEAD,)
    kinds = checked_heads(heads)
    arms = (*ARMS, *(f"{kind}:{HEAD_K}" for kind in kinds), ADAPTIVE)
    specs = parse_arms(",".join(arms), has_draft=False, head_kinds=kinds)
    prompts = read_prompts(PROMPTS)
    own = load_settings(options.policy)
    check_writable(options.json_path)
    if options.report_path is not None:
        check_report(options.report_path)
    folder = options.target
    if folder is None:
        folder = ensure_demo_model(lambda line: say(console, line))
    kept = cache_folder() / "demo"
    name = ".".join((folder.name, *kinds))  # a profile belongs to its proposers
    settings = kept_settings(
        own,
        options.profile or kept / f"{name}.profile.json",
        options.journal or kept / f"{name}.journal.jsonl",
        options.metrics_port,
    )
    target = load_model(folder, "auto", "cpu", console)
    tell_heads(heads, console)
    comparison = Comparison(
        title=f"AutoSpec demo: {target.name}",
        target=target,
        draft=None,
        prompts=prompts,
        prompts_path=PROMPTS,
        phases=PHASES,
        specs=specs,
        settings=settings,
        policy=options.policy,
        heads=heads,
        start_cold=options.cold,
        budget_seconds=BUDGET_SECONDS,
        seed=options.seed,
    )
    code = run_comparison(comparison, console, options.json_path, options.report_path)
    if options.report_path is None:
        say(console, "to look rather than read: --report FILE.html draws a run as one page")
    return code
