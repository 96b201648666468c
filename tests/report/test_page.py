"""The HTML itself, without a browser, and the command."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from autospec import cli
from autospec.errors import InputError, MissingDependency
from autospec.report import check_report, write_report
from tests.report.samples import bench_document, replay_document


class Outline(HTMLParser):
    """Headings, ids, and everything that could reach out of the file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.labels: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "src", "xlink:href"):
                self.links.append(value or "")
            elif name == "aria-label":
                self.labels.append(value or "")


@pytest.fixture(scope="module")
def page(report_file: Path) -> str:
    return report_file.read_text(encoding="utf-8")


def test_nothing_is_fetched(page: str) -> None:
    outline = Outline(page)
    assert not outline.tags & {"script", "img", "iframe", "object", "embed"}
    assert {link for link in outline.links if not link.startswith("#")} == {"data:,"}
    assert page.count("url(http") == 0
    assert page.count("@import") == 0
    assert page.count("default-src 'none'") == 1


def test_structure(page: str) -> None:
    outline = Outline(page)
    assert outline.headings[0] == 1
    assert outline.headings.count(1) == 1
    steps = zip(outline.headings, outline.headings[1:], strict=False)
    assert all(after <= before + 1 for before, after in steps)
    assert len(outline.ids) == len(set(outline.ids))
    assert {link[1:] for link in outline.links if link.startswith("#")} <= set(outline.ids)
    assert all(outline.labels)


def test_every_section_is_there(page: str) -> None:
    for name in (
        "verdict", "comparison", "speedup", "drafting", "best", "crossover", "latency", "timeline",
        "rails", "acceptance", "cost", "sources",
    ):  # fmt: skip
        assert page.count(f'<section id="{name}"') == 1, name


def test_colors_are_variables(page: str) -> None:
    assert page.count("#fe") == 0
    assert page.count("var(--accent)") > 0
    assert len(page) < 2_500_000


def test_labels_are_text_not_markup(tmp_path: Path) -> None:
    label = "</svg><b>&$x_1$ 編集"
    document = bench_document(target=label)
    document["phases"][0]["workload"] = label
    write_report([document], tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.count("<b>") == 0
    assert page.count("&lt;/svg&gt;&lt;b&gt;&amp;$x_1$ 編集") > 5


def test_what_is_missing_is_said(folder: Path, tmp_path: Path) -> None:
    write_report([folder / "learned.json"], tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.count('<section id="timeline"') == 0
    assert page.count("over time: takes a journal") == 1
    assert page.count('<section id="acceptance"') == 1


def test_one_number_of_everything(tmp_path: Path) -> None:
    """The smallest of inputs: one phase, one step, one concurrency."""
    document = bench_document()
    document["phases"] = document["phases"][:1]
    replay = replay_document()
    replay["results"] = replay["results"][:1]
    journal = tmp_path / "one.jsonl"
    header = {"journal": 1, "started": 0, "settings": {}, "identity": {}, "proposers": []}
    step = ["s", 0, 0.1, "plain", 1, 0, 9, None, None, 0.03, 0.0, [[-1, 0, 0, 0, 0, 1, 1]], 0]
    journal.write_text(
        json.dumps({**header, "versions": {}}) + "\n" + json.dumps(step) + "\n", encoding="utf-8"
    )
    write_report([document, replay, journal], tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.count("Nothing was drafted: every step was plain.") == 1


def test_command(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "r.html"
    argv = ["autospec", "report", str(folder / "bench.json"), "-o", str(out)]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code in (0, None)
    assert f"report saved in {out}" in capsys.readouterr().out
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    bad = tmp_path / "bad.json"
    bad.write_text('{"a": 1}')
    monkeypatch.setattr("sys.argv", ["autospec", "report", str(bad), "-o", str(out)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert "of no known kind" in capsys.readouterr().err


def test_replay_writes_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [1, 2, 3, 4] * 8
    lines = [
        {"id": f"r{i}", "workload": "chat", "prompt_token_ids": tokens, "output_token_ids": tokens}
        for i in range(3)
    ]
    trace, cost, out = tmp_path / "t.jsonl", tmp_path / "cost.yaml", tmp_path / "r.html"
    trace.write_text("".join(json.dumps({**line, "accepted": {}}) + "\n" for line in lines))
    cost.write_text(
        "shape: packed\nstep: {fixed_seconds: 0.01, per_token_seconds: 0.0001}\n"
        "proposers: {suffix: {kind: lookup}}\n"
    )
    argv = ["autospec", "replay", trace, "--cost", cost, "--concurrency", "1", "--jobs", "1"]
    monkeypatch.setattr("sys.argv", [*map(str, argv), "--no-hindsight", "--report", str(out)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code in (0, None)
    assert f"report saved in {out}" in capsys.readouterr().out
    assert out.read_text(encoding="utf-8").count("Policy default decoded") == 1


def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_report([bench_document()], tmp_path / "missing" / "r.html")
    with pytest.raises(InputError, match=r"--report: .* cannot be written"):
        check_report(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match=r"pip install 'autospec-llm\[report\]'"):
        check_report(tmp_path / "r.html")
