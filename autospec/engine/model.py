"""A causal language model of transformers, loaded to run packed steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from autospec.engine.attention import ATTENTION_NAME, AttentionStep, PackedStep
from autospec.engine.cache import SlotCache
from autospec.engine.packing import PackedLinear, can_pack, pack_linears
from autospec.errors import ModelError
from autospec.records import Int32Array

SUPPORTED_FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "smollm3",
    "granite",
    "olmo2",
    "phi3",
)
"""``model_type`` values that the tests prove equal to transformers' own decoding."""

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_NO_CONTEXT_LIMIT = 1 << 20

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Logits of the rows asked for, and hidden states of all tokens where those were asked for."""

    logits: torch.Tensor  # [rows, vocab]
    hidden: torch.Tensor | None  # [tokens, layers, hidden_size]


class CausalModel:
    """A decoder-only model with its tokenizer, if it has one.

    ``context_tokens`` is the longest sequence it was made for; ``eos_token_ids`` come from its
    generation config. The model is taken over: its attention is exchanged and on CPU its linear
    layers are repacked. Raises ModelError for what the engine cannot run faithfully.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str = "model",
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        config = model.config.get_text_config()
        _check_runnable(config, name)
        model.eval()
        model.requires_grad_(False)
        model.set_attn_implementation(ATTENTION_NAME)
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.context_tokens: int = (
            getattr(config, "max_position_embeddings", None) or _NO_CONTEXT_LIMIT
        )
        self.eos_token_ids = _eos_token_ids(model)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        if can_pack(self.device, self.dtype):
            pack_linears(model)
        self._kv_heads: int = (
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        )
        self._head_dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self._forward = cast(Callable[..., Any], model)
        self._logit_scale: float = 1.0 / getattr(config, "logits_scaling", 1.0)

    @classmethod
    def load(cls, folder: str | Path, *, dtype: str = "auto", device: str = "cpu") -> CausalModel:
        """Load a model folder as written by ``save_pretrained``; ``auto`` keeps the saved dtype."""
        path = Path(folder)
        _check_folder(path)
        if dtype != "auto" and dtype not in DTYPES:
            raise ModelError(f"dtype is {dtype!r}; it must be auto or one of {', '.join(DTYPES)}")
        try:
            model, loading = cast(Any, AutoModelForCausalLM).from_pretrained(
                path,
                dtype=DTYPES.get(dtype, "auto"),
                local_files_only=True,
                output_loading_info=True,
            )
        except (
            Exception
        ) as error:  # whatever transformers, safetensors or torch say of a broken folder
            reason = f"{type(error).__name__}: {error}"
            raise ModelError(f"{path}: the model cannot be loaded ({reason})") from error
        missing = sorted(loading["missing_keys"])
        if missing:
            raise ModelError(
                f"{path}: {len(missing)} weights are missing from the checkpoint, the first is "
                f"{missing[0]}; they would be random"
            )
        return cls(model.to(device), name=path.name, tokenizer=_load_tokenizer(path))

    def new_cache(self, slots: int, capacity: int) -> SlotCache:
        """A cache for ``slots`` requests of up to ``capacity`` tokens."""
        return SlotCache(
            layers=self.num_layers,
            slots=slots,
            capacity=capacity,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def new_step(
        self, cache: SlotCache, slots: Int32Array, starts: Int32Array, counts: Int32Array
    ) -> PackedStep:
        """The layout of a forward that appends ``counts`` tokens to ``slots`` at ``starts``."""
        return PackedStep(cache, slots, starts, counts, self._kv_heads * self._head_dim)

    def forward(
        self,
        tokens: torch.Tensor,  # [tokens]
        step: AttentionStep,
        rows: torch.Tensor,  # [rows] token indices to return logits of
        hidden_layers: Sequence[int] = (),
    ) -> ForwardResult:
        """One packed forward. ``hidden_layers`` index outputs of layers, -1 the last, normed."""
        with torch.inference_mode():
            output = self._forward(
                input_ids=tokens.unsqueeze(0),
                position_ids=step.positions,
                use_cache=False,
                logits_to_keep=rows,
                output_hidden_states=bool(hidden_layers),
                packed=step,
            )
            hidden = None
            if hidden_layers:
                hidden = torch.stack(
                    [output.hidden_states[layer][0] for layer in hidden_layers], dim=1
                )
            return ForwardResult(output.logits[0], hidden)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows [tokens, hidden_size] of the input embedding, as heads take them."""
        embedded: torch.Tensor = self.model.get_input_embeddings()(tokens)
        return embedded

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, vocab] of last hidden states [tokens, hidden_size], normed ones."""
        logits: torch.Tensor = self._output_layer(hidden)
        return logits if self._logit_scale == 1.0 else logits * self._logit_scale

    def output_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows [tokens, hidden_size] of the output layer, scaled: their products are logits."""
        layer = self._output_layer
        weight = layer.weight() if isinstance(layer, PackedLinear) else layer.weight
        rows: torch.Tensor = weight.detach()[token_ids]
        return rows if self._logit_scale == 1.0 else rows * self._logit_scale

    @property
    def _output_layer(self) -> Any:
        return self.model.get_output_embeddings()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens without special ones; needs a tokenizer."""
        if self.tokenizer is None:
            raise ModelError(
                f"{self.name}: text was asked for, but the model folder has no tokenizer"
            )
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        raise ModelError(f"{path}: expected a model folder, found {found}")
    config_path = path / "config.json"
    if not config_path.is_file():
        raise ModelError(f"{path}: not a model folder, config.json is missing")
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{config_path}: not readable as JSON ({error})") from error
    family = config.get("model_type") if isinstance(config, dict) else None
    if family not in SUPPORTED_FAMILIES:
        raise ModelError(
            f"{config_path}: model_type is {family!r}; "
            f"supported are {', '.join(SUPPORTED_FAMILIES)}"
        )
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path}: no *.safetensors file; save the model with save_pretrained")


def _check_runnable(config: Any, name: str) -> None:
    if config.model_type not in SUPPORTED_FAMILIES:
        raise ModelError(
            f"{name}: model_type is {config.model_type!r}; "
            f"supported are {', '.join(SUPPORTED_FAMILIES)}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in LENGTH_DEPENDENT_ROPE:
        raise ModelError(
            f"{name}: rope_type is {kind!r}, whose rotation depends on the longest request of a "
            "batch; requests packed into one step would change each other's output"
        )


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = model.config.eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)


def _load_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    if not any(
        (path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        return None
    try:
        return cast(
            PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(path, local_files_only=True)
        )
    except Exception as error:
        raise ModelError(f"{path}: the tokenizer cannot be loaded ({error})") from error


def token_tensor(
    tokens: np.ndarray[tuple[int, ...], np.dtype[Any]], device: torch.device
) -> torch.Tensor:
    """Token ids as int64 on ``device``."""
    return torch.from_numpy(tokens.astype(np.int64)).to(device)
