"""The lines of a journal, JSONL: arrays or objects, one each.

A file holds one or more runs:

- ``{"journal":1,...}`` starts a run: settings, identity, proposer names, versions, unix time;
- ``["w",index,label]`` names a workload;
- ``["s",id,at,mode,n,waiting,context,predicted_seconds,predicted_tokens,step_seconds,
  decision_seconds,prefill,groups,rest]`` is a step. ``prefill`` is how many prompt tokens it also
  took; journals of before have no such place. ``groups`` are rows that went alike,
  ``[proposer,workload,k,verified,accepted,committed,requests]``, the most frequent first. At most
  ``MAX_GROUPS`` are written; ``rest`` sums up the others as ``[requests,drafted,verified,accepted,
  committed]``, or is 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from autospec.records import Mode, Plan, StepResult

VERSION = 1
MAX_GROUPS = 64
MAX_STEP_BYTES = 4096
"""No step's line is longer, however many requests run."""

_GROUP_FIELDS = 6


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """What a run was: enough to read its steps and to repeat it."""

    settings: Mapping[str, Any]
    identity: Mapping[str, Any]
    proposers: tuple[str, ...]
    versions: Mapping[str, str]
    started: float  # unix seconds


@dataclass(frozen=True, slots=True)
class StepGroup:
    """Requests of one step that went alike; ``proposer`` and ``workload`` are indices."""

    proposer: int
    workload: int
    k: int
    verified: int
    accepted: int
    committed: int
    requests: int


@dataclass(frozen=True, slots=True)
class RestOfStep:
    """Sums over the rows that did not fit into a step's groups."""

    requests: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    committed: int = 0


@dataclass(frozen=True, slots=True)
class JournalStep:
    """One step as written; ``at`` is seconds since the run's start. ``prefill_tokens`` is None in
    a journal that does not say."""

    id: int
    at: float
    mode: Mode
    requests: int
    waiting: int
    context_tokens: int
    predicted_seconds: float | None
    predicted_tokens: float | None
    step_seconds: float | None
    decision_seconds: float
    groups: tuple[StepGroup, ...]
    rest: RestOfStep = RestOfStep()
    prefill_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WorkloadName:
    """The label that an index stands for in the steps that follow."""

    index: int
    label: str


def encode_step(
    plan: Plan,
    result: StepResult,
    workloads: NDArray[np.integer],  # [n]
    waiting: int,
    context_tokens: int,
    decision_seconds: float,
    at: float,
) -> bytes:
    """A step's line, at most MAX_STEP_BYTES long."""
    n = plan.handles.shape[0]
    rows = np.empty((n, _GROUP_FIELDS), dtype=np.int32)
    for column, values in enumerate(
        (plan.proposer, workloads, plan.k, result.verified, result.accepted, result.committed)
    ):
        rows[:, column] = values
    counts: dict[tuple[int, ...], int] = {}
    for row in map(tuple, rows.tolist()):
        counts[row] = counts.get(row, 0) + 1
    groups = sorted(((*row, count) for row, count in counts.items()), key=lambda g: (-g[-1], g))
    line = _step_line(plan, result, n, waiting, context_tokens, decision_seconds, at, groups)
    while len(line) > MAX_STEP_BYTES and groups:  # numbers wider than any engine's
        groups = groups[: len(groups) // 2]
        line = _step_line(plan, result, n, waiting, context_tokens, decision_seconds, at, groups)
    return line


def _step_line(
    plan: Plan,
    result: StepResult,
    n: int,
    waiting: int,
    context_tokens: int,
    decision_seconds: float,
    at: float,
    groups: list[tuple[int, ...]],
) -> bytes:
    kept = groups[:MAX_GROUPS]
    rest: list[int] | int = 0
    missing = n - sum(group[-1] for group in kept)
    if missing:
        sums = [int(values.sum(dtype=np.int64)) for values in (
            plan.k, result.verified, result.accepted, result.committed
        )]  # fmt: skip
        written = [sum(group[column] * group[-1] for group in kept) for column in (2, 3, 4, 5)]
        rest = [missing, *(whole - part for whole, part in zip(sums, written, strict=True))]
    return json_line(
        [
            "s",
            plan.id,
            round(at, 4),
            plan.mode,
            n,
            waiting,
            context_tokens,
            _rounded(plan.predicted_seconds),
            _rounded(plan.predicted_tokens),
            _rounded(result.step_seconds),
            _rounded(decision_seconds),
            int(result.prefill_tokens),
            kept,
            rest,
        ]
    )


def _rounded(value: float | None) -> float | None:
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def finite(value: object) -> object:
    """``value`` with null for the numbers that JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def json_line(value: object) -> bytes:
    """A line as it is written; raises ValueError for a number that JSON does not know."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def read_line(line: bytes) -> JournalHeader | WorkloadName | JournalStep:
    """What a line says; raises ValueError, TypeError or KeyError for one that says nothing."""
    value = json.loads(line)
    if isinstance(value, dict):
        return _read_header(value)
    if not isinstance(value, list) or not value or value[0] not in ("w", "s"):
        raise ValueError("is neither a header, nor a workload, nor a step")
    if value[0] == "w":
        _, index, label = value
        return WorkloadName(int(index), str(label))
    return _read_step(value)


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _read_header(value: Mapping[str, Any]) -> JournalHeader:
    if value.get("journal") != VERSION:
        raise ValueError(
            f"'journal' is {value.get('journal')!r}, this AutoSpec reads version {VERSION}"
        )
    return JournalHeader(
        settings=value["settings"],
        identity=value["identity"],
        proposers=tuple(value["proposers"]),
        versions=value["versions"],
        started=float(value["started"]),
    )


def _read_step(value: list[Any]) -> JournalStep:
    (
        _, plan_id, at, mode, requests, waiting, context_tokens, predicted_seconds,
        predicted_tokens, step_seconds, decision_seconds, *prefill, groups, rest,
    ) = value  # fmt: skip
    if len(prefill) > 1:
        raise ValueError(f"a step has 13 or 14 parts, found {len(value)}")
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, found {mode!r}")
    return JournalStep(
        id=int(plan_id),
        at=float(at),
        mode=mode,
        requests=int(requests),
        waiting=int(waiting),
        context_tokens=int(context_tokens),
        predicted_seconds=_float(predicted_seconds),
        predicted_tokens=_float(predicted_tokens),
        step_seconds=_float(step_seconds),
        decision_seconds=float(decision_seconds),
        groups=tuple(StepGroup(*(int(number) for number in group)) for group in groups),
        rest=RestOfStep(*rest) if rest else RestOfStep(),
        prefill_tokens=int(prefill[0]) if prefill else None,
    )
