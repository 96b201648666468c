"""What is printed for each engine, checked against that engine's own rules.

vLLM's are checked by vLLM itself in ``test_vllm_config.py``; those of the others are written down
here as JSON Schema, with where they were read.
"""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from autospec.cli.app import app
from autospec.errors import ExportError
from autospec.export import EXPORTERS
from autospec.export.plan import Rendered, Wish
from autospec.outlook import outlook
from autospec.profile.file import save_profile
from autospec.profile.learned import Profile
from tests.export.made_profiles import rates, served_profile, tuned_profile

SGLANG_ADAPTIVE = {
    # sglang srt/speculative/adaptive_spec_params.py, _load_adaptive_config: keys that are whole
    # numbers are batch sizes; candidate_steps is a non-empty list of whole numbers from 0 on; at
    # least one batch size. adaptive_step_router.py: a key holds up to the next one (lower bound).
    "type": "object",
    "required": ["1"],
    "minProperties": 1,
    "propertyNames": {"pattern": "^[1-9][0-9]*$"},
    "additionalProperties": {
        "type": "object",
        "required": ["candidate_steps"],
        "additionalProperties": False,
        "properties": {
            "candidate_steps": {
                "type": "array",
                "minItems": 1,
                "items": {"type": "integer", "minimum": 0},
            }
        },
    },
}

TENSORRT_LLM = {
    # tensorrt_llm/llmapi/llm_args.py, DecodingBaseConfig and subclasses: schedule keys from 1 on,
    # lengths from 0 on, max_concurrency above 0 and never beside a schedule.
    "type": "object",
    "required": ["decoding_type", "max_draft_len"],
    "additionalProperties": False,
    "properties": {
        "decoding_type": {"enum": ["NGram", "SA", "Draft_Target", "Eagle3", "MTP"]},
        "max_draft_len": {"type": "integer", "minimum": 1},
        "max_concurrency": {"type": "integer", "minimum": 1},
        "draft_len_schedule": {
            "type": "object",
            "minProperties": 1,
            "propertyNames": {"pattern": "^[1-9][0-9]*$"},
            "additionalProperties": {"type": "integer", "minimum": 0},
        },
        "speculative_model": {"type": "string"},
        "max_matching_ngram_size": {"type": "integer", "minimum": 1},
        "is_use_oldest": {"type": "boolean"},
        "is_public_pool": {"type": "boolean"},
    },
    "not": {"required": ["max_concurrency", "draft_len_schedule"]},
    "allOf": [
        {
            "if": {"properties": {"decoding_type": {"enum": ["Draft_Target", "Eagle3"]}}},
            "then": {"required": ["speculative_model"]},
        }
    ],
}

LLAMA_CPP_NEW = {
    # llama.cpp common/arg.cpp since b8955 (pull request 22397): --spec-type names, and numbers.
    "type": "object",
    "required": ["--spec-type"],
    "additionalProperties": False,
    "properties": {
        "--spec-type": {"enum": ["ngram-simple", "draft-simple", "draft-eagle3", "draft-mtp"]},
        "--spec-ngram-simple-size-n": {"type": "string", "pattern": "^[1-9][0-9]*$"},
        "--spec-ngram-simple-size-m": {"type": "string", "pattern": "^[1-9][0-9]*$"},
        "--spec-draft-model": {"type": "string"},
        "--spec-draft-n-max": {"type": "string", "pattern": "^[1-9][0-9]*$"},
        "--spec-draft-n-min": {"type": "string", "pattern": "^[0-9]+$"},
        "--spec-draft-p-min": {"type": "string", "pattern": r"^[01](\.[0-9]+)?$"},
    },
}

LLAMA_CPP_OLD = {
    # llama.cpp docs/speculative.md before that pull request.
    "type": "object",
    "required": ["--draft-max", "--draft-min"],
    "additionalProperties": False,
    "properties": {
        "--draft-max": {"type": "string", "pattern": "^[1-9][0-9]*$"},
        "--draft-min": {"type": "string", "pattern": "^[0-9]+$"},
        "--draft-p-min": {"type": "string", "pattern": r"^[01](\.[0-9]+)?$"},
        "--model-draft": {"type": "string"},
        "--spec-type": {"const": "ngram-simple"},
        "--spec-ngram-size-n": {"type": "string", "pattern": "^[1-9][0-9]*$"},
        "--spec-ngram-size-m": {"type": "string", "pattern": "^[1-9][0-9]*$"},
    },
}


def code_profile(proposer: str = "ngram") -> Profile:
    """Repetitive text: long drafts pay at small batches, none at large ones."""
    share = 0.9 if proposer in ("ngram", "suffix") else 1.0
    return tuned_profile({"code": {proposer: rates(share, 0.85, 6)}})


def rendered(engine: str, profile: Profile, **wish: Any) -> Rendered:
    return EXPORTERS[engine](outlook(profile), Wish(**wish))


