"""``autospec export``: a profile as an engine's own configuration, with no plugin."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autospec.errors import ExportError
from autospec.export import llama_cpp, sglang, tensorrt_llm, vllm
from autospec.export.plan import Rendered, Wish
from autospec.outlook import Outlook, outlook
from autospec.profile.file import load_profile

EXPORTERS: Mapping[str, Callable[[Outlook, Wish], Rendered]] = {
    "vllm": vllm.export,
    "sglang": sglang.export,
    "tensorrt-llm": tensorrt_llm.export,
    "llama.cpp": llama_cpp.export,
}


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What ``autospec export`` was asked for. ``out`` is where the engine's file goes, if it takes
    one; None prints it."""

    profile: Path
    engine: str
    wish: Wish
    workload: str | None = None
    out: Path | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """Text for standard output, and notes for a person."""

    text: str
    notes: tuple[str, ...]


def run_export(options: ExportOptions) -> Exported:
    """Read, judge, fit, render; writes ``out``. Raises ProfileError and ExportError."""
    exporter = EXPORTERS.get(options.engine)
    if exporter is None:
        nearest = difflib.get_close_matches(options.engine, EXPORTERS, n=1, cutoff=0.4)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ExportError(
            f"--to: {options.engine!r} is no engine; there are {', '.join(EXPORTERS)}{hint}"
        )
    view = outlook(load_profile(options.profile), options.workload)
    rendered = exporter(view, options.wish)
    flags = list(rendered.flags)
    if rendered.file_text is None or rendered.file_name is None:
        return Exported(shlex.join(flags) + "\n", _notes(view, rendered))
    if options.out is None:
        text = f"# {rendered.file_name}\n{rendered.file_text}\n{shlex.join(flags)}\n"
        return Exported(text, _notes(view, rendered))
    try:
        options.out.write_text(rendered.file_text, encoding="utf-8")
    except OSError as error:
        raise ExportError(f"--out: {options.out}: cannot be written: {error.strerror}") from None
    flags[flags.index(rendered.file_name)] = str(options.out)
    return Exported(shlex.join(flags) + "\n", _notes(view, rendered))


def _notes(view: Outlook, rendered: Rendered) -> tuple[str, ...]:
    left_out = [f"{name} was left out: {reason}" for name, reason in view.left_out.items()]
    return (*rendered.notes, *left_out)
