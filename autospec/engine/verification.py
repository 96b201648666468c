"""Lossless verification of draft tokens against the target's own distribution.

Rows keep a draft token where it is the target's choice: the likeliest token, or for rows that
sample the one drawn with the random number of that position, so that a seed's text is the same
whatever is drafted. Drafts that were drawn at random themselves are kept by rejection sampling
(Leviathan et al. 2023; Chen et al. 2023): a draft token x is kept with probability
min(1, p(x) / q(x)); the first rejected one is replaced by a recovered token from max(0, p - q)
normalized; after all were kept a bonus token comes from the last row. A draft without a
distribution of its own is a point mass, q(x) = 1. All functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from autospec.engine.sampling import sample
from autospec.records import Int64Array


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many draft tokens of each row are kept, and the target's own token that follows them."""

    accepted: Int64Array  # [n]
    final: Int64Array  # [n]


def verify_choices(
    choices: Int64Array,  # [rows] the target's choice at each packed row
    offsets: Int64Array,  # [n] first packed row of each request
    drafts: Int64Array,  # [n, k]
    lengths: Int64Array,  # [n] verified draft tokens of each request
) -> Verdict:
    """Keep draft tokens while they equal the target's choices."""
    depth = np.arange(drafts.shape[1])
    valid = depth[None, :] < lengths[:, None]
    rows = np.where(valid, offsets[:, None] + depth[None, :], 0)
    accepted = _leading(valid & (choices[rows] == drafts))
    return Verdict(accepted, choices[offsets + accepted])


def verify_sampled(
    probs: torch.Tensor,  # [rows, vocab] what the target samples from, at each packed row
    offsets: Int64Array,  # [n]
    drafts: Int64Array,  # [n, k]
    lengths: Int64Array,  # [n]
    draft_probs: torch.Tensor | None,  # [d, k, vocab] what the drafts were sampled from
    draft_row: Int64Array,  # [n, k] row of draft_probs, -1 where the draft is a point mass
    uniforms: torch.Tensor,  # [n, k + 1], float64: for the final token, then for each draft
) -> Verdict:
    """Rejection sampling over rows that may mix point masses and sampled drafts, also in one."""
    device = probs.device
    num_rows, depth = drafts.shape
    columns = np.arange(depth)
    valid = columns[None, :] < lengths[:, None]
    first = torch.from_numpy(offsets).to(device)
    dense = torch.from_numpy(draft_row).to(device)
    if depth:
        packed = torch.from_numpy(np.where(valid, offsets[:, None] + columns[None, :], 0)).to(
            device
        )
        tokens = torch.from_numpy(drafts).to(device)
        target_prob = probs[packed, tokens].double()
        draft_prob = torch.ones_like(target_prob)
        if draft_probs is not None:
            # Other proposers may have drafted deeper in this step; those columns are not valid.
            own = torch.from_numpy(np.minimum(columns, draft_probs.shape[1] - 1)).to(device)
            of_row = draft_probs[dense.clamp(min=0), own, tokens]
            draft_prob = torch.where(dense >= 0, of_row.double(), draft_prob)
        kept = accepts(target_prob, draft_prob, uniforms[:, 1:])
        accepted = _leading(valid & kept.cpu().numpy())
    else:
        accepted = np.zeros(num_rows, dtype=np.int64)
    last = probs[first + torch.from_numpy(accepted).to(device)]
    rejected = np.flatnonzero(accepted < lengths)
    if len(rejected):
        last[torch.from_numpy(rejected).to(device)] = _recovered_from(
            last, rejected, accepted, drafts, draft_probs, draft_row
        )
    final = sample(last, uniforms[:, 0])
    return Verdict(accepted, final.cpu().numpy())


def _recovered_from(
    last: torch.Tensor,
    rejected: Int64Array,
    accepted: Int64Array,
    drafts: Int64Array,
    draft_probs: torch.Tensor | None,
    draft_row: Int64Array,
) -> torch.Tensor:
    """Residual distributions [m, vocab] of the ``rejected`` rows, unnormalized."""
    device = last.device
    target = last[torch.from_numpy(rejected).to(device)]
    position = accepted[rejected]
    token = torch.from_numpy(drafts[rejected, position]).to(device)
    draft = torch.zeros_like(target).scatter_(1, token[:, None], 1.0)
    dense = draft_row[rejected, position]
    sampled = np.flatnonzero(dense >= 0)
    if draft_probs is not None and len(sampled):
        of_rows = draft_probs[dense[sampled], position[sampled]]
        draft[torch.from_numpy(sampled).to(device)] = of_rows.to(draft.dtype)
    return residual(target, draft)


def accepts(
    target_prob: torch.Tensor, draft_prob: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Whether to keep tokens of probability ``target_prob`` drafted with ``draft_prob``."""
    return uniform * draft_prob < target_prob


def residual(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """max(0, p - q) [n, vocab], unnormalized; p where rounding has left nothing of it."""
    difference = (target - draft).clamp_(min=0.0)
    empty = difference.sum(dim=-1, keepdim=True) <= 0.0
    return torch.where(empty, target, difference)


def _leading(kept: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Int64Array:
    """How many leading values of each row [n, k] are true."""
    count: Int64Array = np.logical_and.accumulate(kept, axis=1).sum(axis=1, dtype=np.int64)
    return count
