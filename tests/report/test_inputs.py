from __future__ import annotations

import json
from pathlib import Path

import pytest

from autospec.errors import InputError, ProfileError
from autospec.report.inputs import read_inputs
from autospec.report.readers.counts import Counts
from autospec.report.readers.journal_run import (
    FIRST_PROPOSER,
    JournalRun,
    read_journal_runs,
)
from autospec.report.readers.time_bins import MOST_BINS, TimeBins
from tests.report.samples import STEPS, bench_document, replay_document

HEADER = {
    "journal": 1,
    "started": 1.7e9,
    "settings": {"policy": {"name": "goodput"}},
    "identity": {"target": "tiny", "device": "cpu"},
    "proposers": ["ngram", "suffix"],
    "versions": {},
}
"""A step in which suffix verified 4 tokens for each of two requests and 3 were accepted."""
STEP = ["s", 0, 0.5, "speculate", 3, 1, 90, 0.04, 6.0, 0.05, 1e-4]
GROUPS = [[1, 0, 4, 4, 3, 4, 2], [-1, 0, 0, 0, 0, 1, 1]]


def journal(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def one_run(path: Path, *lines: object) -> JournalRun:
    (run,) = read_journal_runs("j", journal(path, HEADER, ["w", 0, "chat"], *lines))
    return run


def test_a_step_is_added_up(tmp_path: Path) -> None:
    run = one_run(tmp_path / "j", [*STEP, GROUPS, 0])
    assert (run.steps, run.tokens, run.request_steps, run.drafting_steps) == (1, 9, 3, 2)
    assert (run.verified, run.accepted) == (8, 6)
    assert run.seconds == 0.05
    assert run.counts() == {
        ("chat", "suffix"): Counts(("1", "2", "3", "4"), (2, 2, 2, 0), (2, 2, 2, 2))
    }
    assert run.choices[2, "chat"].choices == {("suffix", 4): 2, ("off", 0): 1}
    _, bins = run.busy.coarse(0, MOST_BINS)
    assert bins[0, FIRST_PROPOSER:].tolist() == [0, 0, 2, 8, 1, 0]


def test_an_accepted_draft_says_nothing_of_the_position_after_it(tmp_path: Path) -> None:
    run = one_run(tmp_path / "j", [*STEP, [[0, 0, 2, 2, 2, 3, 3]], 0])
    assert run.counts()["chat", "ngram"] == Counts(("1", "2"), (3, 3), (3, 3))


def test_rest_of_a_step_counts_but_has_no_proposer(tmp_path: Path) -> None:
    run = one_run(tmp_path / "j", [*STEP, GROUPS, [5, 20, 10, 7, 12]])
    assert (run.tokens, run.verified, run.accepted) == (21, 18, 13)
    assert run.drafting_steps == 2


def test_steps_that_took_over_twice_the_time_told_are_kept_apart(tmp_path: Path) -> None:
    slow = [*STEP[:9], 0.081, *STEP[10:]]
    run = one_run(tmp_path / "j", [*STEP, GROUPS, 0], [*slow, GROUPS, 0])
    assert run.odd_steps == 1
    assert run.loads[3].steps == 1
    assert run.modes["speculate"].steps == 2


def test_steps_that_prefilled_are_kept_apart_where_the_journal_says_so(tmp_path: Path) -> None:
    slow = [*STEP[:9], 0.081, *STEP[10:]]
    steps = ([*STEP, 0, GROUPS, 0], [*slow, 0, GROUPS, 0], [*STEP, 512, GROUPS, 0])
    run = one_run(tmp_path / "j", *steps)
    assert run.tells_prefill
    assert run.odd_steps == 1
    assert run.loads[3].steps == 2
    assert run.loads[3].seconds == pytest.approx(0.131)
    assert [point.seconds for point in run.points] == [0.05, 0.081]
    assert run.error_steps == 2
    assert run.steps == 3
    assert run.seconds == pytest.approx(0.181)
    assert not one_run(tmp_path / "j", [*STEP, GROUPS, 0]).tells_prefill


def test_steps_without_a_usable_time_bring_tokens_only(tmp_path: Path) -> None:
    run = one_run(tmp_path / "j", [*STEP[:9], None, *STEP[10:], GROUPS, 0])
    assert (run.tokens, run.seconds) == (9, 0.0)
    assert not run.points


def test_episodes_of_a_mode(tmp_path: Path) -> None:
    modes = ["guard", "guard", "plain", "guard", "guard", "guard"]
    steps = [["s", i, 0.1 * i, mode, *STEP[4:], [], 0] for i, mode in enumerate(modes)]
    guard = one_run(tmp_path / "j", *steps).modes["guard"]
    assert (guard.steps, guard.episodes, guard.longest) == (5, 2, 3)


def test_the_last_runs_of_a_file(tmp_path: Path) -> None:
    lines: list[object] = []
    for _ in range(11):
        lines += [HEADER, ["w", 0, "chat"], [*STEP, GROUPS, 0]]
    runs = read_journal_runs("j", journal(tmp_path / "j", *lines, HEADER))
    assert [run.name for run in runs][-1] == "j, run 11"
    assert 1 < len(runs) <= 8


def test_a_long_journal_is_bounded(tmp_path: Path) -> None:
    with (tmp_path / "j").open("w") as file:
        file.write(json.dumps(HEADER) + "\n" + '["w",0,"chat"]\n')
        for i in range(6000):
            file.write(json.dumps(["s", i, 0.06 * i, *STEP[3:], GROUPS, 0]) + "\n")
    (run,) = read_journal_runs("j", tmp_path / "j")
    assert run.steps == 6000
    assert len(run.points) == 4000
    assert len(run.wall.coarse(0, 10**6)[1]) <= MOST_BINS
    assert run.wall.coarse(0, 10**6)[1][:, 0].sum() == 6000


def test_bins_become_longer_and_keep_their_sums() -> None:
    bins = TimeBins(2)
    for at in range(1000):
        bins.add(float(at), (1.0, at))
    width, sums = bins.coarse(fewest=10, most_bins=100)
    assert len(sums) <= 100
    assert sums[:, 0].sum() == 1000
    assert sums[:, 1].sum() == sum(range(1000))
    inner = sums[1:-2, 0]
    assert abs(inner - width).max() <= 1


def test_kinds_are_told_apart(folder: Path) -> None:
    names = ("bench.json", "replay.json", "run.jsonl", "learned.json")
    inputs = read_inputs([folder / name for name in names])
    assert [run.name for run in inputs.benches] == ["bench.json"]
    assert [run.name for run in inputs.replays] == ["replay.json"]
    assert [run.name for run in inputs.last_runs] == ["run.jsonl"]
    assert [profile.name for profile in inputs.profiles] == ["learned.json"]
    assert inputs.last_runs[0].steps == 3 * STEPS


def test_a_file_given_twice_is_read_once(folder: Path) -> None:
    path = folder / "bench.json"
    assert len(read_inputs([path, bench_document(), path]).benches) == 2


def test_files_of_one_name_are_told_apart(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "bench.json"
    other.write_text(json.dumps(bench_document()))
    names = [run.name for run in read_inputs([folder / "bench.json", other]).benches]
    assert names == [f"{folder.name}/bench.json", f"{tmp_path.name}/bench.json"]


def test_profile_and_journal_agree_on_models(folder: Path) -> None:
    inputs = read_inputs([folder / "run.jsonl", folder / "learned.json"])
    served = inputs.last_runs[0].counts()["chat", "eagle"]
    learned = inputs.profiles[0].counts["chat", "eagle"]
    assert served.trials[:2] == pytest.approx(learned.trials[:2])
    assert served.successes[:2] == pytest.approx(learned.successes[:2])


def test_the_cost_model_of_a_profile_tells_its_steps(folder: Path) -> None:
    (profile,) = read_inputs([folder / "learned.json"]).profiles
    assert profile.cost is not None
    assert {cell.is_speculative for cell in profile.cost.cells} == {True, False}
    for cell in profile.cost.cells:
        if cell.steps >= 10:
            assert cell.predicted_seconds == pytest.approx(cell.seconds, rel=0.05)
            assert cell.tokens >= cell.requests - 1e-6


@pytest.mark.parametrize(
    "content,message",
    [
        pytest.param("", "is empty", id="empty"),
        pytest.param("\n", "line 2, column 1: is not JSON", id="blank"),
        pytest.param('{"a": 1,\n "b": }', "line 2, column 7: is not JSON", id="broken"),
        pytest.param("[1, 2]", "holds a JSON list", id="list"),
        pytest.param('{"a": 1}', "of no known kind (its keys: a)", id="unknown"),
        pytest.param('["s", 1]\n', "line 1 cannot be read", id="journal without a header"),
        pytest.param(json.dumps(HEADER) + "\n", "holds no step", id="journal without steps"),
        pytest.param(json.dumps(HEADER) + "\nnonsense\n", "line 2 cannot be read", id="bad line"),
        pytest.param(
            json.dumps(HEADER) + "\n" + json.dumps([*STEP, [[7, 0, 1, 1, 1, 2, 1]], 0]) + "\n",
            "names proposer 7",
            id="unknown proposer",
        ),
        pytest.param(
            json.dumps(HEADER)
            + "\n"
            + json.dumps([*STEP[:2], float("inf"), *STEP[3:], [], 0])
            + "\n",
            "not finite",
            id="endless",
        ),
        pytest.param(json.dumps({**HEADER, "journal": 9}) + "\n", "version 1", id="version"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "input"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        read_inputs([path])
    assert message in str(caught.value)
    assert "input" in str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        read_inputs([tmp_path])
    with pytest.raises(InputError, match="No such file"):
        read_inputs([tmp_path / "missing"])
    with pytest.raises(InputError, match="nothing to report on"):
        read_inputs([])
    (tmp_path / "binary").write_bytes(b"\xff\xfe{")
    with pytest.raises(InputError, match="not UTF-8"):
        read_inputs([tmp_path / "binary"])


def test_wrong_keys_are_named(tmp_path: Path) -> None:
    document = bench_document()
    document["phases"][1]["arms"]["adaptive"]["tokens"] = "many"
    del document["settings"]["target"]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError) as caught:
        read_inputs([path])
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "phases.1.arms.adaptive.tokens" in message
    assert "found many" in message
    assert "settings.target" in message
    broken = replay_document()
    broken["best_fixed"]["1"]["speedup_vs_plain"] = None
    with pytest.raises(InputError, match=r"best_fixed\.1\.speedup_vs_plain"):
        read_inputs([broken])


def test_profiles_of_other_layouts(folder: Path, tmp_path: Path) -> None:
    text = (folder / "learned.json").read_text()
    path = tmp_path / "p.json"
    path.write_text(text.replace("acceptance/1", "acceptance/9"))
    with pytest.raises(ProfileError, match="acceptance/9"):
        read_inputs([path])
    document = json.loads(text)
    for workload in document["workloads"].values():
        for proposer in workload["proposers"].values():
            proposer["successes"] = proposer["trials"] = [[1.0]]
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match="8 positions are expected"):
        read_inputs([path])
