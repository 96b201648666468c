"""Recorded arrivals: when requests came, from a CSV in the form of the Azure LLM traces."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path

from autospec.errors import InputError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the recorded service; ``seconds`` after the first one."""

    seconds: float
    context_tokens: int
    generated_tokens: int


def read_arrivals(path: Path) -> tuple[Arrival, ...]:
    """Arrivals in file order. Raises InputError with file and line; timestamps must not fall."""
    arrivals: list[Arrival] = []
    begin: datetime | None = None
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            header = tuple(name.strip() for name in next(rows, []))
            if header != COLUMNS:
                raise InputError(
                    f"{path}:1: the header must be {','.join(COLUMNS)}, "
                    f"found {','.join(header) or 'nothing'}"
                )
            for row in rows:
                if not row:
                    continue
                place = f"{path}:{rows.line_num}"
                if len(row) != len(COLUMNS):
                    raise InputError(f"{place}: must have 3 fields, found {len(row)}")
                time = _time(row[0], place)
                begin = time if begin is None else begin
                seconds = (time - begin).total_seconds()
                if arrivals and seconds < arrivals[-1].seconds:
                    raise InputError(f"{place}: TIMESTAMP is before the line above: {row[0]}")
                arrivals.append(
                    Arrival(
                        seconds,
                        _tokens(row[1], "ContextTokens", place),
                        _tokens(row[2], "GeneratedTokens", place),
                    )
                )
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except csv.Error as error:
        raise InputError(f"{path}: is not CSV: {error}") from None
    if not arrivals:
        raise InputError(f"{path}: has no arrivals")
    return tuple(arrivals)


def at_rate(arrivals: Sequence[Arrival], requests: int, rate: float) -> tuple[float, ...]:
    """Seconds of the first ``requests`` arrivals, stretched to ``rate`` requests a second.

    Raises InputError for a rate that is no positive number, for fewer arrivals than requests,
    and for arrivals that all come at once.
    """
    if not (isfinite(rate) and rate > 0):
        raise InputError(f"the rate must be a positive number of requests per second, found {rate}")
    if requests > len(arrivals):
        raise InputError(f"{requests} requests need as many arrivals; there are {len(arrivals)}")
    seconds = [arrival.seconds for arrival in arrivals[:requests]]
    if requests == 1:
        return (0.0,)
    span = seconds[-1] - seconds[0]
    if span <= 0.0:
        raise InputError("the arrivals all come at the same time; they have no rate to change")
    factor = (requests - 1) / rate / span
    return tuple((each - seconds[0]) * factor for each in seconds)


def _time(text: str, place: str) -> datetime:
    whole, _, fraction = text.strip().partition(".")
    fraction = fraction[:6]  # the traces have seven digits, datetime takes six
    try:
        return datetime.fromisoformat(f"{whole}.{fraction:0<6}" if fraction else whole)
    except ValueError:
        raise InputError(
            f"{place}: TIMESTAMP must be like 2023-11-16 18:15:46.68, found {text!r}"
        ) from None


def _tokens(text: str, name: str, place: str) -> int:
    if not (text.strip().isascii() and text.strip().isdigit()):
        raise InputError(f"{place}: {name} must be a whole number >= 0, found {text!r}")
    return int(text)
