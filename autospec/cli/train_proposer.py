"""``autospec train-proposer``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autospec.cli.app import app
from autospec.cli.options import Device, Dtype, Seed, TargetFolder, extra


@app.command("train-proposer")
def train_proposer(
    target: TargetFolder,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the head goes.")],
    kind: Annotated[str, typer.Option(help="mlp_speculator, medusa or eagle.")] = "mlp_speculator",
    data: Annotated[
        str, typer.Option(metavar="FILE.jsonl|self", help="Prompts, or AutoSpec's own questions.")
    ] = "self",
    held_out: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Prompts to measure on; else a share.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.05, help="Time for everything.")] = 8.0,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to record, whatever the time.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to learn, whatever the time.")
    ] = None,
    frequent_tokens: Annotated[int, typer.Option(min=2, help="Tokens it can draft.")] = 8192,
    inner_size: Annotated[
        int, typer.Option(min=1, help="Width of an mlp_speculator's MLP.")
    ] = 1024,
    batch: Annotated[int, typer.Option(min=1, help="Positions of a step.")] = 1024,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 1e-3,
    slots: Annotated[int, typer.Option(min=1, help="Requests recorded at a time.")] = 64,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    seed: Seed = 0,
) -> None:
    """Train a proposer for your model, from what the model itself says.

    Interrupted, the same command goes on where it was.
    """
    with extra("engine"):
        from autospec.training.command import TrainingOptions, run_training
    from rich.console import Console

    options = TrainingOptions(
        target=target,
        out=out,
        kind=kind,
        data=data,
        held_out=held_out,
        minutes=minutes,
        tokens=tokens,
        steps=steps,
        frequent_tokens=frequent_tokens,
        inner_size=inner_size,
        batch=batch,
        learning_rate=learning_rate,
        slots=slots,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    raise typer.Exit(run_training(options, Console()))
