from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autospec.errors import CorruptProfile, ProfileError, ProfileMismatch
from autospec.profile.file import load_profile, save_delta, save_profile, warm_start
from autospec.profile.json_form import parse_profile, profile_json
from autospec.profile.learned import (
    SECONDS_PER_DAY,
    Identity,
    Profile,
    Statistics,
    WorkloadProfile,
    merge,
)
from autospec.profile.tuned import KCap, ProposerSettings, Provenance, Tuning
from autospec.records import EngineInfo, ProposerInfo

IDENTITY = Identity("llama", ("ngram", "suffix"), "embedded", "1", "cpu", "bfloat16")
LAYOUTS = ("acceptance/1", "cost/1")
NOW = 1_800_000_000.0


def counts(successes: float, trials: float) -> Statistics:
    return {"successes": np.full((2, 3), successes), "trials": np.full((2, 3), trials)}


def profile(
    successes: float = 1.0, label: str = "chat", proposer: str = "ngram", updated: float = NOW
) -> Profile:
    return Profile(
        identity=IDENTITY,
        acceptance_layout=LAYOUTS[0],
        cost_layout=LAYOUTS[1],
        workloads={label: WorkloadProfile(2.0, {proposer: counts(successes, 2 * successes)})},
        cost={"step": {"gram": np.full((2, 2), successes), "moment": np.array([successes, -1.5])}},
        provenance=("test",),
        updated=updated,
    )


def assert_same(first: Profile, second: Profile) -> None:
    assert replace(first, workloads={}, cost={}) == replace(second, workloads={}, cost={})
    assert set(first.workloads) == set(second.workloads)
    for label, workload in first.workloads.items():
        assert workload.requests == pytest.approx(second.workloads[label].requests, abs=1e-3)
        assert_groups(workload.proposers, second.workloads[label].proposers, 1e-3)
    assert_groups(first.cost, second.cost, 1e-9)


def assert_groups(
    first: Mapping[str, Statistics], second: Mapping[str, Statistics], tolerance: float
) -> None:
    assert set(first) == set(second)
    for name, statistics in first.items():
        assert set(statistics) == set(second[name])
        for key, array in statistics.items():
            np.testing.assert_allclose(array, second[name][key], rtol=1e-9, atol=tolerance)


NUMBERS = st.floats(0, 1e6, allow_nan=False)
PROFILES = st.builds(
    profile,
    NUMBERS,
    st.sampled_from(["chat", "code", "rag"]),
    st.sampled_from(["ngram", "suffix"]),
    st.floats(NOW, NOW + 90 * SECONDS_PER_DAY),
)
HALF_LIVES = st.sampled_from([None, 7.0, 30.0])


@given(PROFILES)
def test_json_round_trip(each: Profile) -> None:
    again = parse_profile(profile_json(each))
    assert_same(replace(each, updated=round(each.updated, 3)), again)


@given(PROFILES, PROFILES, HALF_LIVES)
def test_merge_is_commutative(first: Profile, second: Profile, half_life: float | None) -> None:
    assert_same(merge(first, second, half_life), merge(second, first, half_life))


@given(PROFILES, PROFILES, PROFILES, HALF_LIVES)
def test_merge_is_associative(
    first: Profile, second: Profile, third: Profile, half_life: float | None
) -> None:
    left = merge(merge(first, second, half_life), third, half_life)
    right = merge(first, merge(second, third, half_life), half_life)
    assert_same(left, right)


def test_merge_adds() -> None:
    merged = merge(profile(1.0), profile(2.0))
    chat = merged.workloads["chat"]
    assert chat.requests == 4.0
    np.testing.assert_array_equal(chat.proposers["ngram"]["successes"], np.full((2, 3), 3.0))
    np.testing.assert_array_equal(merged.cost["step"]["moment"], [3.0, -3.0])


def test_merge_keeps_what_only_one_has() -> None:
    merged = merge(profile(1.0, "chat", "ngram"), profile(2.0, "code", "suffix"))
    assert set(merged.workloads) == {"chat", "code"}
    assert set(merged.workloads["code"].proposers) == {"suffix"}


