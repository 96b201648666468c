"""``autospec bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autospec.cli.app import app
from autospec.cli.options import (
    Device,
    DraftFolder,
    Dtype,
    HeadPaths,
    JournalPath,
    JsonPath,
    MetricsPort,
    PolicyName,
    ProfilePath,
    ReportPath,
    Seed,
    TargetFolder,
    extra,
)


@app.command()
def bench(
    target: TargetFolder,
    prompts: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", help='Lines of {"id", "workload", "prompt"}.')
    ],
    draft: DraftFolder = None,
    head: HeadPaths = None,
    policy: PolicyName = "default",
    loads: Annotated[str, typer.Option(help="Numbers of running requests.")] = "1,4,16",
    arms: Annotated[
        str,
        typer.Option(
            help="plain, adaptive, or PROPOSER:K each; with suffix_after:K adaptive has it too."
        ),
    ] = "plain,ngram:4,suffix:8,adaptive",
    json_path: JsonPath = None,
    report: ReportPath = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests per block; else as many as the load.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Blocks per load and workload.")] = 3,
    workload: Annotated[
        list[str] | None, typer.Option(help="Only this workload; may be repeated.")
    ] = None,
    mix: Annotated[bool, typer.Option("--mix", help="Serve all workloads at once.")] = False,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let answers end by themselves.")
    ] = False,
    profile: ProfilePath = None,
    journal: JournalPath = None,
    metrics_port: MetricsPort = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    seed: Seed = 0,
) -> None:
    """Compare plain, fixed and adaptive on your model and prompts."""
    with extra("engine"):
        from autospec.bench.command import BenchOptions, parse_loads, run_bench
    from rich.console import Console

    options = BenchOptions(
        target=target,
        prompts=prompts,
        draft=draft,
        heads=tuple(head or ()),
        policy=policy,
        loads=parse_loads(loads),
        arms=arms,
        json_path=json_path,
        report_path=report,
        max_tokens=max_tokens,
        requests=requests,
        rounds=rounds,
        workloads=tuple(workload or ()),
        mix=mix,
        stop_at_eos=stop_at_eos,
        profile=profile,
        journal=journal,
        metrics_port=metrics_port,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    raise typer.Exit(run_bench(options, Console()))
