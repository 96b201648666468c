"""EAGLE heads: decoder layers that go on from the target's hidden states.

Entry ``i`` of a sequence combines the embedding of token ``i + 1`` with the target's state at token
``i``. Its output stands for the target's state at token ``i + 1`` and predicts token ``i + 2``. In
drafting, outputs are fed back where the target has not been yet.

To train one, run it over whole sequences with the target's states (teacher forcing):

    head = EagleHead(layout).float()
    step = CausalSequences([len(tokens) - 1 for tokens in sequences])
    states = head(embeddings, head.fuse(features), step)  # [entries, hidden_size]
    logits = linear(states, target.output_rows(tokens))  # [entries, draft vocab]

with ``embeddings`` those of all tokens but the first of each sequence (``target.embed``), and
``features`` the target's states [entries, layers, hidden_size] of all tokens but the last, both
concatenated over the sequences. ``save_eagle`` of ``eagle_files`` writes the result.

Sources: Li et al. 2024 (EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858), Li et al. 2025
(EAGLE-3, arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from autospec.engine.attention import ATTENTION_NAME, AttentionStep
from autospec.engine.model import CausalModel
from autospec.engine.packing import PackedLinear, can_pack, pack_linears


class CausalSequences:
    """Whole sequences in one forward, concatenated, without a cache and with gradients."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._lengths = list(lengths)
        self.positions = torch.cat(
            [torch.arange(length, device=device) for length in lengths]
        ).unsqueeze(0)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Attend within each sequence to what came before."""
        folds = query.shape[1] // key.shape[1]
        parts = [part.split(self._lengths, dim=2) for part in (query, key, value)]
        attended = [
            scaled_dot_product_attention(
                queries,
                keys.repeat_interleave(folds, dim=1),
                values.repeat_interleave(folds, dim=1),
                is_causal=True,
                scale=scaling,
            )
            for queries, keys, values in zip(*parts, strict=True)
        ]
        return torch.cat(attended, dim=2).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class EagleLayout:
    """What a head is made of.

    ``layers`` is the configuration of its decoder layers. ``target_layers`` are the layers whose
    outputs it takes (0 the embedding's, -1 the last after its norm), each ``target_hidden_size``
    wide. ``fc_bias`` belongs to EAGLE-1 and EAGLE-2, ``norm_before_residual`` to EAGLE-3, where it
    puts the state's norm before the first residual.
    """

    layers: LlamaConfig
    target_hidden_size: int
    target_layers: tuple[int, ...] = (-1,)
    fc_bias: bool = False
    norm_before_residual: bool = False

    @property
    def num_layers(self) -> int:
        return self.layers.num_hidden_layers

    @property
    def kv_heads(self) -> int:
        return cast(int, self.layers.num_key_value_heads)

    @property
    def head_dim(self) -> int:
        return cast(int, self.layers.head_dim)

    @property
    def feature_size(self) -> int:
        """Numbers that a head takes of each position of the target."""
        return len(self.target_layers) * self.target_hidden_size

    def state_bytes(self, slots: int, capacity: int, dtype: torch.dtype) -> int:
        """Bytes that drafting keeps beside the weights: a cache, and the target's states."""
        keys_and_values = 2 * self.num_layers * self.kv_heads * self.head_dim
        return slots * capacity * (keys_and_values + self.feature_size) * dtype.itemsize


class EagleHead(nn.Module):
    """An EAGLE-1 or EAGLE-2 head: ``fc`` over [embedding, state], then decoder layers.

    The first layer has no input norm and there is none behind the last. Logits are the target's
    output rows over the result. ``draft_tokens`` [draft vocab] are the tokens that the head can
    draft, None for all.
    """

    def __init__(self, layout: EagleLayout, draft_tokens: torch.Tensor | None = None) -> None:
        super().__init__()
        config = packed_config(layout.layers)
        self.layout = layout
        self.draft_tokens = draft_tokens
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=layout.fc_bias)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.layers[0].input_layernorm = nn.Identity()
        # Not a registered module: its frequencies stay in float32 whatever the head is cast to.
        self._rotate = LlamaRotaryEmbedding(config).forward
        self._embed: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._project: Callable[[torch.Tensor], torch.Tensor] | None = None

    def attach(self, target: CausalModel) -> None:
        """Make ready for drafting: frozen, on the target's device and in its dtype."""
        freeze(self, target)
        self._embed = target.embed
        self._project = target.logits
        if self.draft_tokens is not None:
            self.draft_tokens = self.draft_tokens.to(target.device)
            self._project = projection(target.output_rows(self.draft_tokens))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """States [tokens, hidden_size] from the target's [tokens, layers, hidden_size]."""
        return features.flatten(1)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [tokens, hidden_size]."""
        assert self._embed is not None
        return self._embed(tokens)

    def forward(
        self,
        embeddings: torch.Tensor,  # [tokens, hidden_size] of the tokens that follow
        states: torch.Tensor,  # [tokens, hidden_size]
        step: AttentionStep,
    ) -> torch.Tensor:
        """States [tokens, hidden_size] one token on."""
        hidden = self.fc(torch.cat((embeddings, states), dim=-1)).unsqueeze(0)
        rotation = self._rotate(hidden, step.positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotation, packed=step)
        return cast(torch.Tensor, hidden[0])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, draft vocab] of the tokens that follow, once attached."""
        assert self._project is not None
        return self._project(states)


