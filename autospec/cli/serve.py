"""``autospec serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from autospec.cli.app import app
from autospec.cli.options import (
    Device,
    DraftFolder,
    Dtype,
    HeadPaths,
    JournalPath,
    PolicyName,
    ProfilePath,
    Seed,
    TargetFolder,
    extra,
)


@app.command()
def serve(
    target: TargetFolder,
    draft: DraftFolder = None,
    head: HeadPaths = None,
    policy: PolicyName = "default",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Name of the model; else that of the folder.")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Most requests that run at once.")] = 16,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Most requests that wait; more are refused with 429.")
    ] = 256,
    context: Annotated[
        int, typer.Option(min=2, help="Most tokens of a request, prompt included.")
    ] = 2048,
    profile: ProfilePath = None,
    journal: JournalPath = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    seed: Seed = 0,
) -> None:
    """Serve a model over an OpenAI-compatible API, adapting."""
    with extra("serve"):
        from autospec.serve.server import ServeOptions, run_serve
    from rich.console import Console

    options = ServeOptions(
        target=target,
        draft=draft,
        heads=tuple(head or ()),
        policy=policy,
        host=host,
        port=port,
        name=name,
        slots=slots,
        max_waiting=max_waiting,
        context=context,
        profile=profile,
        journal=journal,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    raise typer.Exit(run_serve(options, Console()))
