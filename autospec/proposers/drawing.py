"""Choosing draft tokens from a draft's logits, depth by depth, for greedy and sampled rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from autospec.engine.drafting import DRAFT_STREAM, DraftTask, ModelDrafts
from autospec.engine.sampling import filtered_probabilities, sample, uniforms
from autospec.records import Float32Array, Int16Array, Int64Array


class Drawing:
    """The drafts of one task while they grow.

    Rows that sample get tokens drawn from the draft's own distribution under the target's filters,
    kept for rejection sampling; greedy rows get its likeliest tokens. The confidence of a token is
    its probability, unfiltered for greedy rows and its expected value for sampled ones. A row stops
    before the first token whose confidence is below ``min_confidence``. ``wanted`` [n] are the
    tokens that each row of the task may get at most. ``vocabulary`` holds the token id of each
    logit where a draft knows fewer tokens than the target's ``vocab_size``.
    """

    def __init__(
        self,
        task: DraftTask,
        wanted: Int64Array,
        vocab_size: int,
        *,
        min_confidence: float = 0.0,
        vocabulary: torch.Tensor | None = None,
    ) -> None:
        num_rows, self.width = len(task.slots), int(wanted.max(initial=0))
        self.tokens: Int64Array = np.zeros((num_rows, self.width), dtype=np.int64)
        self.lengths: Int16Array = np.zeros(num_rows, dtype=np.int16)
        self._confidence: Float32Array = np.zeros((num_rows, self.width), dtype=np.float32)
        sampled = np.flatnonzero((task.sampling.temperature > 0.0) & (wanted > 0))
        self._probs_row: Int64Array = np.full(num_rows, -1, dtype=np.int64)
        self._probs_row[sampled] = np.arange(len(sampled))
        self._num_sampled = len(sampled)
        self._chosen: Int64Array = np.full(num_rows, self.width, dtype=np.int64)
        self._probs: torch.Tensor | None = None
        self._numbers = uniforms(task.sampling, self.width, DRAFT_STREAM)
        self._sampling = task.sampling
        self._wanted = wanted
        self._vocab_size = vocab_size
        self._min_confidence = min_confidence
        self._vocabulary = vocabulary

    def active(self, depth: int) -> Int64Array:
        """Rows that have every token before ``depth`` and want one there."""
        return np.flatnonzero((self.lengths == depth) & (self._wanted > depth))

    def choose(self, depth: int, active: Int64Array, logits: torch.Tensor) -> None:
        """Choose token ``depth`` of the ``active`` rows by ``logits`` [active, draft vocab]."""
        chosen: Int64Array = np.zeros(len(active), dtype=np.int64)
        sure: Float32Array = np.zeros(len(active), dtype=np.float32)
        greedy = np.flatnonzero(self._probs_row[active] < 0)
        if len(greedy):
            own = logits if len(greedy) == len(active) else _rows(logits, greedy)
            best, token = own.max(dim=-1)
            share = (best.float() - own.float().logsumexp(dim=-1)).exp()
            if self._vocabulary is not None:
                token = self._vocabulary[token]
            chosen[greedy], sure[greedy] = token.cpu().numpy(), share.cpu().numpy()
        drawn = np.flatnonzero(self._probs_row[active] >= 0)
        if len(drawn):
            rows = active[drawn]
            probs = self._over_target(
                filtered_probabilities(_rows(logits, drawn), self._sampling.take(rows))
            )
            points = torch.from_numpy(self._numbers[rows, depth]).to(probs.device)
            chosen[drawn] = sample(probs, points).cpu().numpy()
            sure[drawn] = probs.square().sum(dim=-1).float().cpu().numpy()
            if self._probs is None:
                shape = (self._num_sampled, self.width, self._vocab_size)
                self._probs = torch.zeros(shape, dtype=probs.dtype, device=probs.device)
            self._probs[torch.from_numpy(self._probs_row[rows]).to(probs.device), depth] = probs
        kept = sure >= self._min_confidence
        rows = active[kept]
        self.tokens[rows, depth] = chosen[kept]
        self._confidence[rows, depth] = sure[kept]
        self.lengths[rows] = depth + 1

    def append(self, row: int, tokens: Sequence[int], confidence: Sequence[float]) -> None:
        """Add point masses behind what was chosen for a row."""
        begin = int(self.lengths[row])
        end = begin + len(tokens)
        self.tokens[row, begin:end] = tokens
        self._confidence[row, begin:end] = confidence
        self._chosen[row] = begin
        self.lengths[row] = end

    def drafts(self) -> ModelDrafts:
        """What has been chosen."""
        from_draft = np.arange(self.width) < self._chosen[:, None]
        probs_row = np.where(from_draft, self._probs_row[:, None], -1)
        return ModelDrafts(self.tokens, self.lengths, self._confidence, self._probs, probs_row)

    def _over_target(self, probs: torch.Tensor) -> torch.Tensor:
        """Probabilities [n, vocab_size] over the target's tokens."""
        if self._vocabulary is None:
            return probs
        whole = torch.zeros((len(probs), self._vocab_size), dtype=probs.dtype, device=probs.device)
        whole[:, self._vocabulary] = probs
        return whole


def _rows(values: torch.Tensor, rows: Int64Array) -> torch.Tensor:
    return values.index_select(0, torch.from_numpy(rows).to(values.device))
