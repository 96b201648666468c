"""Random EAGLE heads for tiny targets, written as they are published, and their slow forwards.

Names and shapes: SafeAILab/EAGLE ``eagle/model/cnets1.py`` (EAGLE-1 and -2) and
``eagle/model/cnets.py`` (EAGLE-3); vllm-project/speculators ``models/eagle3/core.py``,
``config.py`` and ``model_definitions.py``. Which layers EAGLE-3 takes: vLLM ``models/llama.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.engine.tiny_models import CAPACITY, SIZES, VOCAB
from tests.proposers.head_folders import Tensors, write_head

HIDDEN = int(SIZES["hidden_size"])
HEADS, KV_HEADS, HEAD_DIM, INNER = 2, 1, 12, 20
THETA, EPSILON = 5000.0, 1e-5


def draft_vocab(vocab: int) -> int:
    """How many tokens the EAGLE-3 heads here know."""
    return vocab - vocab // 4


def target_model(seed: int = 0, layers: int = 6) -> PreTrainedModel:
    """A random Llama in float64, deep enough for EAGLE-3's three layers to differ."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": layers}))
    model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.0 if "embed" in name or "lm_head" in name else 0.25)
    model.eval()
    return model


def layer_settings(hidden: int = HIDDEN, layers: int = 1, vocab: int = VOCAB) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "max_position_embeddings": CAPACITY,
        "vocab_size": vocab,
    }


def layer_tensors(
    random: Any, prefix: str, inputs: int, hidden: int = HIDDEN, biases: bool = False
) -> Tensors:
    sizes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, inputs),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.o_proj": (hidden, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, hidden),
        "mlp.up_proj": (INNER, hidden),
        "mlp.down_proj": (hidden, INNER),
    }
    tensors = {f"{prefix}{name}.weight": random(*shape) for name, shape in sizes.items()}
    tensors[f"{prefix}post_attention_layernorm.weight"] = 1.0 + random(hidden)
    if biases:
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{prefix}self_attn.{name}.bias"] = random(sizes[f"self_attn.{name}"][0])
    return tensors


def generator(seed: int) -> Any:
    source = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=source, dtype=torch.float64) * 0.3


@dataclass(frozen=True)
class Published:
    """A head as it lies in its folder."""

    folder: Path
    config: dict[str, Any]
    tensors: Tensors

    @classmethod
    def write(cls, folder: Path, config: dict[str, Any], tensors: Tensors) -> Published:
        return cls(write_head(folder, config, tensors), config, tensors)


def eagle_1(
    folder: Path,
    *,
    layers: int = 1,
    biases: bool = False,
    d2t: bool = False,
    vocab: int = VOCAB,
) -> Published:
    random = generator(11)
    tensors = {
        "fc.weight": random(HIDDEN, 2 * HIDDEN),
        "embed_tokens.weight": random(vocab, HIDDEN),
    }
    for number in range(layers):
        prefix = f"layers.{number}."
        tensors |= layer_tensors(random, prefix, HIDDEN, biases=biases)
        if number:
            tensors[f"{prefix}input_layernorm.weight"] = 1.0 + random(HIDDEN)
    if biases:
        tensors["fc.bias"] = random(HIDDEN)
    if d2t:
        tensors["d2t"] = draft_offsets(vocab)
    config = {"architectures": ["LlamaForCausalLM"], "bias": biases}
    config |= layer_settings(layers=layers, vocab=vocab)
    return Published.write(folder, config, tensors)


def eagle_3(folder: Path, *, hidden: int = HIDDEN, vocab: int = VOCAB) -> Published:
    """``hidden`` other than the target's needs an embedding of its own."""
    random = generator(12)
    tensors = eagle_3_tensors(random, "midlayer.", hidden, vocab)
    config = layer_settings(hidden, vocab=vocab) | {
        "architectures": ["LlamaForCausalLM"],
        "draft_vocab_size": draft_vocab(vocab),
    }
    if hidden != HIDDEN:
        tensors["embed_tokens.weight"] = random(vocab, hidden)
        config["target_hidden_size"] = HIDDEN
    return Published.write(folder, config, tensors)


def eagle_3_of_speculators(
    folder: Path, *, layers: int = 1, norm_before_residual: bool = True
) -> Published:
    random = generator(13)
    tensors = eagle_3_tensors(random, "layers.0.", HIDDEN, VOCAB)
    tensors["embed_tokens.weight"] = random(VOCAB, HIDDEN)
    for number in range(1, layers):
        tensors |= layer_tensors(random, f"layers.{number}.", HIDDEN)
        tensors[f"layers.{number}.input_layernorm.weight"] = 1.0 + random(HIDDEN)
    config = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": draft_vocab(VOCAB),
        "eagle_aux_hidden_state_layer_ids": [1, 2, 5],
        "norm_before_residual": norm_before_residual,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "tiny"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0.dev14",
        "target_hidden_size": None,
        "transformer_layer_config": layer_settings(layers=layers),
    }
    return Published.write(folder, config, tensors)


def eagle_3_tensors(random: Any, first: str, hidden: int, vocab: int) -> Tensors:
    tensors = layer_tensors(random, first, 2 * hidden, hidden)
    tensors[f"{first}input_layernorm.weight"] = 1.0 + random(hidden)
    tensors[f"{first}hidden_norm.weight"] = 1.0 + random(hidden)
    tensors["fc.weight"] = random(hidden, 3 * HIDDEN)
    tensors["norm.weight"] = 1.0 + random(hidden)
    tensors["lm_head.weight"] = 3.0 * random(draft_vocab(vocab), hidden)
    tensors["d2t"] = draft_offsets(vocab)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool)
    tensors["t2d"][tensors["d2t"] + torch.arange(draft_vocab(vocab))] = True
    return tensors


