"""Token ids of texts, by the tokenizer of a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autospec.errors import InputError, MissingDependency, ModelError
from autospec.prompts import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Raises ModelError for a folder without one, MissingDependency without transformers."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: expected a model folder, found nothing of that name")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{folder}: no tokenizer here; one of {', '.join(TOKENIZER_FILES)} is needed"
        )
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise MissingDependency(
            "transformers is not installed: pip install 'autospec-llm[check]'"
        ) from None
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True
        )
    except Exception as error:  # whatever a broken folder makes of it
        raise ModelError(f"{folder}: the tokenizer cannot be loaded: {error}") from None
    return loaded


def output_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """An answer's own text, without special tokens."""
    return tuple(int(each) for each in tokenizer(text, add_special_tokens=False)["input_ids"])


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], place: str
) -> tuple[int, ...]:
    """Through the chat template where there is one. Raises InputError where it does not fit."""
    if not getattr(tokenizer, "chat_template", None):
        text = "\n\n".join(each.content for each in messages)
        return tuple(int(each) for each in tokenizer(text)["input_ids"])
    turns: list[dict[str, Any]] = [
        {"role": each.role, "content": each.content} for each in messages
    ]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # whatever the model's own template says
        raise InputError(f"{place}: does not fit the chat template: {error}") from None
    return output_ids(tokenizer, text)
