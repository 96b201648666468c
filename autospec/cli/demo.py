"""``autospec demo`` and the model that it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autospec.cli.app import app
from autospec.cli.options import (
    HeadPaths,
    JournalPath,
    JsonPath,
    MetricsPort,
    PolicyName,
    ProfilePath,
    ReportPath,
    Seed,
    extra,
)


@app.command()
def demo(
    target: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A model of yours; else SmolLM2-135M.")
    ] = None,
    head: HeadPaths = None,
    policy: PolicyName = "default",
    json_path: JsonPath = None,
    report: ReportPath = None,
    profile: ProfilePath = None,
    journal: JournalPath = None,
    metrics_port: MetricsPort = None,
    cold: Annotated[bool, typer.Option("--cold", help="Ignore what earlier runs learned.")] = False,
    seed: Seed = 0,
) -> None:
    """Adapt a small real model under changing load, live."""
    with extra("demo"):
        from autospec.bench.demo import DemoOptions, run_demo
    from rich.console import Console

    options = DemoOptions(
        target=target,
        heads=tuple(head or ()),
        policy=policy,
        json_path=json_path,
        report_path=report,
        profile=profile,
        journal=journal,
        metrics_port=metrics_port,
        cold=cold,
        seed=seed,
    )
    raise typer.Exit(run_demo(options, Console()))


@app.command("demo-model")
def demo_model() -> None:
    """Fetch and convert the demo's model into the cache, once."""
    with extra("demo"):
        from autospec.engine.demo_model import ensure_demo_model

    folder = ensure_demo_model(lambda line: typer.echo(line, err=True))
    typer.echo(str(folder))
