"""``autospec tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autospec.cli.app import app
from autospec.cli.options import DraftFolder, Dtype, HeadPaths, JsonPath, ReportPath, Seed, extra


@app.command()
def tune(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The profile.")],
    engine: Annotated[
        str, typer.Option(help="embedded, vllm (its lookups), or replay for recorded requests.")
    ] = "embedded",
    target: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Model folder; for vllm, spelled as it is served."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help='Lines of {"id", "workload", "prompt"}.'),
    ] = None,
    draft: DraftFolder = None,
    head: HeadPaths = None,
    traces: Annotated[
        list[Path] | None,
        typer.Option(metavar="TRACE.jsonl", help="Recorded requests; may be repeated."),
    ] = None,
    cost: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Step times of an engine, YAML.")
    ] = None,
    loads: Annotated[str, typer.Option(help="Numbers of running requests.")] = "1,4,16",
    budget: Annotated[str, typer.Option(help="Time that all of it may take: 90s, 15m.")] = "15m",
    trials: Annotated[int, typer.Option(min=4, help="Most trials of the search.")] = 60,
    warm_start: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Try an older profile's settings early.")
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME_OR_FILE", help="Policy that the settings are for.")
    ] = "default",
    max_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of an answer.")] = 96,
    json_path: JsonPath = None,
    report: ReportPath = None,
    dtype: Dtype = "auto",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, ...; vllm takes its own.")
    ] = "cpu",
    seed: Seed = 0,
) -> None:
    """Tune a profile offline: step costs, acceptance, settings of proposers."""
    from rich.console import Console

    if engine == "embedded":
        with extra("engine"):
            import autospec.bench.command  # noqa: F401
    from autospec.tune.budget import parse_budget, parse_loads
    from autospec.tune.run import run_tune
    from autospec.tune.tuner import TuneOptions

    options = TuneOptions(
        out=out,
        engine=engine,
        target=target,
        prompts=prompts,
        draft=draft,
        heads=tuple(head or ()),
        traces=tuple(traces or ()),
        cost=cost,
        loads=parse_loads(loads),
        budget=parse_budget(budget),
        trials=trials,
        warm_start=warm_start,
        policy=policy,
        max_tokens=max_tokens,
        json_path=json_path,
        report_path=report,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    raise typer.Exit(run_tune(options, Console()))
