"""The ``autospec`` command. Exit codes: 0 done, 1 ran and failed, 2 wrong usage or input."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from autospec.errors import (
    AutoSpecError,
    EngineError,
    MissingDependency,
    ModelError,
)

TRACEBACK_VARIABLE = "AUTOSPEC_TRACEBACK"

app = typer.Typer(
    name="autospec",
    help="Adaptive speculative decoding: who drafts, how many tokens, how many to verify.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; errors are one message on standard error, without a traceback."""
    try:
        app()
    except AutoSpecError as error:
        _leave(str(error), _exit_code(error))
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        _leave(
            f"{type(error).__name__}: {error} (a fault in AutoSpec; {TRACEBACK_VARIABLE}=1 "
            "shows where)",
            1,
        )


def _exit_code(error: AutoSpecError) -> int:
    ran = isinstance(error, EngineError | MissingDependency) and not isinstance(error, ModelError)
    return 1 if ran else 2


def _leave(message: str, code: int) -> None:
    sys.stderr.write(f"autospec: {message}\n")
    raise SystemExit(code)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from autospec import __version__

        typer.echo(f"autospec {__version__}")
        raise typer.Exit
