"""``autospec warm-up``."""

from __future__ import annotations

from typing import Annotated

import typer

from autospec.cli.app import app


@app.command("warm-up")
def warm_up(
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME_OR_FILE", help="Whose kernels.")
    ] = "default",
) -> None:
    """Compile the kernels of deciding, so that the first start need not."""
    from autospec.compiled import CACHE
    from autospec.config import load_settings
    from autospec.controller import Controller
    from autospec.records import EngineInfo, ProposerInfo

    settings = load_settings(policy).without_files()
    proposers = [
        ProposerInfo("lookup", "lookup", 1),
        ProposerInfo("model", "sequential", 1),
    ]
    Controller(
        settings.model_copy(update={"proposers": None}), proposers, EngineInfo("", "", "", "", "")
    )
    typer.echo("compiled" if CACHE is None else f"compiled; kept in {CACHE}")
