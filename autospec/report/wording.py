"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime


def times(ratio: float) -> str:
    """A speedup: ``1.53x``."""
    return f"{ratio:.2f}x"


def percent(share: float) -> str:
    """A share of 1: ``63 %``; small ones keep a decimal."""
    value = 100.0 * share
    digits = 1 if 0.0 < abs(value) < 9.95 else 0
    return f"{value:.{digits}f}\u202f%"


def count(number: float) -> str:
    """A count with thousands separated."""
    return f"{number:,.0f}"


def rate(per_second: float) -> str:
    """Tokens per second, in three digits or so."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.1f}"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1.0:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120.0:
        return f"{seconds:.3g} s"
    if seconds < 7200.0:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def moment(time: datetime) -> str:
    """Day and minute."""
    zone = " UTC" if time.utcoffset() is not None and not time.utcoffset() else ""
    return f"{time:%Y-%m-%d %H:%M}{zone}"


def plural(number: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


def series(items: Sequence[str]) -> str:
    """``a, b and c``."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def sentence(text: str) -> str:
    """The text with a capital and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def shortened(text: str, length: int) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
