"""Folders of EAGLE heads in the published layouts, and writing one.

- EAGLE-1 and EAGLE-2 (SafeAILab, ``yuhuili/EAGLE-…``): ``fc`` and ``layers.N``, the first
  without an input norm; ``config.json`` is that of a Llama with few layers.
- EAGLE-3 (SafeAILab, ``yuhuili/EAGLE3-…``): ``fc``, ``midlayer``, ``norm``, ``lm_head``, ``d2t``,
  ``t2d``, with ``draft_vocab_size`` in the configuration.
- EAGLE-3 of the package speculators: the same with ``layers.0`` for ``midlayer`` and a
  configuration of its own, ``speculators_model_type`` eagle3.

``d2t`` [draft vocab] is what to add to a draft's token id to get the target's. EAGLE-1 heads may
have it too here: then only these tokens are drafted, through the target's own output rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig

from autospec.engine.model import LENGTH_DEPENDENT_ROPE, CausalModel
from autospec.errors import ModelError
from autospec.proposers.checkpoint import CONFIG, Checkpoint
from autospec.proposers.eagle_head import Eagle3Head, EagleHead, EagleLayout

LAYER_FAMILIES = ("llama", "qwen2")
"""``model_type`` values whose decoder layers these heads have."""

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OTHER_SETTINGS = (
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "mlp_bias",
)


def load_eagle(folder: str | Path, target: CausalModel) -> EagleHead | Eagle3Head:
    """The head in ``folder``, which must fit the target. Raises ModelError."""
    checkpoint = Checkpoint.open(folder)
    form = _form(checkpoint)
    layout = _layout(checkpoint, target, form)
    if form.is_third:
        return _load_eagle3(checkpoint, target, layout, form)
    return _load_eagle(checkpoint, target, layout)


def read_eagle_layout(folder: str | Path, target: CausalModel) -> EagleLayout:
    """What the head in ``folder`` is made of, without its weights. Raises ModelError."""
    checkpoint = Checkpoint.open(folder)
    return _layout(checkpoint, target, _form(checkpoint))


def save_eagle(head: EagleHead, folder: str | Path, target: CausalModel) -> None:
    """Write an EAGLE-1 head that is not attached, for ``load_eagle`` and for engines."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().contiguous().cpu() for name, value in head.state_dict().items()}
    if head.draft_tokens is not None:
        tokens = head.draft_tokens.cpu()
        tensors["d2t"] = tokens - torch.arange(len(tokens))
    save_file(tensors, path / "model.safetensors")
    config = head.layout.layers.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": target.vocab_size,
        "bias": head.layout.fc_bias,
    }
    if head.draft_tokens is not None:
        config["draft_vocab_size"] = len(head.draft_tokens)
    (path / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


@dataclass(frozen=True, slots=True)
class _Form:
    """Where a published layout keeps things: the layers' settings and the first layer's weights."""

    is_third: bool
    settings: str
    first: str


def _form(checkpoint: Checkpoint) -> _Form:
    if "speculators_model_type" in checkpoint.config:
        checkpoint.require(
            "speculators_model_type", checkpoint.text("speculators_model_type"), ("eagle3",)
        )
        version = checkpoint.text("speculators_version", "0")
        if version.split(".")[0] != "0":
            raise ModelError(
                f"{checkpoint.folder / CONFIG}: speculators_version is {version!r}; "
                "only versions 0.x are known"
            )
        return _Form(True, "transformer_layer_config.", "layers.0.")
    if any(name.startswith("midlayer.") for name in checkpoint.names):
        return _Form(True, "", "midlayer.")
    return _Form(False, "", "layers.0.")


def _layout(checkpoint: Checkpoint, target: CausalModel, form: _Form) -> EagleLayout:
    layers = _layers(checkpoint, form.settings, form.first)
    key = f"{form.settings}vocab_size"
    checkpoint.fits(key, checkpoint.integer(key), target.vocab_size, target.name)
    if not form.is_third:
        checkpoint.fits("hidden_size", layers.hidden_size, target.hidden_size, target.name)
        return EagleLayout(layers, target.hidden_size, fc_bias="fc.bias" in checkpoint.names)
    width = checkpoint.integer("target_hidden_size", layers.hidden_size)
    checkpoint.fits("target_hidden_size", width, target.hidden_size, target.name)
    checkpoint.require("norm_before_fc", checkpoint.flag("norm_before_fc", False), (False,))
    return EagleLayout(
        layers,
        target.hidden_size,
        _target_layers(checkpoint, target),
        norm_before_residual=checkpoint.flag("norm_before_residual", False),
    )


def _load_eagle(checkpoint: Checkpoint, target: CausalModel, layout: EagleLayout) -> EagleHead:
    draft_tokens = None
    if "d2t" in checkpoint.names:
        draft_tokens = _draft_tokens(checkpoint, checkpoint.shape("d2t")[0], target)
    head = EagleHead(layout, draft_tokens)
    _fill(head, checkpoint, target, {})
    return head


def _load_eagle3(
    checkpoint: Checkpoint, target: CausalModel, layout: EagleLayout, form: _Form
) -> Eagle3Head:
    hidden_size = layout.layers.hidden_size
    own_embedding = None
    if "embed_tokens.weight" in checkpoint.names:
        own_embedding = checkpoint.tensor(
            "embed_tokens.weight", (target.vocab_size, hidden_size), dtype=target.dtype
        )
        shared = cast(Any, target.model.get_input_embeddings()).weight
        if own_embedding.shape == shared.shape and torch.equal(own_embedding, shared.cpu()):
            own_embedding = None
    elif hidden_size != target.hidden_size:
        raise ModelError(
            f"{checkpoint.folder}: tensor embed_tokens.weight is missing; the head is "
            f"{hidden_size} wide and cannot take the target's, which is {target.hidden_size}"
        )
    draft_vocab_size = checkpoint.integer("draft_vocab_size", target.vocab_size)
    draft_tokens = None
    if draft_vocab_size != target.vocab_size or "d2t" in checkpoint.names:
        draft_tokens = _draft_tokens(checkpoint, draft_vocab_size, target)
    head = Eagle3Head(
        layout, draft_vocab_size, draft_tokens=draft_tokens, embed_tokens=own_embedding
    )
    names = {"first.": form.first}
    names |= {f"layers.{n}.": f"layers.{n + 1}." for n in range(layout.num_layers - 1)}
    _fill(head, checkpoint, target, names)
    return head


def _layers(checkpoint: Checkpoint, prefix: str, first: str) -> LlamaConfig:
    """The decoder layers' configuration; whether they have biases is told by the tensors."""
    family = checkpoint.text(f"{prefix}model_type", "llama")
    checkpoint.require(f"{prefix}model_type", family, LAYER_FAMILIES)
    settings: dict[str, Any] = {key: checkpoint.integer(prefix + key) for key in _SIZES}
    section: Mapping[str, Any] = checkpoint.config
    if prefix:
        section = section[prefix.removesuffix(".")]
    settings |= {key: section[key] for key in _OTHER_SETTINGS if section.get(key) is not None}
    settings["attention_bias"] = f"{first}self_attn.q_proj.bias" in checkpoint.names
    try:
        config = LlamaConfig.from_dict(settings)
    except Exception as error:  # whatever transformers' validation raises
        raise ModelError(f"{checkpoint.folder / CONFIG}: not a Llama's layers ({error})") from error
    rope = cast(Any, config).rope_parameters["rope_type"]
    if rope in LENGTH_DEPENDENT_ROPE:
        raise ModelError(
            f"{checkpoint.folder / CONFIG}: rope_type is {rope!r}, whose rotation depends on the "
            "longest request of a batch; such heads cannot be run in batches"
        )
    return config


def _target_layers(checkpoint: Checkpoint, target: CausalModel) -> tuple[int, ...]:
    """Layers whose outputs an EAGLE-3 head takes, 0 being the embedding.

    vLLM counts like this. SGLang, which reads ``eagle_config``, counts the first layer's output as
    0. Without either the head was trained on the published ones: early, middle and late.
    """
    count, shift, key = target.num_layers, 0, AUX_LAYERS
    found = checkpoint.config.get(AUX_LAYERS)
    nested = checkpoint.config.get("eagle_config")
    if found is None and isinstance(nested, Mapping) and nested.get(AUX_LAYERS) is not None:
        found, shift, key = nested[AUX_LAYERS], 1, f"eagle_config.{AUX_LAYERS}"
    if found is None:
        return (2, count // 2, count - 3)
    if not isinstance(found, list) or not all(
        isinstance(each, int) and 0 <= each + shift <= count for each in found
    ):
        raise ModelError(
            f"{checkpoint.folder / CONFIG}: {key} is {found!r}; it must be a list of layers "
            f"from 0 to {count - shift}"
        )
    return tuple(each + shift for each in found)


def _draft_tokens(checkpoint: Checkpoint, count: int, target: CausalModel) -> torch.Tensor:
    """The target's ids [count] of the tokens that a head can draft."""
    tokens = checkpoint.tensor("d2t", (count,)).long() + torch.arange(count)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= target.vocab_size or len(tokens.unique()) < count:
        raise ModelError(
            f"{checkpoint.folder}: tensor d2t maps {count} tokens to {len(tokens.unique())} from "
            f"{low} to {high}; allowed are different ones from 0 to {target.vocab_size - 1}"
        )
    if "t2d" in checkpoint.names:
        known = checkpoint.tensor("t2d", (target.vocab_size,)).bool()
        if int(known.sum()) != count or not bool(known[tokens].all()):
            raise ModelError(
                f"{checkpoint.folder}: tensor t2d marks {int(known.sum())} tokens, which are not "
                f"the {count} of d2t"
            )
    return tokens


def _fill(
    head: nn.Module, checkpoint: Checkpoint, target: CausalModel, names: Mapping[str, str]
) -> None:
    """Load every weight; ``names`` says which beginnings are called differently in the file."""
    state = {}
    for name, parameter in head.state_dict().items():
        if name.startswith("embed_tokens."):
            state[name] = parameter
            continue
        stored = name
        for ours, theirs in names.items():
            if name.startswith(ours):
                stored = theirs + name.removeprefix(ours)
        if name.endswith("o_proj.bias") and stored not in checkpoint.names:
            state[name] = torch.zeros(parameter.shape, dtype=target.dtype)  # Qwen2 has none
            continue
        state[name] = checkpoint.tensor(stored, tuple(parameter.shape), dtype=target.dtype)
    head.load_state_dict(state, assign=True)
