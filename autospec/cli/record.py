"""``autospec record``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autospec.cli.app import app
from autospec.cli.options import Device, Dtype, TargetFolder, extra


@app.command()
def record(
    target: TargetFolder,
    prompts: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help='Lines of {"id", "workload", "prompt"}.')
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="TRACE.jsonl", help="The trace.")],
    draft: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draft model to be recorded.")
    ] = None,
    head: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Or a head to be recorded.")
    ] = None,
    draft_k: Annotated[int, typer.Option(min=1, max=32, help="Tokens of every draft.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    concurrency: Annotated[int, typer.Option(min=1, help="Running requests.")] = 4,
    stop_at_eos: Annotated[bool, typer.Option(help="Let answers end by themselves.")] = True,
    dtype: Dtype = "auto",
    device: Device = "cpu",
) -> None:
    """Record a trace of your model and prompts, to be replayed."""
    with extra("engine"):
        from autospec.replay.recording import RecordOptions, run_record
    from rich.console import Console

    options = RecordOptions(
        target=target,
        prompts=prompts,
        out=out,
        draft=draft,
        head=head,
        draft_k=draft_k,
        max_tokens=max_tokens,
        concurrency=concurrency,
        stop_at_eos=stop_at_eos,
        dtype=dtype,
        device=device,
    )
    raise typer.Exit(run_record(options, Console()))
