"""What a tuning run knows so far, in a file beside its profile, so that it can go on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autospec.errors import InputError
from autospec.tune.search import Trial

FORMAT = "autospec-tune-state"
VERSION = 2


@dataclass(slots=True)
class Round:
    """Goodputs of every arm by load, over the same held-out requests; None where one failed."""

    seed: int
    goodputs: dict[str, list[float | None]]


@dataclass(slots=True)
class State:
    """Trials, rounds of the final, and seconds spent. ``fingerprint`` says of what run."""

    fingerprint: str
    spent: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    finalists: list[tuple[float, ...]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    surface: list[dict[str, Any]] = field(default_factory=list)
    cost: dict[str, Any] | None = None
    """Sums of the step cost, once the surface was measured."""
    lookup_seconds: dict[str, float] = field(default_factory=dict)
    traces: str = ""
    """SHA-256 of the file of recorded requests, empty without one."""


def state_path(out: Path) -> Path:
    """Where the state of the run that writes ``out`` lies."""
    return out.with_name(f".{out.name}.tune.json")


def trace_path(out: Path) -> Path:
    """Where the requests lie that the run recorded."""
    return out.with_name(f".{out.name}.traces.jsonl")


def save_state(path: Path, state: State) -> None:
    """Replace the file in one step. Raises InputError."""
    document = {"format": FORMAT, "version": VERSION, **asdict(state)}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(_finite(document)), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def load_state(path: Path, fingerprint: str) -> State:
    """The state to go on from: a new one without a file, or when the file is of another run."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return State(fingerprint)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: is no state to resume from: {error}; remove it") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InputError(f"{path}: is no state of autospec tune; remove it or name another --out")
    if document.get("version") != VERSION or document.get("fingerprint") != fingerprint:
        return State(fingerprint)
    return _read(document)


def _read(document: Mapping[str, Any]) -> State:
    trials = [
        Trial(
            tuple(each["point"]),
            each["seed"],
            each["status"],
            tuple(each["scores"]),
            each["seconds"],
            each["error"],
        )
        for each in document["trials"]
    ]
    rounds = [Round(each["seed"], each["goodputs"]) for each in document["rounds"]]
    return State(
        document["fingerprint"],
        document["spent"],
        trials,
        [tuple(each) for each in document["finalists"]],
        rounds,
        document["surface"],
        document["cost"],
        document["lookup_seconds"],
        document["traces"],
    )


def _finite(value: Any) -> Any:
    """JSON has no NaN: None instead."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
