"""Options that several commands share, and what a missing extra says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from autospec.errors import MissingDependency

TargetFolder = Annotated[Path, typer.Option("--target", metavar="FOLDER", help="Model folder.")]
DraftFolder = Annotated[
    Path | None,
    typer.Option("--draft", metavar="FOLDER", help="Draft model with the same vocabulary."),
]
PolicyName = Annotated[
    str, typer.Option("--policy", metavar="NAME_OR_FILE", help="Policy name or YAML file.")
]
JsonPath = Annotated[
    Path | None, typer.Option("--json", metavar="OUT", help="Write the figures here as JSON.")
]
ReportPath = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE.html", help="Draw the figures on a page of their own."),
]
ProfilePath = Annotated[
    Path | None, typer.Option("--profile", metavar="FILE", help="Start from and add to it.")
]
HeadPaths = Annotated[
    list[Path] | None,
    typer.Option("--head", metavar="FOLDER", help="Head trained for the target; may be repeated."),
]
JournalPath = Annotated[
    Path | None, typer.Option("--journal", metavar="FILE", help="Write every step's decision.")
]
MetricsPort = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Serve /metrics on this port meanwhile.")
]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling and of the policy.")]


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Turn a missing optional dependency into what to install; importing one takes seconds."""
    typer.echo("loading torch and transformers …", err=True)
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("autospec"):
            raise
        raise MissingDependency(
            f"{error.name} is not installed: pip install 'autospec-llm[{name}]'"
        ) from None
