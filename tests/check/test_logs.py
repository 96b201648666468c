from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from autospec.check.logs import log_rate, read_log
from autospec.check.tokens import load_tokenizer
from autospec.errors import InputError

ROW = {
    "prompt_token_ids": [1, 2, 3],
    "output_token_ids": [4, 5],
    "start": 100.0,
    "end": 102.0,
}


def written(folder: Path, *rows: object) -> Path:
    path = folder / "log.jsonl"
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(folder)


def test_ids_need_no_tokenizer(tmp_path: Path) -> None:
    later = ROW | {"start": 101.0, "first_token": 101.5, "end": 104.0, "id": "b", "workload": "w"}
    one, two = read_log(written(tmp_path, later, "", ROW), None)
    assert (one.id, one.workload, one.first, one.prompt_tokens) == ("3", "default", None, 3)
    assert (two.id, two.workload, two.ttft, two.output_tokens) == ("b", "w", 0.5, 2)
    assert log_rate([one, two]) == pytest.approx(0.5)


def test_texts_and_messages(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [
        {"prompt": "w5 w6", "output": "w7", "start": 1, "end": 2},
        {
            "messages": [{"role": "user", "content": "w5 w6"}],
            "output": "w7 w8",
            "start": "2026-11-29T18:00:00Z",
            "first_token": "2026-11-29T18:00:00.250",
            "end": "2026-11-29T18:00:01+00:00",
        },
    ]
    one, two = read_log(written(tmp_path, *rows), tokenizer)
    assert one.prompt_token_ids == two.prompt_token_ids == (5, 6)
    assert two.output_token_ids == (7, 8)
    assert two.ttft == pytest.approx(0.25)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"start": None}, r":1: has no start; check needs to know when each request began"),
        ({"start": None, "end": None}, "has no start and end"),
        ({"start": "yesterday"}, "start is 'yesterday'; it must be Unix seconds or like 2026"),
        ({"end": 99.0}, "must come in this order"),
        ({"first_token": 103.0}, "must come in this order"),
        ({"end": True}, "end must be a number, found True"),
        ({"output_token_ids": None}, "has no output"),
        ({"prompt_token_ids": None}, "has no prompt"),
        ({"output_token_ids": []}, "the output is empty; leave such requests out"),
        ({"output_token_ids": [1, -1]}, "must be a list of token ids"),
        ({"output_token_ids": None, "output": "x"}, "holds texts; give the model's folder with"),
        ({"workload": 3}, "workload must be a text, found int"),
        ({"messages": 3, "prompt_token_ids": None}, "messages must be a list of"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_log(written(tmp_path, ROW | change), None)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"log\.jsonl: holds no requests; a line is"):
        read_log(written(tmp_path, ""), None)
    with pytest.raises(InputError, match=r"log\.jsonl:1: is not JSON"):
        read_log(written(tmp_path, "{"), None)
    with pytest.raises(InputError, match="must be a JSON object, found list"):
        read_log(written(tmp_path, "[]"), None)
    with pytest.raises(InputError, match=r"none\.jsonl: cannot be read"):
        read_log(tmp_path / "none.jsonl", None)
