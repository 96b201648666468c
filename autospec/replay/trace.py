"""Recorded requests: prompt, output, and what each model's drafts would have had accepted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autospec.errors import InputError
from autospec.records import Int16Array, Int32Array


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One served request. ``accepted[name][i]``: tokens that proposer ``name``, drafting at output
    position ``i``, would have had accepted, the bonus token not counted."""

    id: str
    workload: str | None
    prompt_token_ids: Int32Array
    output_token_ids: Int32Array
    accepted: Mapping[str, Int16Array]
    temperature: float = 0.0


def read_traces(paths: Sequence[Path]) -> tuple[TraceRequest, ...]:
    """Requests of JSONL files, in file order. Raises InputError with file and line."""
    requests: list[TraceRequest] = []
    for path in paths:
        try:
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        requests.append(_request(line, f"{path}:{number}"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    if not requests:
        raise InputError(f"no requests in {', '.join(map(str, paths))}")
    return tuple(requests)


def _request(line: str, place: str) -> TraceRequest:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict):
        raise InputError(f"{place}: must be a JSON object, found {type(row).__name__}")
    output = _token_ids(row, "output_token_ids", place)
    prompt = _token_ids(row, "prompt_token_ids", place)
    if len(output) == 0 or len(prompt) == 0:
        raise InputError(f"{place}: prompt_token_ids and output_token_ids must not be empty")
    accepted = row.get("accepted", {})
    if not isinstance(accepted, dict):
        raise InputError(f"{place}: accepted must map a proposer's name to a list of numbers")
    lengths: dict[str, Int16Array] = {}
    for name, values in accepted.items():
        array = _integers(values)
        if array is None or len(array) != len(output) or bool((array < 0).any()):
            raise InputError(
                f"{place}: accepted.{name} must be {len(output)} numbers >= 0, one for each "
                f"output token"
            )
        lengths[str(name)] = np.minimum(array, np.iinfo(np.int16).max).astype(np.int16)
    workload = row.get("workload")
    temperature = row.get("temperature", 0.0)
    if not isinstance(temperature, int | float) or not temperature >= 0:
        raise InputError(f"{place}: temperature must be a number >= 0, found {temperature!r}")
    return TraceRequest(
        str(row.get("id", place)),
        None if workload is None else str(workload),
        prompt,
        output,
        lengths,
        float(temperature),
    )


def _token_ids(row: Mapping[str, object], key: str, place: str) -> Int32Array:
    array = _integers(row.get(key))
    if array is None or bool((array < 0).any()) or bool((array > np.iinfo(np.int32).max).any()):
        raise InputError(f"{place}: {key} must be a list of token ids (whole numbers >= 0)")
    return array.astype(np.int32)


def _integers(values: object) -> np.ndarray | None:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        return None
    return np.array(values, dtype=np.int64)


def write_traces(path: Path, requests: Sequence[TraceRequest]) -> None:
    """Replace the file by these requests, in the form that ``read_traces`` takes."""
    try:
        with path.open("w", encoding="utf-8") as file:
            for request in requests:
                row = {
                    "id": request.id,
                    "workload": request.workload,
                    "prompt_token_ids": request.prompt_token_ids.tolist(),
                    "output_token_ids": request.output_token_ids.tolist(),
                    "accepted": {name: each.tolist() for name, each in request.accepted.items()},
                    "temperature": request.temperature,
                }
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
