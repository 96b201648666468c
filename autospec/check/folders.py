"""A target and a draft model by their folders: do their tokens agree, and does it all fit?

Nothing is loaded: sizes come from the headers of the safetensors files.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autospec.check.tokens import load_tokenizer
from autospec.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HEADER_BYTES = 8
_LARGEST_HEADER = 100 << 20  # what the format allows
_TYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "U16": 2, "U32": 4, "U64": 8,
}  # fmt: skip
_FLOATS = ("F64", "F32", "F16", "BF16")
_SHOWN = 5
_CHAT = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
         {"role": "user", "content": "c"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model takes. ``cache_bytes_per_token`` is keys and values of one token, in the
    weights' type; ``parameters`` counts elements, of packed types as they are stored."""

    name: str
    parameters: float
    weight_bytes: float
    cache_bytes_per_token: float
    vocab_size: int
    context_tokens: int | None
    is_mixture: bool


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether a draft's tokens mean what the target's do. ``differing`` counts ids whose token
    differs or that one of them has not; ``examples`` show a few."""

    target_tokens: int
    draft_tokens: int
    differing: int
    examples: tuple[str, ...]
    special_tokens_differ: tuple[str, ...]
    same_chat_template: bool | None

    @property
    def is_compatible(self) -> bool:
        """Every id means the same token."""
        return self.differing == 0


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes at a batch and context, and what the device has; None for an unknown device."""

    batch: int
    context: int
    target_weights: float
    target_cache: float
    draft_weights: float
    draft_cache: float
    device: str | None
    available: float | None

    @property
    def needed(self) -> float:
        """Weights and caches; activations and the runtime's own come on top."""
        return self.target_weights + self.target_cache + self.draft_weights + self.draft_cache

    @property
    def fits(self) -> bool | None:
        """None where the device is not known."""
        return None if self.available is None else self.needed <= self.available


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A target, and a draft and how they go together, if there is one."""

    target: ModelSize
    draft: ModelSize | None
    agreement: Agreement | None
    memory: Memory


def folder_facts(
    target: Path,
    draft: Path | None,
    *,
    batch: int,
    context: int,
    device: str | None,
    available: float | None,
) -> FolderFacts:
    """Raises ModelError for what is no model folder."""
    size = model_size(target)
    other = None if draft is None else model_size(draft)
    agreement = None
    if draft is not None:
        agreement = compare_tokenizers(load_tokenizer(target), load_tokenizer(draft))
    tokens = batch * context
    memory = Memory(
        batch,
        context,
        size.weight_bytes,
        size.cache_bytes_per_token * tokens,
        0.0 if other is None else other.weight_bytes,
        0.0 if other is None else other.cache_bytes_per_token * tokens,
        device,
        available,
    )
    return FolderFacts(size, other, agreement, memory)


def model_size(folder: Path) -> ModelSize:
    """From config.json and the headers of the weights. Raises ModelError."""
    config = _config(folder)
    parameters, weight_bytes, element_bytes = 0.0, 0.0, 0.0
    for kind, elements in _tensors(folder):
        parameters += elements
        weight_bytes += elements * _TYPE_BYTES.get(kind, 1)
        if kind in _FLOATS:
            element_bytes = max(element_bytes, _TYPE_BYTES[kind])
    if parameters == 0.0:
        raise ModelError(f"{folder}: no weights in *.safetensors; save the model in that format")
    if element_bytes == 0.0:
        element_bytes = 2.0  # quantized weights throughout: caches are in half precision
    heads = _count(config, "num_attention_heads", folder)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = config.get("head_dim") or _count(config, "hidden_size", folder) // heads
    layers = _count(config, "num_hidden_layers", folder)
    context = config.get("max_position_embeddings")
    return ModelSize(
        name=folder.resolve().name,
        parameters=parameters,
        weight_bytes=weight_bytes,
        cache_bytes_per_token=2.0 * layers * kv_heads * int(head_dim) * element_bytes,
        vocab_size=_count(config, "vocab_size", folder),
        context_tokens=int(context) if context else None,
        is_mixture=any(
            config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")
        ),
    )


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder}: not a model folder, config.json is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: must be a JSON object, found {type(config).__name__}")
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _count(config: Mapping[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{folder / 'config.json'}: {key} is {value!r}; it must be a number >= 1")
    return value


def _tensors(folder: Path) -> Iterator[tuple[str, float]]:
    """Type and elements of every tensor of the folder's files."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(_HEADER_BYTES))
                if size > _LARGEST_HEADER:
                    raise ValueError(f"a header of {size} bytes")
                header = json.loads(file.read(size))
            for name, entry in header.items():
                if name != "__metadata__":
                    yield str(entry["dtype"]), float(prod(entry["shape"]))
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{path}: not a readable safetensors file ({error})") from None


def compare_tokenizers(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase
) -> Agreement:
    """Token by token, special tokens, chat template as it is applied."""
    mine, theirs = _tokens_by_id(target), _tokens_by_id(draft)
    differing = [
        index for index in sorted({*mine, *theirs}) if mine.get(index) != theirs.get(index)
    ]
    special = [
        f"{name}: {_special(target, name)!r} in the target, {_special(draft, name)!r} in the draft"
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if _special(target, name) != _special(draft, name)
    ]
    return Agreement(
        len(mine),
        len(theirs),
        len(differing),
        tuple(
            f"{index}: {mine.get(index)!r} in the target, {theirs.get(index)!r} in the draft"
            for index in differing[:_SHOWN]
        ),
        tuple(special),
        _same_template(target, draft),
    )


def _tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {int(index): token for token, index in tokenizer.get_vocab().items()}


def _special(tokenizer: PreTrainedTokenizerBase, name: str) -> str | None:
    value = getattr(tokenizer, name, None)
    return None if value is None else str(value)


def _same_template(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> bool | None:
    """None where one of them has none."""
    texts = []
    for tokenizer in (target, draft):
        if not getattr(tokenizer, "chat_template", None):
            return None
        try:
            texts.append(str(tokenizer.apply_chat_template(list(_CHAT), tokenize=False)))
        except Exception as error:  # a template may refuse: then they agree only in refusing alike
            texts.append(f"refused: {error}")
    return texts[0] == texts[1]
