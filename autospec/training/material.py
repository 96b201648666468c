"""The texts that a head learns from: own questions or a prompts file, some of them held out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autospec.bench.arms import encode
from autospec.engine.model import CausalModel
from autospec.errors import InputError
from autospec.prompts import Prompt, read_prompts
from autospec.training.questions import make_questions
from autospec.training.recording import Excerpt

SELF = "self"
ANSWER_TOKENS = 160
"""Most tokens of a generated answer."""

_QUESTIONS = 8192
_HELD_OUT = 40
_HELD_OUT_SHARE = 8  # one in so many prompts of a small file


@dataclass(frozen=True, slots=True)
class Material:
    """Excerpts to learn from, in order, and others to be measured on."""

    learned: tuple[Excerpt, ...]
    held_out: tuple[Excerpt, ...]


def gather(data: str, held_out: Path | None, target: CausalModel, seed: int) -> Material:
    """Excerpts of ``data``, which is ``self`` or a prompts file, as far as they fit the target.

    Conversations that end with an answer are given texts, of which the answer is learned from;
    every other prompt is answered by the target. Raises InputError.
    """
    if data == SELF:
        prompts = list(make_questions(_QUESTIONS, seed))
        place = Path(SELF)
    else:
        place = Path(data)
        prompts = list(read_prompts(place))
        random.Random(seed).shuffle(prompts)
    if held_out is not None:
        measured: Sequence[Prompt] = read_prompts(held_out)
    else:
        count = min(_HELD_OUT, max(1, len(prompts) // _HELD_OUT_SHARE))
        measured, prompts = prompts[:count], prompts[count:]
    if not prompts:
        raise InputError(f"{place}: holds {len(measured)} prompt; training needs at least 2")
    return Material(
        tuple(_excerpt(prompt, target, place) for prompt in prompts),
        tuple(_excerpt(prompt, target, held_out or place) for prompt in measured),
    )


def _excerpt(prompt: Prompt, target: CausalModel, place: Path) -> Excerpt:
    limit = target.context_tokens - 1
    if prompt.messages[-1].role != "assistant":
        tokens = tuple(encode(prompt, target, place))
        generate = min(ANSWER_TOKENS, prompt.max_tokens or ANSWER_TOKENS, limit - len(tokens))
        if generate < 1:
            raise InputError(
                f"{place}: prompt {prompt.id!r} has {len(tokens)} tokens; the target's context is "
                f"{target.context_tokens}"
            )
        return Excerpt(tokens, len(tokens), generate)
    question = Prompt(prompt.id, prompt.workload, prompt.messages[:-1])
    before = encode(question, target, place) if question.messages else []
    assert target.tokenizer is not None
    answer = target.tokenizer(prompt.messages[-1].content, add_special_tokens=False)["input_ids"]
    whole = (*before, *(int(token) for token in answer))[:limit]
    return Excerpt(whole, min(len(before), len(whole)), 0)
