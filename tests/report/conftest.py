from __future__ import annotations

import json
from pathlib import Path

import pytest

from autospec.report import write_report
from tests.report.samples import bench_document, replay_document, serve


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a journal, a profile, two measurements and a replay."""
    made = tmp_path_factory.mktemp("inputs")
    serve(made / "run.jsonl", made / "learned.json")
    (made / "bench.json").write_text(json.dumps(bench_document()))
    (made / "warm.json").write_text(json.dumps(bench_document(warm_start_requests=40)))
    (made / "replay.json").write_text(json.dumps(replay_document()))
    return made


@pytest.fixture(scope="session")
def report_file(folder: Path) -> Path:
    """A report on all of them."""
    out = folder / "report.html"
    write_report(sorted(folder.glob("[a-z]*.json*")), out)
    return out