class FirstLayer(LlamaDecoderLayer):
    """EAGLE-3's first decoder layer, whose attention reads the embedding and the state at once."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__(config, 0)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._norm_before_residual = norm_before_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            single = getattr(self.self_attn, name)
            double = nn.Linear(
                2 * config.hidden_size, single.out_features, bias=single.bias is not None
            )
            setattr(self.self_attn, name, double)

    def combine(
        self,
        embeddings: torch.Tensor,  # [1, tokens, hidden_size]
        states: torch.Tensor,  # [1, tokens, hidden_size]
        rotation: tuple[torch.Tensor, torch.Tensor],
        step: AttentionStep,
    ) -> torch.Tensor:
        """The layer's output [1, tokens, hidden_size]."""
        normed = self.hidden_norm(states)
        residual = normed if self._norm_before_residual else states
        both = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        attended, _ = self.self_attn(both, position_embeddings=rotation, packed=step)
        hidden = residual + attended
        return cast(torch.Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))


class Eagle3Head(nn.Module):
    """An EAGLE-3 head: states of several target layers fused by ``fc``, and an output of its own.

    ``draft_tokens`` as for EagleHead; ``embed_tokens`` [vocab, hidden_size] is an embedding of its
    own, None for the target's.
    """

    def __init__(
        self,
        layout: EagleLayout,
        draft_vocab_size: int,
        *,
        draft_tokens: torch.Tensor | None = None,
        embed_tokens: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        config = packed_config(layout.layers)
        self.layout = layout
        self.draft_tokens = draft_tokens
        self.fc = nn.Linear(layout.feature_size, config.hidden_size, bias=False)
        self.first = FirstLayer(config, layout.norm_before_residual)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, index) for index in range(1, config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False)
        self.embed_tokens = (
            None if embed_tokens is None else nn.Embedding.from_pretrained(embed_tokens)
        )
        # Not a registered module: its frequencies stay in float32 whatever the head is cast to.
        self._rotate = LlamaRotaryEmbedding(config).forward
        self._embed: Callable[[torch.Tensor], torch.Tensor] | None = None

    def attach(self, target: CausalModel) -> None:
        """Make ready for drafting: frozen, on the target's device and in its dtype."""
        freeze(self, target)
        self._embed = self.embed_tokens or target.embed
        if self.draft_tokens is not None:
            self.draft_tokens = self.draft_tokens.to(target.device)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """States [tokens, hidden_size] from the target's [tokens, layers, target_hidden_size]."""
        return cast(torch.Tensor, self.fc(features.flatten(1)))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [tokens, hidden_size]."""
        assert self._embed is not None
        return self._embed(tokens)

    def forward(
        self,
        embeddings: torch.Tensor,  # [tokens, hidden_size] of the tokens that follow
        states: torch.Tensor,  # [tokens, hidden_size]
        step: AttentionStep,
    ) -> torch.Tensor:
        """States [tokens, hidden_size] one token on."""
        rotation = self._rotate(states.unsqueeze(0), step.positions)
        hidden = self.first.combine(embeddings.unsqueeze(0), states.unsqueeze(0), rotation, step)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotation, packed=step)
        return hidden[0]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, draft vocab] of the tokens that follow."""
        return cast(torch.Tensor, self.lm_head(self.norm(states)))


def packed_config(config: LlamaConfig) -> LlamaConfig:
    """A copy whose layers call the packed attention."""
    own = LlamaConfig.from_dict(config.to_dict())
    cast(Any, own)._attn_implementation = ATTENTION_NAME
    return own


def freeze(head: nn.Module, target: CausalModel) -> None:
    """Move a head to its target for inference; on CPU its linear layers are repacked."""
    head.eval()
    head.requires_grad_(False)
    head.to(device=target.device, dtype=target.dtype)
    if can_pack(target.device, target.dtype):
        pack_linears(head)


def projection(rows: torch.Tensor) -> nn.Module:
    """A frozen linear layer with ``rows`` [out, in] for its weight."""
    layer = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(rows, requires_grad=False)
    return PackedLinear(layer) if can_pack(rows.device, rows.dtype) else layer
