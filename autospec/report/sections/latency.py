"""Latencies under arrivals, of a replay's open loops."""

from __future__ import annotations

from collections.abc import Sequence

from autospec.report.page import DataTable, Section
from autospec.report.readers.percentiles import three
from autospec.report.readers.replay_run import ReplayRun
from autospec.report.wording import rate


def latency_section(runs: Sequence[ReplayRun]) -> Section | None:
    """None without an open loop."""
    tables = []
    for run in runs:
        rows = [
            row for row in (*run.plain, *run.results) if row.rate is not None and row.tpot_seconds
        ]
        if rows:
            tables.append(
                DataTable(
                    f"{run.name}: p50 / p95 / p99 over requests",
                    (
                        "policy", "requests/s", "tokens/s", "to the first token",
                        "per output token", "whole request",
                    ),
                    tuple(
                        (
                            row.policy,
                            f"{row.rate:g}",
                            rate(row.tokens_per_second),
                            three(row.ttft_seconds),
                            three(row.tpot_seconds),
                            three(row.end_to_end_seconds),
                        )
                        for row in sorted(rows, key=lambda row: row.rate or 0.0)
                    ),
                )
            )  # fmt: skip
    if not tables:
        return None
    return Section(
        "latency",
        "Latency under arrivals",
        ("Requests arrive at their own times, wait for a slot and are prefilled beside others.",),
        tables=tuple(tables),
    )
