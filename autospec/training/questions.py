"""AutoSpec's own prompts for training a head: stories, chat, questions and sums from templates."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from autospec.prompts import Message, Prompt

_FILE = Path(__file__).with_name("questions.yaml")
_BLANK = re.compile(r"\{([a-z]+)(2?)\}")


def make_questions(count: int, seed: int) -> tuple[Prompt, ...]:
    """``count`` different prompts, workloads in turn; the same for the same seed."""
    data: Mapping[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    rng = random.Random(seed)
    texts: dict[str, str] = {}
    turn = 0
    while len(texts) < count:
        workload = data["turns"][turn % len(data["turns"])]
        form = rng.choice(data["forms"][workload])
        texts.setdefault(_filled(form, data["words"], rng), workload)
        turn += 1
    return tuple(
        Prompt(f"question-{number}", workload, (Message("user", text),))
        for number, (text, workload) in enumerate(texts.items())
    )


def _filled(form: str, words: Mapping[str, Sequence[object]], rng: random.Random) -> str:
    chosen: dict[str, list[object]] = {}

    def word(blank: re.Match[str]) -> str:
        name, second = blank.group(1), bool(blank.group(2))
        if name not in chosen:
            chosen[name] = rng.sample(words[name], 2)
        return str(chosen[name][second])

    return _BLANK.sub(word, form)