def draft_offsets(vocab: int) -> torch.Tensor:
    tokens = np.sort(np.random.default_rng(3).permutation(vocab)[: draft_vocab(vocab)])
    return torch.from_numpy(tokens) - torch.arange(len(tokens))


# The published forwards, one sequence, no cache -------------------------------------------------


def norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * values / torch.sqrt((values**2).mean(dim=-1, keepdim=True) + EPSILON)


def rotated(values: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [tokens, heads, head_dim]."""
    half = HEAD_DIM // 2
    frequencies = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(values), dtype=torch.float64)[:, None] * frequencies
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    left, right = values[..., :half], values[..., half:]
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


def attention(inputs: torch.Tensor, tensors: Tensors, prefix: str) -> torch.Tensor:
    def projected(name: str, heads: int) -> torch.Tensor:
        flat = inputs @ tensors[f"{prefix}self_attn.{name}.weight"].T
        if f"{prefix}self_attn.{name}.bias" in tensors:
            flat = flat + tensors[f"{prefix}self_attn.{name}.bias"]
        return flat.view(len(inputs), heads, HEAD_DIM)

    query, key = rotated(projected("q_proj", HEADS)), rotated(projected("k_proj", KV_HEADS))
    value = projected("v_proj", KV_HEADS)
    outputs = torch.zeros(len(inputs), HEADS, HEAD_DIM, dtype=torch.float64)
    for head in range(HEADS):
        shared = head * KV_HEADS // HEADS
        for token in range(len(inputs)):
            scores = key[: token + 1, shared] @ query[token, head] / HEAD_DIM**0.5
            outputs[token, head] = scores.softmax(dim=0) @ value[: token + 1, shared]
    return outputs.reshape(len(inputs), -1) @ tensors[f"{prefix}self_attn.o_proj.weight"].T


def finished(hidden: torch.Tensor, tensors: Tensors, prefix: str) -> torch.Tensor:
    """The second half of a decoder layer."""
    normed = norm(hidden, tensors[f"{prefix}post_attention_layernorm.weight"])
    gate = silu(normed @ tensors[f"{prefix}mlp.gate_proj.weight"].T)
    up = normed @ tensors[f"{prefix}mlp.up_proj.weight"].T
    return hidden + (gate * up) @ tensors[f"{prefix}mlp.down_proj.weight"].T


def plain_layers(hidden: torch.Tensor, tensors: Tensors, first: int) -> torch.Tensor:
    number = first
    while f"layers.{number}.mlp.up_proj.weight" in tensors:
        prefix = f"layers.{number}."
        inputs = hidden
        if f"{prefix}input_layernorm.weight" in tensors:
            inputs = norm(hidden, tensors[f"{prefix}input_layernorm.weight"])
        hidden = finished(hidden + attention(inputs, tensors, prefix), tensors, prefix)
        number += 1
    return hidden


def slow_eagle_1(embeddings: torch.Tensor, states: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """States one token on [tokens, hidden]; arXiv 2401.15077, section 4.1."""
    hidden = torch.cat((embeddings, states), dim=-1) @ tensors["fc.weight"].T
    if "fc.bias" in tensors:
        hidden = hidden + tensors["fc.bias"]
    return plain_layers(hidden, tensors, 0)


def slow_eagle_3(
    embeddings: torch.Tensor, states: torch.Tensor, tensors: Tensors, norm_first: bool
) -> torch.Tensor:
    """States one token on [tokens, hidden]; arXiv 2503.01840, section 3.1."""
    first = "midlayer." if "midlayer.mlp.up_proj.weight" in tensors else "layers.0."
    normed = norm(states, tensors[f"{first}hidden_norm.weight"])
    both = torch.cat((norm(embeddings, tensors[f"{first}input_layernorm.weight"]), normed), dim=-1)
    hidden = (normed if norm_first else states) + attention(both, tensors, first)
    return plain_layers(finished(hidden, tensors, first), tensors, 1)


def slow_drafts(
    head: Published, model: PreTrainedModel, tokens: list[int], k: int
) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy drafts behind ``tokens`` and the distributions [vocab] they were chosen from."""
    tensors, config = head.tensors, head.config
    is_third = "lm_head.weight" in tensors
    with torch.inference_mode():
        hidden = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        embedding = cast(torch.Tensor, model.get_input_embeddings().weight)
        output = cast(torch.Tensor, model.get_output_embeddings().weight)
        if is_third and "embed_tokens.weight" in tensors:
            embedding = tensors["embed_tokens.weight"]
        if is_third:
            ids = config.get("eagle_aux_hidden_state_layer_ids") or [2, 3, 3]
            fused = torch.cat([hidden[layer][0] for layer in ids], dim=-1)
            states = fused @ tensors["fc.weight"].T
        else:
            states = hidden[-1][0]
        sequence = list(tokens)
        drafts: list[int] = []
        distributions = []
        known = torch.arange(VOCAB)
        if "d2t" in tensors:
            known = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        for _ in range(k):
            embeddings = embedding[torch.tensor(sequence[1:])]
            if is_third:
                norm_first = bool(config.get("norm_before_residual", False))
                result = slow_eagle_3(embeddings, states, tensors, norm_first)
                logits = tensors["lm_head.weight"] @ norm(result[-1], tensors["norm.weight"])
            else:
                result = slow_eagle_1(embeddings, states, tensors)
                logits = output[known] @ result[-1]
            probs = torch.zeros(VOCAB, dtype=torch.float64)
            probs[known] = logits.softmax(dim=0)
            distributions.append(probs)
            drafts.append(int(probs.argmax()))
            sequence.append(drafts[-1])
            states = torch.cat((states, result[-1:]))
    return drafts, distributions
