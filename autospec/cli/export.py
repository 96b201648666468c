"""``autospec export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autospec.cli.app import app


@app.command()
def export(
    profile: Annotated[Path, typer.Option(metavar="FILE", help="A profile of autospec tune.")],
    to: Annotated[str, typer.Option(help="vllm, sglang, tensorrt-llm or llama.cpp.")],
    engine_version: Annotated[
        str | None, typer.Option(metavar="V", help="Of the engine; else the newest known.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(metavar="W", help="For this workload; else for the mix.")
    ] = None,
    proposer: Annotated[
        str | None, typer.Option(help="Who drafts; else the one of most gain.")
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(metavar="PATH_OR_NAME", help="The model that drafts, if any.")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="The most running requests to plan for.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the engine's file here."),
    ] = None,
) -> None:
    """Print what tune found as an engine's own configuration."""
    from autospec.export import ExportOptions, run_export
    from autospec.export.plan import Wish

    wish = Wish(engine_version, proposer, draft_model, max_batch)
    exported = run_export(ExportOptions(profile, to, wish, workload, out))
    typer.echo(exported.text, nl=False)
    for note in exported.notes:
        typer.echo(f"# {note}", err=True)
