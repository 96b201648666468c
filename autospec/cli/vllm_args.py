"""``autospec vllm-args``: the arguments that put AutoSpec into a vLLM command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from autospec.cli.app import app
from autospec.errors import InputError


@app.command("vllm-args")
def vllm_args(
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME_OR_FILE", help="Policy name or YAML file.")
    ] = "default",
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Profile to load at start and save to.")
    ] = None,
    journal: Annotated[
        Path | None, typer.Option("--journal", help="Write a line for every step to this file.")
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            "--speculative-config",
            metavar="JSON",
            help="vLLM's own; without it AutoSpec drafts with n-gram and suffix lookups.",
        ),
    ] = None,
    lookups: Annotated[
        str | None,
        typer.Option("--lookups", metavar="NAMES", help="AutoSpec's lookups: ngram,suffix."),
    ] = None,
    combine: Annotated[
        bool,
        typer.Option(
            "--combine",
            help="Let lookups compete with the configured drafter: synchronous scheduling, "
            "model runner V1.",
        ),
    ] = False,
    ks: Annotated[
        str | None,
        typer.Option("--ks", metavar="NUMBERS", help="k values to capture CUDA graphs for: 0,1,3."),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option("--max-num-seqs", min=1, help="As given to vLLM.")
    ] = None,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="As given to vLLM: no CUDA graphs.")
    ] = False,
) -> None:
    """Print the arguments to append to ``vllm serve MODEL``, quoted for a shell.

    In a script: ``eval "vllm serve MODEL $(autospec vllm-args)"``.
    """
    from autospec.adapters.vllm.arguments import RUNNER_VARIABLE, command_line, engine_changes

    given: dict[str, Any] = {"max_num_seqs": max_num_seqs, "enforce_eager": enforce_eager}
    if speculative_config is not None:
        given["speculative_config"] = _mapping(speculative_config)
    changed = engine_changes(
        given,
        policy=policy,
        profile=profile,
        journal=journal,
        lookups=None if lookups is None else [each for each in lookups.split(",") if each],
        combine=combine,
        ks=None if ks is None else _numbers(ks),
    )
    typer.echo(command_line(changed))
    if combine:
        typer.echo(f"and set {RUNNER_VARIABLE}=0 in the environment of vLLM", err=True)


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"--speculative-config: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"--speculative-config: must be a JSON object, found {text!r}")
    return value


def _numbers(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise InputError(f"--ks: must be whole numbers such as 0,1,3, found {text!r}") from None
