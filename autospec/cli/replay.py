"""``autospec replay``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from autospec.cli.app import app
from autospec.cli.options import JsonPath, ReportPath, Seed


@app.command()
def replay(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE.jsonl...", help="Recorded traces.")
    ],
    cost: Annotated[Path, typer.Option(metavar="FILE", help="Step times of an engine, YAML.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME_OR_FILE", help="Policy to run; may be repeated.", show_default="default"
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Running requests of closed loops, no more than are replayed.",
            show_default="1,8,32,128 without --rate",
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Only so many requests, of the shuffled traces.")
    ] = None,
    arrivals: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Arrivals for an open loop; needs --rate."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Requests per second that arrive, a comma separated list; needs --arrivals."
        ),
    ] = None,
    max_running: Annotated[
        int, typer.Option(min=1, help="Most requests at once, open loop.")
    ] = 256,
    prefill_tokens: Annotated[
        int, typer.Option(min=1, help="Most prompt tokens of a step, open loop.")
    ] = 512,
    tpot_target_ms: Annotated[
        float | None, typer.Option(min=0.001, help="Target per output token, open loop.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Every run starts from this profile of replays (--save-profile, tune --engine "
            "replay); a server's does not fit.",
        ),
    ] = None,
    save_profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add to it what the runs learned.")
    ] = None,
    hindsight: Annotated[
        bool, typer.Option(help="Also find the best fixed choice and the clairvoyant one.")
    ] = True,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes.", show_default="one per core")
    ] = None,
    json_path: JsonPath = None,
    report: ReportPath = None,
    seed: Seed = 0,
) -> None:
    """Replay recorded traces under any policy, without a GPU.

    What a cost file says is in the commented example in autospec/replay/cost_file.py. An open loop
    needs both --arrivals and --rate; the CSV begins with TIMESTAMP,ContextTokens,GeneratedTokens.
    """
    from rich.console import Console

    from autospec.replay.report import parse_concurrency, parse_rates, run_replay
    from autospec.replay.tasks import ReplayOptions

    options = ReplayOptions(
        traces=tuple(traces),
        cost=cost,
        policies=tuple(dict.fromkeys(policy or ["default"])),
        concurrency=None if concurrency is None else parse_concurrency(concurrency),
        requests=requests,
        arrivals=arrivals,
        rates=() if rate is None else parse_rates(rate),
        max_running=max_running,
        prefill_tokens=prefill_tokens,
        tpot_target_ms=tpot_target_ms,
        profile=profile,
        save_profile=save_profile,
        hindsight=hindsight,
        jobs=jobs or os.cpu_count() or 1,
        seed=seed,
        json_path=json_path,
        report_path=report,
    )
    raise typer.Exit(run_replay(options, Console()))
