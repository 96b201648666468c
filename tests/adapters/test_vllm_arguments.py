"""Options, labels, graphs and arguments: what needs no vLLM."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from autospec.adapters.vllm.arguments import SCHEDULER_CLS, configure
from autospec.adapters.vllm.graphs import candidate_ks, captured_k, named_ks, naming_table
from autospec.adapters.vllm.labels import RequestLabels, read_labels
from autospec.adapters.vllm.modes import Mode, drafting_of
from autospec.adapters.vllm.options import parse_options
from autospec.adapters.vllm.versions import TESTED_TEXT, is_tested
from autospec.cli.app import app
from autospec.errors import ConfigError, EngineError


def test_labels_in_process_and_over_http() -> None:
    labels, mistakes = read_labels({"autospec": {"workload": "chat", "max_k": 3}})
    assert labels == RequestLabels(workload="chat", max_k=3)
    assert not mistakes
    flat = {"autospec_workload": "rag", "autospec_tpot_target_ms": 25, "other": "x"}
    assert read_labels(flat) == (RequestLabels(workload="rag", tpot_target_seconds=0.025), ())


@pytest.mark.parametrize(
    "given",
    [
        {"autospec": {"speculate": False}},
        {"autospec_speculate": 0},
        {"autospec_max_k": 0},
        {"autospec": {"max_k": 5}, "autospec_speculate": 0.0},
    ],
)
def test_opting_out(given: dict[str, object]) -> None:
    assert read_labels(given) == (RequestLabels(max_k=0), ())


@pytest.mark.parametrize(
    "given, said",
    [
        ({"autospec": "chat"}, "must be a mapping"),
        ({"autospec_wokload": "chat"}, "unknown key 'wokload'"),
        ({"autospec": {"workload": 3}}, "workload must be text"),
        ({"autospec_max_k": -1}, "max_k must be a number"),
    ],
)
def test_bad_labels_are_named_and_ignored(given: dict[str, object], said: str) -> None:
    labels, mistakes = read_labels(given)
    assert labels == RequestLabels()
    assert said in mistakes[0]


def test_no_labels() -> None:
    assert read_labels(None) == (RequestLabels(), ())


def test_options_name_every_mistake() -> None:
    assert parse_options({"other": 1}).policy == "default"
    with pytest.raises(ConfigError, match=r"autospec.lookups.0.*autospec.polcy"):
        parse_options({"autospec": {"polcy": "x", "lookups": ["trie"]}})
    with pytest.raises(ConfigError, match="must be a mapping"):
        parse_options({"autospec": "default"})


def test_option_paths_overrule_the_policy(tmp_path: Any) -> None:
    options = parse_options(
        {"autospec": {"profile": str(tmp_path / "p.json"), "save_every_seconds": 5}}
    )
    settings = options.settings()
    assert settings.profile.path == tmp_path / "p.json"
    assert settings.profile.save_every_seconds == 5
    assert settings.journal.path is None


def test_every_candidate_k_is_named_to_vllm() -> None:
    assert candidate_ks(5) == (0, 1, 2, 3, 4, 5)
    assert candidate_ks(7) == (0, 1, 2, 3, 4, 5, 6, 7)
    table = naming_table(candidate_ks(16), 256)
    assert named_ks(table) == candidate_ks(16)
    assert table[0][0] == 1
    assert table[-1][1] == 256
    assert [start for start, _, _ in table] == [1, *(end + 1 for _, end, _ in table[:-1])]
    with pytest.raises(ConfigError, match="needs 1 to 3 values"):
        naming_table([0, 1, 2, 3], 3)


def test_k_is_cut_to_a_captured_one() -> None:
    assert [captured_k(k, (0, 2, 5)) for k in range(7)] == [0, 0, 2, 2, 2, 5, 5]
    assert captured_k(1, (2, 5)) == 0
    assert captured_k(3, ()) == 3


def test_configure_is_a_function_wherever_it_is_taken_from() -> None:
    for _ in range(2):
        from autospec.adapters.vllm import configure as taken

        assert taken is configure


def test_configure_llm_arguments() -> None:
    given: dict[str, Any] = {
        "model": "m",
        "max_num_seqs": 64,
        "additional_config": {"other": 1},
    }
    found = configure(given, policy="latency", profile="p.json")
    assert found["model"] == "m"
    assert found["scheduler_cls"] == SCHEDULER_CLS
    assert found["speculative_config"]["method"] == "ngram"
    assert found["additional_config"] == {
        "other": 1,
        "autospec": {"policy": "latency", "profile": "p.json"},
    }
    assert "async_scheduling" not in found
    assert given == {"model": "m", "max_num_seqs": 64, "additional_config": {"other": 1}}


def test_configure_engine_args_names_ks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    given = SimpleNamespace(
        speculative_config={"method": "eagle3", "model": "e", "num_speculative_tokens": 3},
        additional_config={},
        scheduler_cls=None,
        data_parallel_size=1,
        max_num_seqs=8,
        enforce_eager=False,
    )
    found = configure(given)
    assert named_ks(found.speculative_config["num_speculative_tokens_per_batch_size"]) == (
        0,
        1,
        2,
        3,
    )
    assert "num_speculative_tokens_per_batch_size" not in given.speculative_config
    combined = configure(given, combine=True)
    assert combined.async_scheduling is False
    assert "num_speculative_tokens_per_batch_size" not in combined.speculative_config


@pytest.mark.parametrize(
    "given, said",
    [
        ({"data_parallel_size": 2}, "data_parallel_size is 2"),
        ({"scheduler_cls": "my.Scheduler"}, "scheduler_cls is already 'my.Scheduler'"),
    ],
)
def test_configure_refuses(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configure(given)
    with pytest.raises(ConfigError, match="unknown policy"):
        configure({}, policy="defualt")


def test_vllm_args_prints_a_command_line() -> None:
    config = {"method": "eagle3", "model": "e", "num_speculative_tokens": 3}
    found = CliRunner().invoke(
        app, ["vllm-args", "--speculative-config", json.dumps(config), "--combine"]
    )
    assert found.exit_code == 0, found.output
    assert found.stderr == "and set VLLM_USE_V2_MODEL_RUNNER=0 in the environment of vLLM\n"
    words = shlex.split(found.stdout)
    assert words[0].startswith("--")
    assert words[words.index("--scheduler-cls") + 1] == SCHEDULER_CLS
    assert json.loads(words[words.index("--speculative-config") + 1]) == config
    assert json.loads(words[words.index("--additional-config") + 1]) == {
        "autospec": {"policy": "default"}
    }
    assert "--no-async-scheduling" in words


def test_versions() -> None:
    assert is_tested(f"{TESTED_TEXT}.1+cpu")
    assert not is_tested("0.31.9")
    assert not is_tested("1.32.0")
    assert not is_tested("dev")


def config(**changes: Any) -> Any:
    """As much of a VllmConfig as modes are read from."""
    method = changes.get("method", "eagle")
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method=method, parallel_drafting=changes.get("parallel_drafting", False)
        ),
        num_speculative_tokens=4,
        scheduler_config=SimpleNamespace(async_scheduling=changes.get("asynchronous", False)),
        parallel_config=SimpleNamespace(
            data_parallel_size=changes.get("data_parallel", 1),
            pipeline_parallel_size=changes.get("pipeline", 1),
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            is_multimodal_model=changes.get("multimodal", False), uses_mrope=False
        ),
        use_v2_model_runner=changes.get("v2", False),
    )


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_lookup_methods_leave_drafting_to_autospec(method: str) -> None:
    drafting = drafting_of(config(method=method, pipeline=2), None)
    assert drafting.mode is Mode.NOW
    assert drafting.model is None


@pytest.mark.parametrize(
    "method, kind, needs_state",
    [
        ("draft_model", "sequential", True),
        ("eagle", "sequential", True),
        ("eagle3", "sequential", True),
        ("mtp", "sequential", True),
        ("medusa", "parallel", False),
        ("custom_class", "parallel", False),
    ],
)
def test_model_methods(method: str, kind: str, needs_state: bool) -> None:
    drafting = drafting_of(config(method=method), 3)
    assert drafting.mode is Mode.NOW
    assert drafting.model is not None
    assert (drafting.model.kind, drafting.model.max_k) == (kind, 3)
    assert drafting.model.needs_state is needs_state


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"asynchronous": True}, "asynchronous scheduling"),
        ({"v2": True}, "model runner V2"),
        ({"pipeline": 2}, "pipeline parallelism"),
        ({"method": "dflash"}, "method dflash"),
        ({"parallel_drafting": True}, "method eagle"),
        ({"multimodal": True}, "a multimodal target"),
    ],
)
def test_where_drafts_cannot_wait(changes: dict[str, Any], reason: str) -> None:
    drafting = drafting_of(config(**changes), None)
    assert (drafting.mode, drafting.reason) == (Mode.AHEAD, reason)


def test_data_parallelism_is_refused_with_the_reason() -> None:
    with pytest.raises(EngineError, match=r"data_parallel_size is 2.*scheduler of its own"):
        drafting_of(config(data_parallel=2), None)


def test_speculation_must_be_on() -> None:
    off = config()
    off.speculative_config = None
    with pytest.raises(EngineError, match="--speculative-config"):
        drafting_of(off, None)