def pairs(flags: tuple[str, ...]) -> dict[str, str]:
    """Flags and their values; a flag without one has none."""
    found: dict[str, str] = {}
    for index, flag in enumerate(flags):
        if flag.startswith("--"):
            value = flags[index + 1] if index + 1 < len(flags) else "--"
            found[flag] = "" if value.startswith("--") else value
    return found


# vLLM --------------------------------------------------------------------------------------------


def test_vllm_gets_a_table_from_batch_size_1_on_that_ends_off() -> None:
    config = json.loads(pairs(rendered("vllm", code_profile()).flags)["--speculative-config"])
    table = config["num_speculative_tokens_per_batch_size"]
    assert table[0][0] == 1
    for one, other in itertools.pairwise(table):
        assert other[0] == one[1] + 1
    assert table[-1][2] == 0  # vLLM carries the last number on to all larger batches
    assert config["num_speculative_tokens"] == max(k for _, _, k in table) >= 4
    assert (config["prompt_lookup_min"], config["prompt_lookup_max"]) == (3, 5)


def test_vllm_suffix_has_one_k_since_it_must_have_the_configured_length() -> None:
    found = rendered("vllm", code_profile("suffix"))
    config = json.loads(found.flags[1])
    assert "num_speculative_tokens_per_batch_size" not in config
    assert config["method"] == "suffix"
    assert config["suffix_decoding_max_tree_depth"] == 32 + config["num_speculative_tokens"]
    assert config["suffix_decoding_max_cached_requests"] == 0
    assert any("cannot be switched off" in note for note in found.notes)


def test_vllm_needs_the_model_that_drafts() -> None:
    with pytest.raises(ExportError, match="does not hold: give its path or name with --draft-mod"):
        rendered("vllm", code_profile("eagle3"))
    config = json.loads(rendered("vllm", code_profile("eagle3"), draft_model="/head").flags[1])
    assert (config["method"], config["model"]) == ("eagle3", "/head")


# SGLang ------------------------------------------------------------------------------------------


def test_sglang_eagle_adapts_by_batch_size() -> None:
    found = rendered("sglang", code_profile("eagle3"), draft_model="/head", version="0.5.23")
    flags = pairs(found.flags)
    assert found.file_text is not None
    adaptive = json.loads(found.file_text)
    jsonschema.validate(adaptive, SGLANG_ADAPTIVE)
    union = {step for entry in adaptive.values() for step in entry["candidate_steps"]}
    assert int(flags["--speculative-num-steps"]) in union
    assert max(union) == int(flags["--speculative-num-steps"])
    assert flags["--speculative-eagle-topk"] == "1"
    steps = int(flags["--speculative-num-steps"])
    assert int(flags["--speculative-num-draft-tokens"]) == steps + 1
    assert flags["--speculative-adaptive-config"] == found.file_name
    last = max(adaptive, key=int)
    assert adaptive[last]["candidate_steps"] == [0]


@pytest.mark.parametrize(
    "proposer,version,algorithm",
    [
        ("eagle3", "0.5.12", "EAGLE3"),
        ("ngram", None, "NGRAM"),
        ("draft_model", None, "STANDALONE"),
        ("mtp", None, "NEXTN"),
    ],
)
def test_sglang_without_a_schedule_has_one_k(
    proposer: str, version: str | None, algorithm: str
) -> None:
    found = rendered("sglang", code_profile(proposer), draft_model="/m", version=version)
    flags = pairs(found.flags)
    assert flags["--speculative-algorithm"] == algorithm
    assert "--speculative-adaptive" not in flags
    assert found.file_text is None
    assert int(flags["--speculative-num-draft-tokens"]) >= 2
    assert any("meant for up to" in note for note in found.notes)


# TensorRT-LLM ------------------------------------------------------------------------------------


def tensorrt_config(version: str | None, proposer: str = "eagle3") -> dict[str, Any]:
    found = rendered("tensorrt-llm", code_profile(proposer), draft_model="/head", version=version)
    assert found.file_text is not None
    config: dict[str, Any] = yaml.safe_load(found.file_text)["speculative_config"]
    as_json = json.loads(json.dumps(config))
    jsonschema.validate(as_json, TENSORRT_LLM)
    return config


def test_tensorrt_llm_counts_in_lower_bounds_before_and_upper_bounds_since_10860() -> None:
    old, new = tensorrt_config("1.2.0"), tensorrt_config("1.3.0rc8")
    lower, upper = old["draft_len_schedule"], new["draft_len_schedule"]
    assert min(lower) == 1
    assert lower[1] == old["max_draft_len"]
    assert upper[min(upper)] == new["max_draft_len"]
    assert all(length <= new["max_draft_len"] for length in upper.values())
    assert 0 not in upper.values()  # above the largest key it is off anyway
    assert lower[max(lower)] == 0
    for batch in range(1, max(lower) + 4):
        by_lower = lower[max(key for key in lower if key <= batch)]
        keys = [key for key in upper if key >= batch]
        by_upper = upper[min(keys)] if keys else 0
        assert by_lower == by_upper


