"""Recurrent MLP heads: from a state and the token that followed it, the next state and its logits.

Two of them: the published speculators of IBM (Wertheimer et al. 2024, arXiv 2404.19124), with
embeddings and output rows of their own for each step, and AutoSpec's, which uses the target's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import gelu, linear, rms_norm, silu

from autospec.engine.model import CausalModel
from autospec.engine.packing import PackedLinear, can_pack, pack_linears


class MlpNetwork(Protocol):
    """What drafting needs of a head; ``token_ids`` [columns] names its logits, None for all."""

    token_ids: torch.Tensor | None

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """The state [n, hidden_size] that drafting starts from, of the target's last layer."""
        ...

    def advance(
        self, depth: int, state: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The state after ``tokens`` [n] and the logits [n, columns] of what follows them."""
        ...


_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class PublishedLayout:
    """The sizes in a published configuration. ``inner_dim`` is never 0 here."""

    vocab_size: int
    emb_dim: int
    inner_dim: int
    n_predict: int
    tie_weights: bool
    scale_input: bool


class PublishedNetwork(nn.Module):
    """One stage per drafted token, each with embedding, projection, norm and output rows.

    With ``tie_weights`` all stages are one, but for the projection of the first.
    """

    token_ids: torch.Tensor | None = None

    def __init__(self, layout: PublishedLayout) -> None:
        super().__init__()
        self.layout = layout
        stages = 1 if layout.tie_weights else layout.n_predict
        projections = min(2, layout.n_predict) if layout.tie_weights else layout.n_predict
        inner = layout.inner_dim
        self.emb = nn.ParameterList(torch.zeros(layout.vocab_size, inner) for _ in range(stages))
        self.proj = nn.ParameterList(
            torch.zeros(inner, layout.emb_dim if stage == 0 else inner)
            for stage in range(projections)
        )
        self.head = nn.ParameterList(torch.zeros(layout.vocab_size, inner) for _ in range(stages))
        self.scale = nn.ParameterList(torch.ones(inner) for _ in range(stages))
        self.shift = nn.ParameterList(torch.zeros(inner) for _ in range(stages))
        state_weight = 0.5 ** (0.5 / layout.n_predict)
        self._token_share = math.sqrt((1.0 - state_weight**2) * (inner / 2)) / state_weight

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.layout.scale_input:
            return hidden
        return rms_norm(hidden, hidden.shape[-1:], eps=_EPSILON) / math.sqrt(2.0)

    def advance(
        self, depth: int, state: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stage = min(depth, len(self.emb) - 1)
        mixed = linear(state, self.proj[min(depth, len(self.proj) - 1)])
        mixed = mixed + self._token_share * self.emb[stage][tokens]
        normed = rms_norm(mixed, mixed.shape[-1:], eps=_EPSILON)
        state = gelu(normed * self.scale[stage] + self.shift[stage])
        return state, linear(state, self.head[stage])


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """The sizes of AutoSpec's own head."""

    hidden_size: int
    inner_size: int


class SharedNetwork(nn.Module):
    """A linear map and a gated MLP over [state, token], both normed; a norm behind it.

    Its outputs stand for the target's normed states, so the target's own rows make logits of them.
    """

    def __init__(self, layout: SharedLayout) -> None:
        super().__init__()
        self.layout = layout
        size, inner = layout.hidden_size, layout.inner_size
        self.state_norm = nn.Parameter(torch.ones(size))
        self.token_norm = nn.Parameter(torch.ones(size))
        self.output_norm = nn.Parameter(torch.ones(size))
        self.base = nn.Linear(2 * size, size, bias=False)
        self.gate = nn.Linear(2 * size, inner, bias=False)
        self.up = nn.Linear(2 * size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The state [n, hidden_size] after the tokens ``embedded`` [n, hidden_size]."""
        joined = torch.cat(
            (_normed(state, self.state_norm), _normed(embedded, self.token_norm)), dim=-1
        )
        mixed = self.base(joined) + self.down(silu(self.gate(joined)) * self.up(joined))
        return _normed(mixed, self.output_norm)


class SharedDrafter:
    """A shared network with the embeddings and output rows of its target."""

    def __init__(
        self, network: SharedNetwork, target: CausalModel, token_ids: torch.Tensor
    ) -> None:
        self.token_ids: torch.Tensor | None = token_ids
        self._network = network
        self._target = target
        rows = target.output_rows(token_ids)
        output = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        output.weight = nn.Parameter(rows, requires_grad=False)
        self._output: nn.Module = output
        if can_pack(target.device, target.dtype):
            pack_linears(network)
            self._output = PackedLinear(output)

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def advance(
        self, depth: int, state: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = self._network(state, self._target.embed(tokens))
        logits: torch.Tensor = self._output(state)
        return state, logits


def _normed(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(values, values.shape[-1:], weight.to(values.dtype), eps=_EPSILON)
