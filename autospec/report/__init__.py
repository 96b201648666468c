"""``autospec report``: look rather than read.

``write_report`` is the one call that other commands need: it takes files and JSON documents of
commands that have just run, in any mix, tells them apart by content, and writes one HTML file.
``check_report`` refuses, before anything long is begun, what could not be written after it. A new
kind of input is a file in ``readers``, a line in ``inputs`` and a file in ``sections``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autospec.errors import InputError, MissingDependency


def check_report(out: Path, option: str = "--report") -> None:
    """Raise InputError where ``out`` cannot be written, MissingDependency without its libraries."""
    folder = out.parent
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{option}: {out} cannot be written; give a file in a folder that exists")
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"{error.name} is not installed: pip install 'autospec-llm[report]'"
        ) from None


def write_report(given: Sequence[Path | Mapping[str, Any]], out: Path) -> None:
    """Write a report on files and documents: ``--json`` of commands, journals, profiles.

    Raises InputError or ProfileError for what cannot be read, with the file and the place in it,
    InputError where ``out`` cannot be written, and MissingDependency.
    """
    check_report(out, "report")
    from autospec.report.assembly import report_page
    from autospec.report.inputs import read_inputs
    from autospec.report.page import page_html

    text = page_html(report_page(read_inputs(given)))
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror}") from None