def test_merge_does_not_touch_its_inputs() -> None:
    first, second = profile(1.0), profile(2.0)
    merge(first, second, 30.0)
    assert_same(first, profile(1.0))
    assert_same(second, profile(2.0))


@pytest.mark.parametrize(
    "field,value",
    [
        ("target", "qwen"),
        ("proposers", ("ngram",)),
        ("engine", "vllm"),
        ("version", "2"),
        ("device", "cuda"),
        ("dtype", "float32"),
    ],
)
def test_another_identity_is_refused_by_field(field: str, value: Any) -> None:
    changes: dict[str, Any] = {field: value}
    other = replace(profile(), identity=replace(IDENTITY, **changes))
    shown = "ngram" if field == "proposers" else value
    with pytest.raises(ProfileMismatch, match=f"{field} is .*{shown}.*expected"):
        merge(profile(), other)


@pytest.mark.parametrize("field", ["acceptance_layout", "cost_layout"])
def test_another_layout_is_refused(field: str) -> None:
    changes: dict[str, Any] = {field: "other/2"}
    with pytest.raises(ProfileMismatch, match=f"{field} is 'other/2', expected"):
        merge(profile(), replace(profile(), **changes))


def test_another_shape_is_refused() -> None:
    other = replace(profile(), cost={"step": {"gram": np.eye(3), "moment": np.zeros(2)}})
    with pytest.raises(ProfileMismatch, match=r"cost\.step\.gram has shape \(3, 3\), expected"):
        merge(profile(), other)
    other = replace(profile(), cost={"step": {"gram": np.full((2, 2), 1.0)}})
    with pytest.raises(ProfileMismatch, match=r"cost\.step has gram, expected gram, moment"):
        merge(profile(), other)


def test_identity_of_an_engine_ignores_the_order_of_proposers() -> None:
    engine = EngineInfo("llama", "embedded", "1", "cpu", "bfloat16")
    infos = (ProposerInfo("suffix", "lookup", 16), ProposerInfo("ngram", "lookup", 8))
    assert Identity.of(engine, infos) == IDENTITY


def test_statistics_halve_with_age() -> None:
    faded = profile(8.0).faded(NOW + 60 * SECONDS_PER_DAY, half_life_days=30.0)
    assert faded.workloads["chat"].requests == 0.5
    np.testing.assert_array_equal(
        faded.workloads["chat"].proposers["ngram"]["trials"], np.full((2, 3), 4.0)
    )
    np.testing.assert_array_equal(faded.cost["step"]["moment"], [2.0, -0.375])
    assert faded.updated == NOW + 60 * SECONDS_PER_DAY


def test_a_clock_that_went_back_changes_nothing() -> None:
    assert_same(profile(8.0).faded(NOW - 1e6, half_life_days=1.0), profile(8.0))


def test_files_stay_small() -> None:
    rng = np.random.default_rng(0)
    statistics = {"successes": rng.random((8, 16)) * 100, "trials": rng.random((8, 16)) * 100}
    each = replace(
        profile(), workloads={f"w{i}": WorkloadProfile(1.0, {"a": statistics}) for i in range(20)}
    )
    assert len(profile_json(each)) < 20 * 2 * 8 * 16 * 9


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_bad_statistics_are_never_written(tmp_path: Path, wrong: float) -> None:
    path = tmp_path / "p.json"
    save_profile(path, profile())
    before = path.read_bytes()
    with pytest.raises(ProfileError, match=r"workloads\.chat\.ngram\.successes must be finite"):
        save_delta(path, profile(wrong))
    assert path.read_bytes() == before


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "p.json"
    save_profile(path, profile(3.0))
    assert_same(load_profile(path), profile(3.0))
    assert [each.name for each in path.parent.iterdir()] == ["p.json"]


