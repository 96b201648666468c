from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autospec.records import Request
from autospec.workload import (
    AUTOMATIC_LABELS,
    MAX_LABEL_CHARACTERS,
    MAX_MATCHED_CHARACTERS,
    OTHER,
    Features,
    TemperatureRange,
    TokenRange,
    WorkloadRule,
    Workloads,
    automatic_label,
    clean_label,
    repetition_share,
    request_features,
)


def request(
    prompt_tokens: int = 10,
    workload: str | None = None,
    tag: str | None = None,
    text: str | None = None,
    temperature: float = 0.0,
) -> Request:
    tokens = np.arange(prompt_tokens, dtype=np.int32)
    return Request("r", tokens, workload=workload, tag=tag, text=text, temperature=temperature)


def label_of(workloads: Workloads, asked: Request) -> str:
    index = workloads.index(asked)  # first: it may append a label
    return workloads.labels[index]


def test_repetition_of_constants() -> None:
    assert repetition_share(np.arange(100, dtype=np.int32)) == 0.0
    assert repetition_share(np.tile(np.arange(50, dtype=np.int32), 2)) == 47 / 97
    assert repetition_share(np.zeros(103, dtype=np.int32)) == 0.99
    assert repetition_share(np.zeros(3, dtype=np.int32)) == 0.0
    assert repetition_share(np.zeros(0, dtype=np.int32)) == 0.0


@given(st.lists(st.integers(0, 3), max_size=60))
def test_repetition_equals_counting(tokens: list[int]) -> None:
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    expected = 0.0 if len(grams) < 2 else (len(grams) - len(set(grams))) / len(grams)
    assert repetition_share(np.array(tokens, dtype=np.int32)) == pytest.approx(expected)


@given(
    st.integers(0, 100_000),
    st.floats(0, 1, allow_nan=False),
    st.floats(0, 2, allow_nan=False),
)
def test_automatic_labels_are_a_fixed_set(length: int, share: float, temperature: float) -> None:
    assert automatic_label(Features(length, share, temperature)) in AUTOMATIC_LABELS


def test_every_automatic_label_can_be_reached() -> None:
    reached = {
        automatic_label(Features(length, share, temperature))
        for length in (1, 200, 2000)
        for share in (0.0, 0.9)
        for temperature in (0.0, 1.0)
    }
    assert reached == set(AUTOMATIC_LABELS)


def test_features_of_a_repetitive_prompt() -> None:
    tokens = np.tile(np.arange(100, dtype=np.int32), 6)
    features = request_features(Request("r", tokens, temperature=0.7))
    assert features.prompt_tokens == 600
    assert features.repetition > 0.8
    assert automatic_label(features) == "auto/long-repetitive-sampled"


def test_callers_label_comes_first() -> None:
    workloads = Workloads([WorkloadRule(label="all")])
    assert label_of(workloads, request(workload="chat")) == "chat"
    assert label_of(workloads, request()) == "all"


@pytest.mark.parametrize(
    "given_label,label",
    [
        ("chat", "chat"),
        ("  Code Edit! ", "Code_Edit_"),
        ('a"b\nc', "a_b_c"),
        ("../../etc", "etc"),
        ("x" * 200, "x" * MAX_LABEL_CHARACTERS),
        ("…", None),
        ("", None),
    ],
)
def test_labels_are_made_safe(given_label: str, label: str | None) -> None:
    assert clean_label(given_label) == label


def test_a_label_of_nothing_is_no_label() -> None:
    assert label_of(Workloads(), request(workload=" ?? ")) == "auto/short-greedy"


def test_callers_labels_are_bounded_and_the_rest_counted() -> None:
    workloads = Workloads(max_caller_labels=3)
    labels = [label_of(workloads, request(workload=f"w{i}")) for i in range(10)]
    assert labels == ["w0", "w1", "w2"] + [OTHER] * 7
    assert workloads.overflowed == 7
    assert len(workloads.labels) == workloads.capacity
    assert label_of(workloads, request(workload="w1")) == "w1"


def test_known_labels_take_places_and_do_not_overflow() -> None:
    workloads = Workloads(known=["a", OTHER, "b", "c"], max_caller_labels=2)
    assert label_of(workloads, request(workload="a")) == "a"
    assert label_of(workloads, request(workload="c")) == OTHER
    assert len(workloads.labels) == workloads.capacity


def test_indices_are_stable() -> None:
    workloads = Workloads([WorkloadRule(label="code")])
    first = workloads.index(request(workload="x"))
    workloads.index(request(workload="y"))
    assert workloads.index(request(workload="x")) == first
    assert workloads.labels[first] == "x"


RULE = WorkloadRule(
    label="code-edit",
    tag="edit",
    temperature=TemperatureRange(max=0.3),
    prompt_tokens=TokenRange(min=100, max=4000),
    text_matches="```",
)


def test_every_condition_must_hold() -> None:
    workloads = Workloads([RULE])
    assert label_of(workloads, request(100, None, "edit", "a ```b", 0.3)) == "code-edit"
    wrong = [
        request(99, None, "edit", "a ```b", 0.3),
        request(4001, None, "edit", "a ```b", 0.3),
        request(100, None, "other", "a ```b", 0.3),
        request(100, None, None, "a ```b", 0.3),
        request(100, None, "edit", "a b", 0.3),
        request(100, None, "edit", None, 0.3),
        request(100, None, "edit", "a ```b", 0.31),
    ]
    assert all(label_of(workloads, each) != "code-edit" for each in wrong)


def test_the_first_matching_rule_wins() -> None:
    rules = [
        WorkloadRule(label="hot", temperature=TemperatureRange(min=0.8)),
        WorkloadRule(label="tagged", tag="t"),
    ]
    assert label_of(Workloads(rules), request(tag="t", temperature=1.0)) == "hot"
    assert label_of(Workloads(rules), request(tag="t", temperature=0.5)) == "tagged"


def test_only_the_beginning_of_a_text_is_searched() -> None:
    workloads = Workloads([WorkloadRule(label="late", text_matches="needle")])
    assert label_of(workloads, request(text="needle")) == "late"
    assert label_of(workloads, request(text=" " * MAX_MATCHED_CHARACTERS + "needle")) != "late"
