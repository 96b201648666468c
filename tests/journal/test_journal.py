from __future__ import annotations

import errno
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autospec.errors import InputError
from autospec.journal.lines import (
    MAX_GROUPS,
    MAX_STEP_BYTES,
    JournalStep,
    RestOfStep,
    StepGroup,
    encode_step,
)
from autospec.journal.reader import read_journal
from autospec.journal.writer import Journal, open_journal
from autospec.records import Mode, Plan, StepResult


def int16(values: Any) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    return np.array(values, dtype=np.int16)


def make_plan(n: int = 3, plan_id: int = 7, mode: Mode = "speculate") -> Plan:
    k = int16(np.full(n, 4))
    return Plan(plan_id, np.arange(n), int16(np.zeros(n)), k, k, mode, 0.01234567, 9.0)


def make_result(n: int = 3, step_seconds: float = 0.02) -> StepResult:
    return StepResult(
        int16(np.full(n, 4)), int16(np.full(n, 2)), int16(np.full(n, 3)), step_seconds
    )


def begin(journal: Journal) -> None:
    journal.begin({"max_k": 4}, {"target": "llama"}, ("ngram",), {"autospec": "0.1.0"})
    journal.name_workload(0, "chat")


def write(journal: Journal, n: int = 3, plan_id: int = 7) -> None:
    workloads = np.zeros(n, dtype=np.int32)
    journal.write_step(make_plan(n, plan_id), make_result(n), workloads, 5, 1000, 1e-4)


def steps_of(path: Path) -> list[JournalStep]:
    return [step for run in read_journal(path).runs for step in run.steps]


def test_write_and_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "j.jsonl"
    times = iter([1000.0, 1002.5])
    with Journal(path, clock=lambda: next(times)) as journal:
        begin(journal)
        write(journal)
    records = read_journal(path)
    assert records.torn_bytes == 0
    (run,) = records.runs
    assert run.header.settings == {"max_k": 4}
    assert run.header.identity == {"target": "llama"}
    assert run.header.proposers == ("ngram",)
    assert run.header.started == 1000.0
    assert run.workloads == {0: "chat"}
    assert run.steps == (
        JournalStep(
            id=7,
            at=2.5,
            mode="speculate",
            requests=3,
            waiting=5,
            context_tokens=1000,
            predicted_seconds=0.012346,
            predicted_tokens=9.0,
            step_seconds=0.02,
            decision_seconds=1e-4,
            groups=(StepGroup(0, 0, 4, 4, 2, 3, 3),),
            prefill_tokens=0,
        ),
    )


@given(
    st.lists(
        st.tuples(
            st.integers(-1, 3),
            st.integers(0, 90),
            st.integers(0, 64),
            st.integers(0, 64),
            st.integers(0, 64),
            st.integers(0, 65),
        ),
        max_size=300,
    )
)
def test_a_step_is_bounded_and_its_sums_are_whole(rows: list[tuple[int, ...]]) -> None:
    table = np.array(rows, dtype=np.int16).reshape(-1, 6)
    plan = Plan(
        10**12, np.arange(len(rows)), table[:, 0], table[:, 2], table[:, 3], "speculate", 1e-9, 1e9
    )
    result = StepResult(table[:, 3], table[:, 4], table[:, 5], 123456.789)
    line = encode_step(plan, result, table[:, 1], 10**6, 10**9, 1e-6, 1e7)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert len(line) <= MAX_STEP_BYTES
    groups, rest = json.loads(line)[-2:]
    assert len(groups) <= MAX_GROUPS
    assert sum(group[-1] for group in groups) + (rest[0] if rest else 0) == len(rows)
    for column, position in ((2, 1), (3, 2), (4, 3), (5, 4)):
        written = sum(group[column] * group[-1] for group in groups)
        whole = written + (rest[position] if rest else 0)
        assert whole == int(table[:, column].sum(dtype=np.int64))


def test_the_widest_numbers_stay_within_the_bound() -> None:
    n = 5000
    wide = np.arange(n) % 30_000 - 32_768
    plan = Plan(2**62, np.arange(n), int16(wide), int16(wide), int16(wide), "speculate", 1.0, 1.0)
    result = StepResult(int16(wide), int16(wide), int16(wide), 1.0, prefill_tokens=2**62)
    line = encode_step(plan, result, wide - 2**30, 2**62, 2**62, 1.0, 1e300)
    assert len(line) <= MAX_STEP_BYTES


