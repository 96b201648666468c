"""Prompts files: what is read, and what is said of a bad line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autospec.errors import InputError
from autospec.prompts import Message, Prompt, read_prompts, workload_names


def write(path: Path, *rows: object) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_the_three_forms(tmp_path: Path) -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    path = write(
        tmp_path / "prompts.jsonl",
        {"id": "a", "workload": "chat", "prompt": "one\u2028line", "max_tokens": 7},
        "",
        {"id": 81, "workload": "writing", "turns": ["first", "second"], "source": "elsewhere"},
        {"id": "c", "workload": "chat", "messages": conversation, "temperature": 0.5},
        {"prompt": "neither id nor workload"},
    )
    assert read_prompts(path) == (
        Prompt("a", "chat", (Message("user", "one\u2028line"),), max_tokens=7),
        Prompt("81", "writing", (Message("user", "first"),)),
        Prompt(
            "c",
            "chat",
            tuple(Message(turn["role"], turn["content"]) for turn in conversation),
            temperature=0.5,
        ),
        Prompt("5", "default", (Message("user", "neither id nor workload"),)),
    )
    assert workload_names(read_prompts(path)) == ("chat", "writing", "default")


GOOD = {"id": "good", "workload": "chat", "prompt": "hello"}


@pytest.mark.parametrize(
    "row,message",
    [
        ('{"id": "a", "prompt": ', "is not JSON: Expecting value at column "),
        (["a"], "must be a JSON object, found list"),
        ({"id": "a"}, "needs exactly one of prompt, turns, messages; found none of them"),
        ({"prompt": "a", "turns": ["a"]}, "found prompt and turns"),
        ({"prompt": " \n"}, "prompt is empty; it must hold at least one word"),
        ({"prompt": 3}, "prompt must be a text, found int"),
        ({"turns": []}, "turns must be a list with at least one entry"),
        ({"turns": [""]}, "turns[0] is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0] must have a role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content must be a text"),
        ({"id": "", "prompt": "a"}, "id is ''"),
        ({"workload": 4, "prompt": "a"}, "workload is 4"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0; it must be a whole number"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens is True"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1; it must be 0 (greedy) or above"),
        ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot'"),
        ('{"prompt": "a", "temperature": NaN}', "temperature is nan"),
        ({"id": "good", "prompt": "a"}, "id 'good' is already used in line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "prompts.jsonl", GOOD, "", row)
    with pytest.raises(InputError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert message in str(caught.value)


def test_files_that_hold_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="holds no prompts"):
        read_prompts(write(tmp_path / "empty.jsonl", "", "  "))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(InputError, match=r"is not UTF-8 text \(byte 12\)"):
        read_prompts(tmp_path / "latin.jsonl")