def test_tensorrt_llm_one_k_and_off_is_max_concurrency() -> None:
    profile = tuned_profile({"code": {"mtp": rates(1.0, 0.7, 1)}})
    found = rendered("tensorrt-llm", profile)
    assert found.file_text is not None
    config = yaml.safe_load(found.file_text)["speculative_config"]
    jsonschema.validate(config, TENSORRT_LLM)
    assert config["max_draft_len"] == 1
    assert "draft_len_schedule" not in config
    assert config["max_concurrency"] > 1


def test_tensorrt_llm_ngram() -> None:
    config = tensorrt_config(None, "ngram")
    assert config["decoding_type"] == "NGram"
    assert config["max_matching_ngram_size"] == 5
    assert config["is_use_oldest"] is False


def test_tensorrt_llm_has_a_suffix_automaton_only_lately() -> None:
    assert tensorrt_config("1.3.0", "suffix")["decoding_type"] == "SA"
    with pytest.raises(ExportError, match="TensorRT-LLM has none of the profile's proposers"):
        tensorrt_config("1.2.1", "suffix")


# llama.cpp ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("proposer", ["ngram", "suffix", "draft_model", "eagle3", "mtp"])
def test_llama_cpp_since_the_flags_were_renamed(proposer: str) -> None:
    found = rendered("llama.cpp", code_profile(proposer), draft_model="/d.gguf", version="b8955")
    jsonschema.validate(pairs(found.flags), LLAMA_CPP_NEW)


@pytest.mark.parametrize("proposer", ["ngram", "draft_model"])
def test_llama_cpp_before(proposer: str) -> None:
    found = rendered("llama.cpp", code_profile(proposer), draft_model="/d.gguf", version="b8000")
    flags = pairs(found.flags)
    jsonschema.validate(flags, LLAMA_CPP_OLD)
    assert flags.get("--draft-p-min", "0.2") == "0.2"


# Errors and the command --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engine,version,message",
    [
        ("vllm", "0.20", "vLLM 0.20 is not known; known are 0.32 and later"),
        ("vllm", "newest", "'newest' is no version of vLLM; one looks like 0.32.0"),
        ("sglang", "0.4.9", "known are 0.5.0 and later"),
        ("tensorrt-llm", "0.18", "known are 1.2.0 and later"),
        ("llama.cpp", "b100", "known are b7900 and later"),
        ("llama.cpp", "1.2", "is no llama.cpp build; one looks like b"),
    ],
)
def test_unknown_versions_say_which_are_known(engine: str, version: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        rendered(engine, code_profile(), version=version)


@pytest.mark.parametrize("engine", list(EXPORTERS))
def test_where_nothing_pays_nothing_is_exported(engine: str) -> None:
    profile = tuned_profile({"poem": {"ngram": rates(0.5, 0.001, 6)}})
    with pytest.raises(ExportError, match="plain decoding is expected to be best at every batch"):
        rendered(engine, profile)


def test_a_proposer_can_be_asked_for() -> None:
    profile = tuned_profile({"code": {"ngram": rates(0.9, 0.9, 6), "suffix": rates(0.5, 0.5, 6)}})
    assert json.loads(rendered("vllm", profile).flags[1])["method"] == "ngram"
    config = json.loads(rendered("vllm", profile, proposer="suffix").flags[1])
    assert config["method"] == "suffix"
    with pytest.raises(ExportError, match="--proposer mtp: the profile does not know it"):
        rendered("vllm", profile, proposer="mtp")


def test_an_engine_without_the_proposer_says_what_it_takes() -> None:
    profile = served_profile(["oracle"], 0.9)
    with pytest.raises(ExportError, match=r"proposers \(oracle\); it takes dra"):
        rendered("sglang", profile)
    with pytest.raises(ExportError, match=r"--proposer oracle: llama\.cpp has none such; it takes"):
        rendered("llama.cpp", profile, proposer="oracle")


def test_max_batch_bounds_the_table() -> None:
    config = json.loads(rendered("vllm", code_profile(), max_batch=4).flags[1])
    assert config["num_speculative_tokens_per_batch_size"][-1] == [5, 5, 0]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["export", *arguments])


def test_the_command_prints_one_line_that_a_shell_takes(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(path, code_profile())
    result = run("--profile", str(path), "--to", "vllm", "--workload", "code")
    assert result.exit_code == 0
    words = shlex.split(result.stdout)
    assert words[0] == "--speculative-config"
    assert json.loads(words[1])["method"] == "ngram"
    assert "running requests" in result.stderr


def test_the_command_writes_the_engines_file(tmp_path: Path) -> None:
    path, out = tmp_path / "p.json", tmp_path / "spec.yaml"
    save_profile(path, code_profile("mtp"))
    result = run("--profile", str(path), "--to", "tensorrt-llm", "-o", str(out))
    assert result.exit_code == 0
    assert shlex.split(result.stdout) == ["--config", str(out)]
    assert yaml.safe_load(out.read_text())["speculative_config"]["decoding_type"] == "MTP"


def test_the_command_names_the_engines_there_are(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(path, code_profile())
    result = run("--profile", str(path), "--to", "vlm")
    assert isinstance(result.exception, ExportError)
    assert "did you mean 'vllm'?" in str(result.exception)