def test_prefill_tokens_are_written_and_older_journals_read(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path) as journal:
        begin(journal)
        result = make_result()._replace(prefill_tokens=512)
        journal.write_step(make_plan(), result, np.zeros(3, dtype=np.int32), 0, 0, 0.0)
    (step,) = steps_of(path)
    assert step.prefill_tokens == 512
    *lines, last = path.read_text().splitlines()
    parts = json.loads(last)
    path.write_text("\n".join((*lines, json.dumps(parts[:11] + parts[12:]))) + "\n")
    assert steps_of(path) == [replace(step, prefill_tokens=None)]
    path.write_text("\n".join((*lines, json.dumps([*parts, 0]))) + "\n")
    with pytest.raises(InputError, match="line 3 cannot be read: a step has 13 or 14 parts"):
        steps_of(path)


def test_the_most_frequent_groups_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    n = 200
    k = int16(np.r_[np.full(100, 3), np.arange(100) + 10])
    plan = Plan(1, np.arange(n), int16(np.zeros(n)), k, k, "speculate")
    with Journal(path) as journal:
        begin(journal)
        journal.write_step(plan, StepResult(k, k, k, 0.1), np.zeros(n, dtype=np.int32), 0, 0, 0.0)
    (step,) = steps_of(path)
    assert step.groups[0] == StepGroup(0, 0, 3, 3, 3, 3, 100)
    assert len(step.groups) == MAX_GROUPS
    assert step.rest.requests == 100 - (MAX_GROUPS - 1)
    assert step.rest != RestOfStep()


@pytest.mark.parametrize("seconds", [np.nan, np.inf, -np.inf])
def test_unusable_seconds_are_no_data(tmp_path: Path, seconds: float) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        begin(journal)
        journal.write_step(
            make_plan(), make_result(3, seconds), np.zeros(3, dtype=np.int32), 0, 0, 1e-4
        )
    assert steps_of(path)[0].step_seconds is None


def test_a_header_never_raises(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.begin({"every": [np.inf, 1.5]}, {}, ("ngram",), {})
        write(journal)
    assert read_journal(tmp_path / "j").runs[0].header.settings == {"every": [None, 1.5]}
    with Journal(tmp_path / "k") as journal:
        journal.begin({"bad": object()}, {}, ("ngram",), {})
        assert journal.failure is not None


def test_an_empty_batch_is_a_step(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        begin(journal)
        write(journal, n=0)
    assert steps_of(path)[0].groups == ()


def test_a_torn_last_line_is_dropped_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        begin(journal)
        write(journal, plan_id=1)
        write(journal, plan_id=2)
    content = path.read_bytes()
    for cut in range(1, 40):
        path.write_bytes(content[:-cut])
        records = read_journal(path)
        assert [step.id for step in records.runs[0].steps] == [1]
        assert records.torn_bytes > 0


def test_a_run_that_follows_a_crash_cuts_the_torn_line_off(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        begin(journal)
        write(journal, plan_id=1)
        write(journal, plan_id=2)
    path.write_bytes(path.read_bytes()[:-5])
    with Journal(path) as journal:
        begin(journal)
        write(journal, plan_id=3)
    runs = read_journal(path).runs
    assert [[step.id for step in run.steps] for run in runs] == [[1], [3]]


@pytest.mark.parametrize(
    "line,message",
    [
        (b"{", "line 2 cannot be read"),
        (b"", "line 2 cannot be read"),
        (b"3", "neither a header, nor a workload, nor a step"),
        (b'["s",1]', "line 2 cannot be read"),
        (b'{"journal":9}', "'journal' is 9, this AutoSpec reads version 1"),
        (b'["s",1,0,"odd",0,0,0,null,null,null,0,[],0]', "mode must be one of plain,"),
    ],
)
def test_a_bad_line_in_the_middle_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        begin(journal)
        write(journal)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], line, *lines[1:]]) + b"\n")
    with pytest.raises(InputError, match=r"j\.jsonl: line 2 cannot be read") as caught:
        read_journal(path)
    assert message in str(caught.value)


