from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from autospec.errors import InputError
from autospec.replay import cost_file
from autospec.replay.arrivals import Arrival, at_rate, read_arrivals
from autospec.replay.cost_file import LookupSeconds, ModelSeconds, read_cost_file
from autospec.replay.trace import read_traces

ROW: dict[str, Any] = {
    "id": "a",
    "workload": "chat",
    "prompt_token_ids": [1, 2],
    "output_token_ids": [3, 4, 5],
    "accepted": {"eagle3": [2, 0, 0]},
}

# Traces -----------------------------------------------------------------------------------------


def written(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def test_requests_come_in_file_order(tmp_path: Path) -> None:
    first = written(tmp_path, json.dumps(ROW), "", json.dumps({**ROW, "id": "b"}))
    second = tmp_path / "u.jsonl"
    second.write_text(json.dumps({**ROW, "id": "c", "workload": None, "temperature": 1}))
    requests = read_traces([first, second])
    assert [request.id for request in requests] == ["a", "b", "c"]
    assert requests[0].prompt_token_ids.tolist() == [1, 2]
    assert requests[0].output_token_ids.tolist() == [3, 4, 5]
    assert requests[0].accepted["eagle3"].tolist() == [2, 0, 0]
    assert [request.workload for request in requests] == ["chat", "chat", None]
    assert [request.temperature for request in requests] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"output_token_ids": []}, "must not be empty"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids must be a list of token ids"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids must be a list of token ids"),
        ({"prompt_token_ids": None}, "prompt_token_ids must be a list of token ids"),
        ({"output_token_ids": [1 << 40]}, "output_token_ids must be a list of token ids"),
        ({"accepted": [1]}, "accepted must map"),
        ({"accepted": {"eagle3": [1, 2]}}, "accepted.eagle3 must be 3 numbers"),
        ({"accepted": {"eagle3": [1, 2, -1]}}, "accepted.eagle3 must be 3 numbers"),
        ({"temperature": -1}, "temperature must be a number >= 0, found -1"),
    ],
)
def test_a_bad_request_is_named_with_its_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, json.dumps(ROW), json.dumps({**ROW, **change}))
    with pytest.raises(InputError) as caught:
        read_traces([path])
    assert f"{path}:2: " in str(caught.value)
    assert message in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r":1: is not JSON: .* at column"):
        read_traces([written(tmp_path, "{")])
    with pytest.raises(InputError, match=":1: must be a JSON object, found list"):
        read_traces([written(tmp_path, "[]")])
    with pytest.raises(InputError, match="no requests in"):
        read_traces([written(tmp_path, "")])
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_traces([tmp_path / "none.jsonl"])
    latin = tmp_path / "l.jsonl"
    latin.write_bytes(b"\xff")
    with pytest.raises(InputError, match="is not UTF-8"):
        read_traces([latin])


# Arrivals ---------------------------------------------------------------------------------------

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_arrivals_are_relative_and_rescaled(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        HEADER
        + "2023-11-16 18:15:46.6805900,374,44\n"
        + "2023-11-16 18:15:48.6805900,396,109\n\n"
        + "2023-11-16 18:15:52.6805900,5,6\n"
    )
    arrivals = read_arrivals(path)
    assert arrivals[0] == Arrival(0.0, 374, 44)
    assert [arrival.seconds for arrival in arrivals] == [0.0, 2.0, 6.0]
    # three requests in one interval of (3 - 1) / 4 seconds
    assert at_rate(arrivals, 3, 4.0) == pytest.approx((0.0, 1 / 6, 0.5))
    assert at_rate(arrivals, 2, 4.0) == pytest.approx((0.0, 0.25))
    assert at_rate(arrivals, 1, 4.0) == (0.0,)


