"""The Grafana dashboard against the metrics that a live registry really exports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from autospec.metrics import Metrics
from autospec.step.counts import TokenCounts

DASHBOARD = Path(__file__).parents[2] / "dashboards" / "grafana.json"
SCRAPED = {"instance", "job"}
"""Labels that Prometheus itself adds."""


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return document


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def exported() -> dict[str, set[str]]:
    """Labels by sample name, of a registry in which everything has been counted once."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.bind(("suffix",), TokenCounts.empty(1, 1), lambda: 1.1)
    metrics.name_workload(0, "chat")
    metrics.add_step("speculate", 0.01, 0.0001)
    metrics.add_event("guard")
    metrics.add_fallback("policy")
    metrics.add_dropped("late")
    metrics.add_journal_failure()
    metrics.set_load(1, 0)
    metrics.set_speedup(1.2)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for annotation in dashboard()["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


def selectors(expression: promql_parser.Expr) -> list[promql_parser.VectorSelector]:
    """Every metric that an expression reads."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: object) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(expression, visit)
    return found


def parsed(expression: str) -> promql_parser.Expr:
    return promql_parser.parse(expression.replace("$__rate_interval", "5m"))


@pytest.mark.parametrize("title,expression", [pytest.param(*each) for each in expressions()])
def test_every_expression_reads_what_is_exported(title: str, expression: str) -> None:
    known = exported()
    read = selectors(parsed(expression))
    assert read, title
    for selector in read:
        assert selector.name in known, f"{title}: {selector.name} is not exported"
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= known[selector.name] | SCRAPED, f"{title}: {labels}"


def test_every_metric_is_shown() -> None:
    shown = {each.name for _, text in expressions() for each in selectors(parsed(text))}
    families = {name.removesuffix("_created") for name in exported()}
    wanted = {name for name in families if not name.endswith(("_sum", "_count"))}
    assert wanted <= shown, f"not on the dashboard: {wanted - shown}"


def test_variables_are_read_from_exported_metrics() -> None:
    known = exported()
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = variable["definition"].removeprefix("label_values(")[:-1].split(", ")
            assert label in known[metric] | SCRAPED


def test_panels_are_distinct_and_do_not_overlap() -> None:
    document = dashboard()
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert all(panel["description"] for panel in panels())