def test_a_step_before_any_header(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text('["w",0,"chat"]\n')
    with pytest.raises(InputError, match="line 1 cannot be read: comes before any header"):
        read_journal(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_journal(tmp_path / "none")


def test_an_empty_file_has_no_runs(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"")
    assert read_journal(tmp_path / "j").runs == ()


def test_opening_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be opened: Is a directory"):
        Journal(tmp_path)
    with (
        Journal(tmp_path / "j"),
        pytest.raises(InputError, match="another process writes to it"),
    ):
        Journal(tmp_path / "j")


def test_a_full_disk_switches_off_and_never_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    failures: list[str] = []
    journal = Journal(
        tmp_path / "j", flush_seconds=60, on_failure=lambda: failures.append("failed")
    )
    with caplog.at_level(logging.ERROR), journal:
        begin(journal)
        monkeypatch.setattr("autospec.journal.writer.os.write", full)
        write(journal)
        journal.flush()
        assert journal.failure is not None
        assert "No space left" in journal.failure
        for _ in range(5):
            write(journal)
        journal.flush()
    assert journal.dropped_steps == 6
    assert caplog.text.count("switched off") == 1
    assert failures == ["failed"]


def test_a_closed_journal_takes_no_steps_and_does_not_raise(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    begin(journal)
    journal.close()
    write(journal)
    journal.close()
    assert journal.dropped_steps == 1
    assert steps_of(tmp_path / "j") == []


def test_a_mangled_step_switches_off_and_does_not_raise(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        begin(journal)
        journal.write_step(make_plan(3), make_result(2), np.zeros(3, dtype=np.int32), 0, 0, 0.0)
        assert journal.failure is not None


def test_rotation_keeps_two_readable_files(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    limit = 4000
    with Journal(path, max_bytes=limit, flush_seconds=60) as journal:
        begin(journal)
        for plan_id in range(200):
            write(journal, plan_id=plan_id)
            journal.flush()
    assert {each.name for each in tmp_path.iterdir()} == {"j.jsonl", "j.jsonl.1"}
    assert path.stat().st_size <= limit
    ids = [step.id for each in ("j.jsonl.1", "j.jsonl") for step in steps_of(tmp_path / each)]
    assert ids == list(range(ids[0], 200))
    assert read_journal(path).runs[0].workloads == {0: "chat"}


def test_a_device_is_not_rotated(tmp_path: Path) -> None:
    path = tmp_path / "null"
    path.symlink_to("/dev/null")
    with Journal(path, max_bytes=100, flush_seconds=60) as journal:
        begin(journal)
        for _ in range(3):
            write(journal)
            journal.flush()
        assert journal.failure is None
    assert [each.name for each in tmp_path.iterdir()] == ["null"]
    assert path.is_symlink()


def test_a_rotation_that_fails_closes_no_file_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j", max_bytes=100, flush_seconds=60)
    begin(journal)
    journal.flush()

    def refuse(path: Path) -> int:
        raise InputError("no more files")

    monkeypatch.setattr("autospec.journal.writer._open", refuse)
    write(journal)
    journal.flush()
    assert journal.failure == "no more files"
    others = [(tmp_path / f"other-{number}").open("w") for number in range(8)]
    journal.close()
    for other in others:
        other.write("still open")
        other.close()


@pytest.mark.parametrize("place", ["", "file/j.jsonl", "taken.jsonl"])
def test_a_server_goes_on_without_a_journal(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    failures: list[str] = []
    with Journal(tmp_path / "taken.jsonl"):
        journal = open_journal(tmp_path / place, 1000, lambda: failures.append("failed"))
    assert journal is None
    assert failures == ["failed"]
    assert caplog.text.count("serving goes on without it") == 1
    good = open_journal(tmp_path / "good.jsonl", 1000, failures.clear)
    assert good is not None
    good.close()


def test_a_stuck_disk_costs_steps_and_not_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autospec.journal.writer._MAX_BUFFERED_BYTES", 2000)
    with Journal(tmp_path / "j", flush_seconds=60) as journal:
        begin(journal)
        for _ in range(100):
            write(journal)
        assert 0 < journal.dropped_steps < 100
        assert journal.failure is None
        written = 100 - journal.dropped_steps
    assert len(steps_of(tmp_path / "j")) == written


def test_steps_are_written_without_being_asked(tmp_path: Path) -> None:
    import time

    with Journal(tmp_path / "j", flush_seconds=0.01) as journal:
        begin(journal)
        write(journal)
        for _ in range(500):
            if steps_of(tmp_path / "j"):
                break
            time.sleep(0.01)
        assert len(steps_of(tmp_path / "j")) == 1
