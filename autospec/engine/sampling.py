"""Sampling as pure functions over rows of logits, each row with its own settings.

The filters apply in the order of transformers: temperature, top-k, top-p, min-p, each on what the
one before has left. Tokens of equal probability at a cut are all kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from autospec.errors import InputError
from autospec.records import Float64Array, Int64Array

UInt64Array = NDArray[np.uint64]

_NUCLEUS_GUESS = 256
"""Candidates looked at first for top-p; rows with a flatter distribution are sorted whole."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How one request samples. Temperature 0 is greedy, and then the filters have no effect.

    ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch that filter off. Requests without a seed get
    one from the decoder.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise InputError(f"temperature is {self.temperature!r}; it must be 0 (greedy) or above")
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k!r}; it must be 0 (off) or above")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top_p is {self.top_p!r}; it must be above 0 and at most 1 (off)")
        if not 0.0 <= self.min_p <= 1.0:
            raise InputError(f"min_p is {self.min_p!r}; it must be from 0 (off) to 1")


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The settings of many rows as arrays; ``temperature`` 0 marks a greedy row.

    ``seed`` and ``draw``, the tokens that it has got, number the random numbers of a row: equal
    pairs give equal numbers.
    """

    temperature: Float64Array  # [n]
    top_k: Int64Array  # [n]
    top_p: Float64Array  # [n]
    min_p: Float64Array  # [n]
    seed: Int64Array  # [n]
    draw: Int64Array  # [n]

    @classmethod
    def of(cls, parameters: Sequence[SamplingParameters], draw: int = 0) -> SamplingRows:
        """Rows in the order of ``parameters``, all at the same draw."""
        return cls(
            np.array([one.temperature for one in parameters], dtype=np.float64),
            np.array([one.top_k for one in parameters], dtype=np.int64),
            np.array([one.top_p for one in parameters], dtype=np.float64),
            np.array([one.min_p for one in parameters], dtype=np.float64),
            np.array([one.seed or 0 for one in parameters], dtype=np.int64),
            np.full(len(parameters), draw, dtype=np.int64),
        )

    def take(self, rows: Int64Array) -> SamplingRows:
        """The settings of ``rows``, which may repeat."""
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seed[rows],
            self.draw[rows],
        )

    def ahead(self, tokens: Int64Array) -> SamplingRows:
        """The settings as they are once each row has got so many ``tokens`` [n] more."""
        return replace(self, draw=self.draw + tokens)


def filtered_probabilities(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Probabilities [n, vocab] that row ``i`` samples from; every temperature must be above 0.

    In float32, or in float64 for float64 logits.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    device = logits.device
    temperature = torch.from_numpy(rows.temperature).to(device=device, dtype=dtype)
    probs = torch.softmax(logits.to(dtype) / temperature[:, None], dim=-1)
    has_top_k, has_top_p = bool(rows.top_k.any()), bool((rows.top_p < 1.0).any())
    has_min_p = bool(rows.min_p.any())
    if not (has_top_k or has_top_p or has_min_p):
        return probs
    threshold = torch.zeros(len(probs), dtype=dtype, device=device)
    if has_min_p:
        min_p = torch.from_numpy(rows.min_p).to(device=device, dtype=dtype)
        threshold = min_p * probs.amax(dim=-1)
    if has_top_k or has_top_p:
        threshold = torch.maximum(threshold, _rank_threshold(probs, rows))
    kept = probs.masked_fill_(probs < threshold[:, None], 0.0)
    return kept.div_(kept.sum(dim=-1, keepdim=True))


def _rank_threshold(probs: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The smallest probability [n] that top-k and then top-p keep."""
    vocab = probs.shape[1]
    top_k = torch.from_numpy(np.where(rows.top_k > 0, np.minimum(rows.top_k, vocab), vocab)).to(
        probs.device
    )
    top_p = torch.from_numpy(rows.top_p).to(device=probs.device, dtype=probs.dtype)
    deepest = int(rows.top_k.max(initial=0))
    width = min(vocab, max(deepest, _NUCLEUS_GUESS))
    threshold, complete = _threshold_among(probs, probs.topk(width, dim=-1).values, top_k, top_p)
    if width < vocab and not bool(complete.all()):
        flat = (~complete).nonzero()[:, 0]
        ranked = probs[flat].sort(dim=-1, descending=True).values
        threshold[flat], _ = _threshold_among(probs[flat], ranked, top_k[flat], top_p[flat])
    return threshold


def _threshold_among(
    probs: torch.Tensor, largest: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Threshold [n] found among the ``largest`` [n, width], and whether it is final."""
    width = largest.shape[1]
    # Rank filter first: what top-k drops does not count towards the nucleus.
    kth = largest.gather(1, (top_k.clamp(max=width) - 1)[:, None])
    by_rank = torch.where((top_k <= width)[:, None], kth, torch.zeros_like(kth))
    # Ties with the k-th are kept, so the mass is that of every token at or above it.
    mass = torch.where(probs >= by_rank, probs, torch.zeros_like(probs)).sum(dim=-1, keepdim=True)
    before = largest.cumsum(dim=-1) - largest
    # The largest always stays, also where top_p is below its rounding.
    kept = (before < top_p[:, None] * mass) & (largest >= by_rank)
    last = kept.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    off = (top_p >= 1.0)[:, None]
    by_mass = torch.where(off, torch.zeros_like(kth), largest.gather(1, last))
    complete = (
        (off[:, 0] & (top_k <= width))
        | (last[:, 0] < width - 1)
        | (off[:, 0] & (top_k >= probs.shape[1]))
    )
    return torch.maximum(by_rank, by_mass)[:, 0], complete


def sample(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens [n] drawn from unnormalized ``probs`` [n, vocab] by inverting their cumulative sum."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # A uniform of almost 1 must not round up to the total, behind which there is no token.
    point = torch.minimum(uniforms[:, None] * total, total * (1.0 - 2.0**-52))
    return torch.searchsorted(cumulative, point, right=True)[:, 0].clamp_(max=probs.shape[1] - 1)


def uniforms(rows: SamplingRows, width: int, stream: int) -> Float64Array:
    """Uniform numbers [n, width] in [0, 1), a function of seed, draw, column and ``stream`` alone.

    Counter-based with the finalizer of splitmix64 (Steele et al., 2014), so that the numbers of a
    request depend neither on its batch nor on its slot.
    """
    with np.errstate(over="ignore"):
        key = _mixed(rows.seed.astype(np.uint64) + _GOLDEN)
        key = _mixed(key ^ _mixed(rows.draw.astype(np.uint64) * _GOLDEN + np.uint64(stream + 1)))
        columns = np.arange(1, width + 1, dtype=np.uint64) * _GOLDEN
        bits = _mixed(key[:, None] + columns[None, :])
    numbers: Float64Array = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mixed(value: UInt64Array) -> UInt64Array:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    mixed: UInt64Array = value ^ (value >> np.uint64(31))
    return mixed
