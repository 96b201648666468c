"""Percentiles of a time over requests, as several commands write them."""

from __future__ import annotations

from autospec.report.readers.form import Form
from autospec.report.wording import duration


class Percentiles(Form):
    """Of seconds, over requests."""

    p50: float
    p95: float
    p99: float


def three(seconds: Percentiles | None) -> str:
    """All three in a cell of a table."""
    if seconds is None:
        return "–"
    return " / ".join(duration(each) for each in (seconds.p50, seconds.p95, seconds.p99))
