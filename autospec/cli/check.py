"""``autospec check``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from autospec.cli.app import app
from autospec.cli.options import JsonPath, ReportPath, Seed
from autospec.errors import MissingDependency


class EndpointName(str, Enum):
    """Which of OpenAI's endpoints is asked."""

    chat = "chat"
    completions = "completions"


@app.command()
def check(
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="A live server, like http://host:8000/v1.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl", help='For --url: lines of {"id", "workload", "prompt"}.'
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl", help='Lines of {"prompt", "output", "start", "end"} instead.'
        ),
    ] = None,
    target: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The served model: sizes and tokenizer.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A draft model to compare with it.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For texts; else the target's.")
    ] = None,
    rates: Annotated[str, typer.Option(help="Requests per second, step by step.")] = "0.5,1,2,4",
    duration: Annotated[float, typer.Option(help="Seconds of each step.")] = 60.0,
    max_requests: Annotated[int, typer.Option(min=1, help="Most requests of a step.")] = 200,
    max_in_flight: Annotated[
        int, typer.Option(min=1, help="Most unanswered requests; a step ends there.")
    ] = 256,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of an answer, where the prompt has no limit.")
    ] = 256,
    temperature: Annotated[
        str | None, typer.Option(help="One or more, like 0,0.7; else the prompt's own, or 0.")
    ] = None,
    top_p: Annotated[str | None, typer.Option(help="One or more, like 1,0.9.")] = None,
    ladder: Annotated[
        str, typer.Option(help="Full batches that measure step times; none leaves all of that out.")
    ] = "1,2,4,8,16,32,64",
    endpoint: Annotated[
        EndpointName, typer.Option(help="chat or completions.")
    ] = EndpointName.chat,
    model: Annotated[str | None, typer.Option(help="Where the server has several.")] = None,
    metrics_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Prometheus metrics; else looked for.")
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable with the server's key.")
    ] = "OPENAI_API_KEY",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for an answer.")] = 120.0,
    cost: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Step times, as for replay.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Step times that AutoSpec has learned.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, or one with a data sheet here, like h100-sxm.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests, for the memory.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each, for the memory.")] = 4096,
    json_path: JsonPath = None,
    report: ReportPath = None,
    seed: Seed = 0,
) -> None:
    """Say whether a service is a candidate for speculation."""
    try:
        from autospec.check.run import CheckOptions, run_check
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("autospec"):
            raise
        raise MissingDependency(
            f"{error.name} is not installed: pip install 'autospec-llm[check]'"
        ) from None
    from rich.console import Console

    options = CheckOptions(
        url=url,
        prompts=prompts,
        log=log,
        target=target,
        draft=draft,
        tokenizer=tokenizer,
        rates=rates,
        duration=duration,
        most_requests=max_requests,
        most_in_flight=max_in_flight,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        ladder=ladder,
        endpoint=endpoint.value,
        model=model,
        metrics_url=metrics_url,
        api_key_env=api_key_env,
        timeout=timeout,
        cost=cost,
        profile=profile,
        device=device,
        batch=batch,
        context=context,
        json_path=json_path,
        report_path=report,
        seed=seed,
    )
    raise typer.Exit(run_check(options, Console()))