def test_deltas_add_up(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_delta(path, profile(1.0))
    held = save_delta(path, profile(2.0))
    assert_same(load_profile(path), held)
    assert held.workloads["chat"].proposers["ngram"]["successes"][0, 0] == 3.0


def test_what_was_saved_fades_before_a_delta_is_added(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_delta(path, profile(4.0), half_life_days=30.0)
    later = profile(1.0, updated=NOW + 30 * SECONDS_PER_DAY)
    held = save_delta(path, later, half_life_days=30.0)
    assert held.workloads["chat"].proposers["ngram"]["successes"][0, 0] == 3.0


def save_many(path: str, times: int) -> None:
    for _ in range(times):
        save_delta(Path(path), profile(1.0))


def test_small_counts_fade_however_often_they_are_saved() -> None:
    saved, days = profile(4.0), 2
    for number in range(1, days * 288 + 1):
        nothing = profile(0.0, updated=NOW + 300.0 * number)
        saved = parse_profile(profile_json(merge(saved, nothing, half_life_days=30.0)))
    successes = saved.workloads["chat"].proposers["ngram"]["successes"]
    np.testing.assert_allclose(successes, 4.0 * 0.5 ** (days / 30.0), rtol=1e-3)


def test_processes_that_save_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=save_many, args=(str(path), 10)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert load_profile(path).workloads["chat"].requests == 60.0


def test_a_lock_that_is_held_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    import fcntl

    path = tmp_path / "p.json"
    with (tmp_path / ".p.json.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ProfileError, match="held by another process"):
            save_delta(path, profile(), lock_seconds=0.05)
    assert not path.exists()


def test_a_profile_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(path, replace(profile(), identity=replace(IDENTITY, device="cuda")))
    before = path.read_bytes()
    with pytest.raises(ProfileMismatch, match="device is 'cuda', expected 'cpu'"):
        save_delta(path, profile())
    assert path.read_bytes() == before


def damaged(change: Any) -> str:
    document = json.loads(profile_json(profile()))
    change(document)
    return json.dumps(document)


def put(document: Any, place: tuple[str, ...], value: Any) -> None:
    for part in place[:-1]:
        document = document[part]
    document[place[-1]] = value


@pytest.mark.parametrize(
    "place,value,message",
    [
        (("identity", "target"), 3, "identity.target must be text, found 3"),
        (("identity",), None, "identity must be a mapping"),
        (("identity", "proposers"), ["a", 1], "identity.proposers must be a list of texts"),
        (("updated",), "now", "updated must be a number"),
        (("updated",), -1, "updated must be finite and not negative"),
        (("workloads", "chat", "requests"), True, "workloads.chat.requests must be a number"),
        (("cost",), [], "cost must be a mapping"),
        (("cost", "step", "gram"), [[1], [1, 2]], "nested lists of equal length"),
        (("cost", "step", "gram"), [["1"]], "nested lists of numbers"),
        (("cost", "step", "gram"), [1e400], "cost.step.gram must be finite, found inf"),
        (
            ("workloads", "chat", "proposers", "ngram", "trials"),
            [-1],
            "workloads.chat.ngram.trials must be finite and not negative, found -1",
        ),
    ],
)
def test_damage_is_named(place: tuple[str, ...], value: Any, message: str) -> None:
    text = damaged(lambda document: put(document, place, value))
    with pytest.raises(CorruptProfile) as caught:
        parse_profile(text, source="p.json")
    assert str(caught.value).startswith("p.json: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"format": "other"}'])
def test_a_corrupt_file_is_kept_aside_and_the_run_starts_cold(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert warm_start(path, IDENTITY, *LAYOUTS) is None
    assert not path.exists()
    assert (tmp_path / "p.json.bad").read_bytes() == content
    assert "starting cold" in caplog.text
    path.write_bytes(content)
    assert warm_start(path, IDENTITY, *LAYOUTS) is None
    assert (tmp_path / "p.json.bad.1").read_bytes() == content


def test_a_file_that_another_process_puts_right_is_not_kept_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.json"
    path.write_text("{")

    @contextlib.contextmanager
    def after_another(place: Path, seconds: float) -> Iterator[None]:
        save_profile(place, profile(5.0))
        yield

    monkeypatch.setattr("autospec.profile.file._locked", after_another)
    loaded = warm_start(path, IDENTITY, *LAYOUTS)
    assert loaded is not None
    assert_same(loaded, profile(5.0))
    assert [each.name for each in tmp_path.iterdir()] == ["p.json"]


def test_saving_over_a_corrupt_file_keeps_it_aside(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("{")
    save_delta(path, profile(1.0))
    assert_same(load_profile(path), profile(1.0))
    assert (tmp_path / "p.json.bad").read_text() == "{"


def test_a_mismatch_starts_cold_and_leaves_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "p.json"
    save_profile(path, profile())
    with caplog.at_level(logging.WARNING):
        assert warm_start(path, replace(IDENTITY, dtype="float32"), *LAYOUTS) is None
    assert path.exists()
    assert "dtype is 'bfloat16', expected 'float32'" in caplog.text


def test_a_newer_version_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(damaged(lambda document: document.update(version=3)))
    with pytest.raises(ProfileError, match="version is 3, this AutoSpec reads versions 1 and 2"):
        save_delta(path, profile())
    assert warm_start(path, IDENTITY, *LAYOUTS) is None
    assert path.exists()


def test_no_file_yet_is_a_silent_cold_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert warm_start(tmp_path / "none.json", IDENTITY, *LAYOUTS) is None
    assert caplog.text == ""


def test_a_warm_start(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(path, profile(5.0))
    loaded = warm_start(path, IDENTITY, *LAYOUTS)
    assert loaded is not None
    assert_same(loaded, profile(5.0))


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be"):
        save_delta(tmp_path / "file" / "p.json", profile())
    with pytest.raises(ProfileError, match="cannot be written"):
        save_profile(tmp_path / "file" / "p.json", profile())


def test_a_pipe_is_neither_read_nor_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "p.json"
    os.mkfifo(path)
    assert warm_start(path, IDENTITY, *LAYOUTS) is None
    assert "is a device or a pipe" in caplog.text
    for save in (save_delta, save_profile):
        with pytest.raises(ProfileError, match="is a device or a pipe; a profile needs a file"):
            save(path, profile())
    assert path.is_fifo()


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_cleanly(content: bytes) -> None:
    with pytest.raises(ProfileError):
        parse_profile(content.decode("latin-1"))


def tuning(date: str = "2026-11-29T00:00:00+00:00") -> Tuning:
    return Tuning(
        proposers={"ngram": ProposerSettings(kind="lookup", max_k=8, min_match=2, max_match=4)},
        caps=(KCap(load=9, k=2), KCap(load=3, k=4)),
        kept=True,
        workloads={},
        loads=(),
        provenance=Provenance(
            command="autospec tune",
            date=date,
            engine="embedded",
            device="cpu",
            versions={"autospec": "1"},
            prompts="p.jsonl",
            prompts_digest="0" * 64,
            seed=0,
        ),
    )


def test_a_tuning_is_saved_and_survives_what_is_learned_later(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(path, replace(profile(), tuned=tuning()))
    assert load_profile(path).tuned == tuning()
    assert save_delta(path, profile(3.0)).tuned == tuning()
    assert load_profile(path).tuned == tuning()


def test_of_two_tunings_the_later_is_kept() -> None:
    old, new = tuning("2026-01-01"), tuning("2026-11-29")
    for one, other in ((old, new), (new, old)):
        merged = merge(replace(profile(), tuned=one), replace(profile(), tuned=other))
        assert merged.tuned == new


def test_version_1_has_no_tuning_and_loads() -> None:
    document = json.loads(profile_json(profile()))
    document["version"] = 1
    assert parse_profile(json.dumps(document)).tuned is None


def test_a_wrong_tuning_is_named_by_its_key() -> None:
    document = json.loads(profile_json(replace(profile(), tuned=tuning())))
    document["tuned"]["proposers"]["ngram"]["max_k"] = 99
    with pytest.raises(CorruptProfile, match=r"tuned\.proposers\.ngram\.max_k: .*64, found 99"):
        parse_profile(json.dumps(document), source="p.json")
