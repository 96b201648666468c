"""``autospec report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autospec.cli.app import app


@app.command()
def report(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_OR_JOURNAL_OR_PROFILE...",
            help="JSON of demo, bench, replay, tune or check; journals; profiles. In any mix.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE.html", help="Where to write it.")
    ] = Path("report.html"),
) -> None:
    """Draw runs, journals and profiles as one HTML page."""
    from autospec.progress import heartbeat
    from autospec.report import check_report, write_report

    check_report(out, "--out")
    with heartbeat("reading and drawing", lambda line: typer.echo(line, err=True)):
        write_report(inputs, out)
    typer.echo(f"report saved in {out} ({out.stat().st_size / 1e6:.1f} MB)")
