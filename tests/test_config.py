from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autospec.config import (
    Settings,
    installed_policies,
    load_settings,
    parse_settings,
    policies_folder,
    policy_names,
    settings_schema,
)
from autospec.errors import ConfigError


def mistakes(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_settings(text, source="my.yaml")
    return str(caught.value)


def test_the_least_file_has_every_default() -> None:
    settings = parse_settings("version: 1")
    assert settings.policy.model_dump()["name"] == "goodput"
    assert settings.max_k == 32
    assert settings.guard.margin == 0.02


def test_settings_are_frozen() -> None:
    settings = parse_settings("version: 1")
    with pytest.raises(ValueError, match="frozen"):
        settings.max_k = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["default", "latency", "throughput", "slo", "static", "off"])
def test_installed_policies_load_by_name(name: str) -> None:
    assert name in installed_policies()
    assert load_settings(name).version == 1


def test_every_installed_policy_starts_with_its_purpose() -> None:
    for name in installed_policies():
        first = (policies_folder() / f"{name}.yaml").read_text().splitlines()[0]
        assert first.startswith("# ")
        assert first.endswith(".")


def test_default_policy_file_names_every_key_with_its_default() -> None:
    text = (policies_folder() / "default.yaml").read_text()
    shown = yaml.safe_load(text)
    expected = json.loads(parse_settings("version: 1").model_dump_json())
    assert shown == expected


def test_settings_survive_json() -> None:
    settings = parse_settings(
        """
        version: 1
        policy: {name: schedule, table: [{max_requests: 4, proposer: suffix, k: 8}, {k: 0}]}
        proposers: [suffix]
        workloads: {rules: [{label: code-edit, tag: edit, temperature: {max: 0.3}}]}
        profile: {path: learned/p.json}
        """
    )
    again = Settings.model_validate_json(settings.model_dump_json(), strict=True)
    assert again == settings
    assert again.profile.path == Path("learned/p.json")


def test_off_is_a_policy_and_not_a_boolean() -> None:
    assert parse_settings("version: 1\npolicy: {name: off}").policy.model_dump()["name"] == "off"


@pytest.mark.parametrize("text,value", [("1e-3", 1e-3), ("0.5", 0.5), (".25", 0.25), ("0", 0.0)])
def test_numbers_as_people_write_them(text: str, value: float) -> None:
    assert parse_settings(f"version: 1\nguard: {{margin: {text}}}").guard.margin == value


def test_unknown_key_names_line_path_and_nearest() -> None:
    text = mistakes("version: 1\nguard:\n  enabled: true\n  margn: 0.1\n")
    assert text.startswith("my.yaml: 1 mistake\n")
    assert "line 4: guard.margn: unknown key; allowed: enabled, margin," in text
    assert "did you mean 'margin'?" in text


def test_unknown_top_level_key() -> None:
    assert "line 2: max-k: unknown key" in mistakes("version: 1\nmax-k: 4\n")


def test_unknown_policy_names_all_and_nearest() -> None:
    text = mistakes("version: 1\npolicy:\n  name: goodputt\n")
    assert "line 3: policy.name: unknown policy 'goodputt'" in text
    assert all(name in text for name in policy_names())
    assert "did you mean 'goodput'?" in text


def test_policy_without_a_name() -> None:
    assert "policy: needs a name; allowed: off," in mistakes("version: 1\npolicy: {k: 4}\n")


def test_option_of_another_policy() -> None:
    text = mistakes("version: 1\npolicy:\n  name: static\n  objective: latency\n")
    assert "line 4: policy.objective: unknown key; allowed: name, proposer, k" in text


def test_unknown_choice_names_the_choices() -> None:
    text = mistakes("version: 1\npolicy: {name: goodput, objective: latncy}\n")
    assert 'policy.objective: found "latncy"; allowed: throughput, latency, slo' in text
    assert "did you mean 'latency'?" in text


def test_mistake_inside_a_list() -> None:
    text = mistakes(
        "version: 1\npolicy:\n  name: schedule\n  table:\n    - {k: 2}\n    - {proposr: a}\n"
    )
    assert "line 6: policy.table[1].proposr: unknown key" in text
    assert "did you mean 'proposer'?" in text