@pytest.mark.parametrize(
    "text,message",
    [
        ("", ":1: the header must be TIMESTAMP,ContextTokens,GeneratedTokens, found nothing"),
        ("time,a,b\n", ":1: the header must be"),
        (HEADER, "has no arrivals"),
        (HEADER + "2023-11-16 18:15:46.68,1\n", ":2: must have 3 fields, found 2"),
        (HEADER + "soon,1,2\n", ":2: TIMESTAMP must be like"),
        (HEADER + "2023-11-16 18:15:46,x,2\n", ":2: ContextTokens must be a whole number"),
        (HEADER + "2023-11-16 18:15:46,1,-2\n", ":2: GeneratedTokens must be a whole number"),
        (
            HEADER + "2023-11-16 18:15:46,1,2\n2023-11-16 18:15:45,1,2\n",
            ":3: TIMESTAMP is before the line above",
        ),
    ],
)
def test_bad_arrivals_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_arrivals(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_rates_are_positive(rate: float) -> None:
    with pytest.raises(InputError, match="the rate must be a positive number"):
        at_rate([Arrival(0.0, 1, 1), Arrival(1.0, 1, 1)], 2, rate)


def test_arrivals_must_be_enough_and_not_all_at_once() -> None:
    with pytest.raises(InputError, match="3 requests need as many arrivals; there are 1"):
        at_rate([Arrival(0.0, 1, 1)], 3, 1.0)
    with pytest.raises(InputError, match="all come at the same time"):
        at_rate([Arrival(0.0, 1, 1)] * 2, 2, 1.0)


# Cost files -------------------------------------------------------------------------------------

COST = """\
shape: packed
step: {fixed_seconds: 5.0e-3, per_token_seconds: 2.0e-5}
proposers:
  eagle3: {kind: sequential, per_depth_seconds: 7.0e-4}
  suffix: {kind: lookup, step_fraction: 0.005}
"""


def cost_path(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cost.yaml"
    path.write_text(text)
    return path


def test_cost_file(tmp_path: Path) -> None:
    cost = read_cost_file(cost_path(tmp_path, COST))
    assert cost.step.fixed_seconds == 5.0e-3
    assert cost.step.overhead_seconds == 0.0
    model, lookup = cost.proposers["eagle3"], cost.proposers["suffix"]
    assert isinstance(model, ModelSeconds)
    assert isinstance(lookup, LookupSeconds)
    assert (model.max_k, lookup.max_k) == (16, 20)


def test_the_example_is_a_cost_file_of_all_there_is(tmp_path: Path) -> None:
    assert cost_file.__doc__ is not None
    _, _, example = cost_file.__doc__.partition("::\n")
    cost = read_cost_file(cost_path(tmp_path, textwrap.dedent(example)))
    kinds = {part.kind for part in cost.proposers.values()}
    assert kinds == {"lookup", "sequential", "appended"}
    for form in (cost.step, *cost.proposers.values()):
        assert form.model_fields_set == set(type(form).model_fields)


@pytest.mark.parametrize(
    "old,new,messages",
    [
        ("fixed_seconds: 5.0e-3", "fixed_seconds: -1", ["step.fixed_seconds", "found -1"]),
        ("shape: packed", "shape: flat", ["shape: ", "found flat"]),
        ("shape: packed", "shape: stepped", ["captured_sizes belong to shape 'stepped'"]),
        ("shape: packed", "shape: stepped\ncaptured_sizes: [8, 4]", ["captured_sizes must rise"]),
        ("shape: packed\n", "", ["shape: Field required"]),
        ("suffix:", "trie:", ["proposers.trie: a lookup is one of ngram, suffix"]),
        ("kind: lookup", "kind: oracle", ["proposers.suffix", "oracle"]),
        ("step_fraction: 0.005", "step_fractoin: 0.005", ["proposers.suffix", "step_fractoin"]),
        ("step: {", "step: {per_stepp: 1, ", ["step.per_stepp"]),
    ],
)
def test_bad_cost_files_name_their_keys(
    tmp_path: Path, old: str, new: str, messages: list[str]
) -> None:
    assert old in COST
    path = cost_path(tmp_path, COST.replace(old, new))
    with pytest.raises(InputError) as caught:
        read_cost_file(path)
    assert str(path) in str(caught.value)
    for message in messages:
        assert message in str(caught.value)


def test_every_mistake_of_a_cost_file_is_listed(tmp_path: Path) -> None:
    text = COST.replace("5.0e-3", "fast").replace("7.0e-4", "-1")
    with pytest.raises(InputError) as caught:
        read_cost_file(cost_path(tmp_path, text))
    assert len(str(caught.value).splitlines()) == 2


def test_unreadable_cost_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not YAML"):
        read_cost_file(cost_path(tmp_path, "shape: ["))
    with pytest.raises(InputError, match="the file"):
        read_cost_file(cost_path(tmp_path, "- 1"))
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_cost_file(tmp_path / "none.yaml")
