"""``autospec schema`` and ``autospec policy``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from autospec.cli.app import app

policy_app = typer.Typer(no_args_is_help=True, help="List and check policy files.")
app.add_typer(policy_app, name="policy")


@app.command()
def schema() -> None:
    """Print the JSON Schema of policy files, for editors."""
    from autospec.config import settings_schema

    typer.echo(json.dumps(settings_schema(), indent=2))


@policy_app.command("list")
def policy_list() -> None:
    """Name the policy files that come with AutoSpec."""
    from autospec.config import installed_policies, policies_folder

    for name in installed_policies():
        with (policies_folder() / f"{name}.yaml").open(encoding="utf-8") as file:
            purpose = file.readline().removeprefix("#").strip()
        typer.echo(f"{name:<12} {purpose}")


@policy_app.command("check")
def policy_check(
    policy: Annotated[str, typer.Argument(metavar="NAME_OR_FILE", help="Name or YAML file.")],
    show: Annotated[bool, typer.Option("--show", help="Print every setting as JSON.")] = False,
) -> None:
    """Check a policy file; list every mistake in it."""
    from autospec.config import load_settings
    from autospec.policy.goodput import GoodputOptions

    settings = load_settings(policy)
    if show:
        typer.echo(settings.model_dump_json(indent=2))
    else:
        typer.echo(f"{policy}: good")
        options = settings.policy
        is_slo = isinstance(options, GoodputOptions) and options.objective == "slo"
        if is_slo and settings.tpot_target_ms is None:
            typer.echo(
                "objective slo without tpot_target_ms: only requests that bring a target of their "
                "own are held to one"
            )
