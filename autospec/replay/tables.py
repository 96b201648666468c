"""The tables of ``autospec replay``."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from autospec.replay.tasks import CLAIRVOYANT


def print_tables(console: Console, report: dict[str, Any]) -> None:
    """Show what is in the JSON form of a replay."""
    rows = [*report["plain"], *report["results"]]
    concurrency = list(dict.fromkeys(row["concurrency"] for row in rows if row["rate"] is None))
    if concurrency:
        requests = next(row["requests"] for row in rows if row["rate"] is None)
        table = Table(title=f"closed loop, {requests} requests: speedup against plain decoding")
        table.add_column("running requests")
        for number in concurrency:
            table.add_column(str(number), justify="right")
        for name in dict.fromkeys(row["policy"] for row in rows if row["rate"] is None):
            found = {row["concurrency"]: row for row in rows if row["policy"] == name}
            table.add_row(name, *(f"{found[n]['speedup_vs_plain']:.3f}" for n in concurrency))
        for title, values in (
            ("best fixed", report["best_fixed"]),
            (CLAIRVOYANT, report["clairvoyant"]),
        ):
            if values:
                cells = (values[str(n)] for n in concurrency)
                table.add_row(
                    title,
                    *(f"{c['speedup_vs_plain']:.3f} {c.get('arm', '')}".strip() for c in cells),
                    style="dim",
                )
        console.print(table)
    rates = list(dict.fromkeys(row["rate"] for row in rows if row["rate"] is not None))
    for rate in rates:
        table = Table(
            "policy", "tokens/s", "first token p50 / p95 / p99", "per token, ms", "whole request",
            title=f"open loop: {rate:g} requests/s (seconds; per token in ms)",
        )  # fmt: skip
        shares = any(row.get("tpot_target_share") is not None for row in rows)
        if shares:
            table.add_column("on target")
        for row in rows:
            if row["rate"] != rate:
                continue
            table.add_row(
                row["policy"],
                f"{row['tokens_per_second']:.0f}",
                _three(row["ttft_seconds"], 1.0),
                _three(row["tpot_seconds"], 1000.0),
                _three(row["end_to_end_seconds"], 1.0),
                *([f"{row['tpot_target_share']:.1%}"] if shares else []),
            )
        console.print(table)
    for row in report["results"]:
        at = row["concurrency"] if row["rate"] is None else f"{row['rate']:g}/s"
        console.print(
            f"{row['policy']} at {at}: {row['requests']} requests, {row['tokens']} tokens in "
            f"{row['seconds']:.1f} simulated seconds; deciding took "
            f"{row['decision_seconds_mean'] * 1e6:.0f} us a step, "
            f"p99 {row['decision_seconds_p99'] * 1e6:.0f} us",
            markup=False,
            soft_wrap=True,
        )


def _three(seconds: dict[str, float], factor: float) -> str:
    return " / ".join(f"{seconds[name] * factor:.2f}" for name in ("p50", "p95", "p99"))