@pytest.mark.parametrize(
    "line,message",
    [
        ("max_k: -1", "max_k: must be greater than or equal to 0, found -1"),
        ("max_k: yes", 'max_k: must be a valid integer, found "yes"'),
        ("max_k: true", "max_k: must be a valid integer, found true"),
        ('max_k: "8"', 'max_k: must be a valid integer, found "8"'),
        ("max_k: 2.5", "max_k: must be a valid integer, found 2.5"),
        ("guard: {margin: 1}", "guard.margin: must be less than 1, found 1"),
        ("guard: {margin: .nan}", "guard.margin: must be a finite number, found NaN"),
        ("guard: {enabled: 1}", "guard.enabled: must be a valid boolean, found 1"),
        ("guard: null", "guard: must be a mapping, found null"),
        ("policy: off", 'policy: must be a mapping with a name, such as {name: off}, found "off"'),
        ("workloads: {rules: {label: a}}", 'workloads.rules: must be a list, found {"label": "a"}'),
        (
            "policy: {name: schedule, table: []}",
            "policy.table: needs at least 1 of them, found []",
        ),
        ("journal: {path: ''}", 'journal.path: found "": must name a file; null for none'),
        ("proposers: [suffix, 3]", "proposers[1]: must be a valid string, found 3"),
        ("metrics: {port: 70000}", "metrics.port: must be less than or equal to 65535"),
        ("tpot_target_ms: 0", "tpot_target_ms: must be greater than 0, found 0"),
        (
            "learning: {half_life_tokens: 0.6}",  # counts would turn negative below ln 2
            "learning.half_life_tokens: must be greater than or equal to 1, found 0.6",
        ),
    ],
)
def test_wrong_values_say_the_rule_and_the_value(line: str, message: str) -> None:
    assert f"line 2: {message}" in mistakes(f"version: 1\n{line}\n")


@pytest.mark.parametrize(
    "rule,message",
    [
        ("{tag: edit}", "rules[0].label: is missing"),
        ("{label: 'a b'}", 'rules[0].label: found "a b": must be 1 to 64 letters'),
        ("{label: a, text_matches: '('}", 'found "(": is not a regular expression: missing )'),
        ("{label: a, temperature: {}}", "rules[0].temperature: found {}: needs min, max or both"),
        ("{label: a, prompt_tokens: {min: 9, max: 3}}", "min 9 is above max 3"),
        ("{label: a, prompt_tokens: {min: -1}}", "prompt_tokens.min: must be greater than"),
    ],
)
def test_wrong_workload_rules(rule: str, message: str) -> None:
    assert message in mistakes(f"version: 1\nworkloads:\n  rules:\n    - {rule}\n")


def test_version_is_required_and_checked() -> None:
    assert "version: is missing" in mistakes("max_k: 3\n")
    assert "version: found 2; allowed: 1" in mistakes("version: 2\n")


def test_all_mistakes_are_listed_in_file_order() -> None:
    lines = mistakes("version: 1\nmax_k: -1\nguard: {margn: 1}\nprobe: {backoff: 0}\n").splitlines()
    assert lines[0] == "my.yaml: 3 mistakes"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["line 2", "line 3", "line 4"]


def test_duplicate_keys_are_mistakes_at_any_depth() -> None:
    text = mistakes("version: 1\nguard:\n  margin: 0.1\n  margin: 0.2\n")
    assert "line 4: guard.margin: given twice, first in line 3" in text


def test_bad_yaml_names_line_and_column() -> None:
    assert "my.yaml: line 2, column 1: not valid YAML" in mistakes("version: 1\n\tmax_k: 3\n")
    assert "line 2, column" in mistakes("version: 1\npolicy: {name: [}\n")
    assert "could not determine a constructor" in mistakes("a: !!python/object:os.system 1\n")


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_empty_file(text: str) -> None:
    assert mistakes(text) == "my.yaml: is empty; the least is 'version: 1'"


def test_not_a_mapping() -> None:
    assert "must be a mapping" in mistakes("- version: 1\n")


def test_an_alias_that_contains_itself_is_refused() -> None:
    assert "my.yaml" in mistakes("version: 1\nguard: &a {margin: *a}\n")


def test_unknown_name_lists_the_names_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"allowed: default, latency.*did you mean 'default'\?"):
        load_settings("defualt")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: no such policy file"):
        load_settings(tmp_path / "none.yaml")


def test_folder_and_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_settings(tmp_path)
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"version: \xff1")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_settings(binary)


def test_a_profile_beside_the_file(tmp_path: Path) -> None:
    assert load_settings("default").profile.path is None
    settings = load_settings("default", profile=str(tmp_path / "p.json"))
    assert settings.profile.path == tmp_path / "p.json"
    assert settings.policy == load_settings("default").policy


def test_file_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("version: 1\nmax_k: 3\n")
    assert load_settings(str(file)).max_k == 3


def sections(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [schema, *schema["$defs"].values()]


def test_schema_knows_every_policy_and_refuses_unknown_keys() -> None:
    schema = settings_schema()
    named = {
        section["properties"]["name"].get("const")
        for section in sections(schema)
        if "name" in section["properties"]
    }
    assert named == set(policy_names())
    assert all(section["additionalProperties"] is False for section in sections(schema))
    assert schema["required"] == ["version"]
    assert json.loads(json.dumps(schema)) == schema
