"""The requests that a run decoded once, beside its state, so that it can go on from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autospec.replay.trace import TraceRequest, read_traces, write_traces
from autospec.tune.state import State, trace_path
from autospec.tune.tuner import digest_of


def read_recorded(out: Path, state: State) -> tuple[TraceRequest, ...] | None:
    """What this run wrote earlier; None without it, also when the file is another run's."""
    path = trace_path(out)
    if not state.traces or not path.exists() or digest_of([path]) != state.traces:
        return None
    return read_traces([path])


def write_recorded(out: Path, state: State, traces: Sequence[TraceRequest]) -> None:
    """Replace the file; ``state`` knows it by its digest. Raises InputError."""
    path = trace_path(out)
    write_traces(path, traces)
    state.traces = digest_of([path])
