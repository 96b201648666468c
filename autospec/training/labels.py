"""What a head is to learn: at every recorded position, the target's likeliest next tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autospec.engine.model import CausalModel
from autospec.training.recording import Recording

TOP = 16
"""Tokens of the target's distribution that are kept; the rest of it is left out."""

_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Labels:
    """``choices`` are the target's likeliest tokens. Among the tokens that a head can draft,
    ``columns`` are the likeliest ones and ``probs`` their probabilities, which sum to 1."""

    choices: torch.Tensor  # [tokens]
    probs: torch.Tensor  # [tokens, top]
    columns: torch.Tensor  # [tokens, top], int32


def target_choices(recording: Recording, target: CausalModel) -> torch.Tensor:
    """The target's likeliest next token [tokens] after every token of a recording."""
    last = recording.hidden[:, -1]
    with torch.inference_mode():
        parts = [
            target.logits(part.to(target.device)).max(dim=-1).indices.cpu()
            for part in last.split(_CHUNK)
        ]
    return torch.cat(parts)


def frequent_tokens(choices: torch.Tensor, count: int, vocab_size: int) -> torch.Tensor:
    """The ``count`` tokens that are chosen most often, in that order.

    Where fewer were chosen at all, low ids fill up: tokenizers number their tokens by frequency.
    """
    times = torch.bincount(choices, minlength=vocab_size)
    return times.sort(descending=True, stable=True).indices[:count]


def make_labels(
    recording: Recording, choices: torch.Tensor, rows: torch.Tensor, device: torch.device
) -> Labels:
    """Labels over the tokens whose output rows are ``rows`` [columns, hidden_size]."""
    top = min(TOP, len(rows))
    probs, columns = [], []
    with torch.inference_mode():
        for part in recording.hidden[:, -1].split(_CHUNK):
            likely = (part.to(device) @ rows.T).float().softmax(dim=-1).topk(top, dim=-1)
            probs.append((likely.values / likely.values.sum(dim=-1, keepdim=True)).cpu())
            columns.append(likely.indices.int().cpu())
    return Labels(choices, torch.cat(probs), torch.cat(columns))
