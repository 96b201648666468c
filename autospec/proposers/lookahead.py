"""Lookahead decoding: n-grams that the target itself makes while it decodes, without weights.

A window of guessed tokens behind each request's text is refined by Jacobi iteration: ``ngram - 1``
levels of ``window`` tokens, each level one iteration younger. Column by column the levels and what
the target says behind them are an n-gram, which goes into the request's pool; drafts come from
there. Source: Fu et al. 2024 (arXiv 2402.02057).

What it costs: one target forward per step beside that of verification, over ``1 + window * (ngram
- 1)`` tokens of each drafting request. That forward is given the request's last token too and so
finds the next token for certain, which is the first draft token. A step thus brings two tokens for
two forwards, and pays where the pool brings more than the window takes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from autospec.engine.cache import SlotCache
from autospec.engine.drafting import DraftTask, Kept, ModelDrafts
from autospec.engine.model import CausalModel, token_tensor
from autospec.errors import ModelError
from autospec.proposers.base import History
from autospec.proposers.drawing import Drawing
from autospec.records import Int32Array, Int64Array, ProposerInfo

POOL_SIZE = 256
"""N-grams of a request; one with the same first token, or hash, replaces the older."""


class LookaheadProposer:
    """Drafts the target's next token, then n-grams of the request's pool, chained.

    The confidence of the first token is that of ``Drawing``; of pooled ones it is ``n / (n + 1)``
    where the n-gram was made ``n`` times running. Pooled tokens are point masses.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self, *, window: int = 5, ngram: int = 3, max_k: int = 5, name: str = "lookahead"
    ) -> None:
        for field, value, least in (
            ("window", window, 1),
            ("ngram", ngram, 2),
            ("max_k", max_k, 1),
        ):
            if value < least:
                raise ModelError(f"{name}: {field} is {value}; it must be at least {least}")
        self.info = ProposerInfo(name, "parallel", max_k)
        self._window = window
        self._levels = ngram - 1
        self._target: CausalModel | None = None

    def attach(self, target: CausalModel, cache: SlotCache) -> None:
        """Take the target, whose cache is read but not written, and allocate the pools."""
        self._target = target
        self._cache = cache
        self._guesses: Int64Array = np.zeros(
            (cache.slots, self._levels, self._window), dtype=np.int64
        )
        self._drafted_at: Int64Array = np.zeros(cache.slots, dtype=np.int64)  # text length
        self._pool: Int32Array = np.full((cache.slots, POOL_SIZE, self._levels + 1), -1, np.int32)
        self._made: Int32Array = np.zeros((cache.slots, POOL_SIZE), dtype=np.int32)
        self._sees = torch.from_numpy(window_mask(self._levels, self._window)).to(target.device)

    def reset(self, slot: int) -> None:
        """Forget the slot's last request."""
        self._drafted_at[slot] = 0
        self._pool[slot] = -1

    def stale_tokens(self, history: History, slots: Int32Array) -> Int32Array:
        """None: a window that was left behind is guessed anew."""
        return np.zeros(len(slots), dtype=np.int32)

    def memory_bytes(self) -> int:
        """Bytes of windows and pools."""
        arrays = (self._guesses, self._drafted_at, self._pool, self._made)
        return sum(array.nbytes for array in arrays)

    def commit(self, kept: Kept, history: History) -> None:
        """Nothing: the window moves on in the next draft."""

    def draft(self, task: DraftTask) -> ModelDrafts:
        """Draft up to ``task.k`` tokens for each row that wants any."""
        target, history = self._target, task.history
        if target is None:
            raise ModelError(f"{self.info.name}: used before it was attached to a target")
        drawing = Drawing(task, task.k.astype(np.int64), target.vocab_size)
        active = drawing.active(0)
        if not len(active):
            return drawing.drafts()
        slots = task.slots[active]
        for slot in slots.tolist():
            self._move_on(history, slot)
        logits = self._look_ahead(target, history, slots)
        drawing.choose(0, active, logits[:, 0])
        self._refine(slots, logits[:, 1:].max(dim=-1).indices.cpu().numpy())
        for row, slot in zip(active.tolist(), slots.tolist(), strict=True):
            tokens, sure = self._pooled(slot, int(drawing.tokens[row, 0]), int(task.k[row]) - 1)
            drawing.append(row, tokens, sure)
        return drawing.drafts()

    def _move_on(self, history: History, slot: int) -> None:
        """Shift a window to the end of its text; columns without a guess get tokens of the text."""
        length = int(history.lengths[slot])
        shift = length - int(self._drafted_at[slot]) - 1  # iteration itself moves it by one
        if self._drafted_at[slot] == 0 or not 0 <= shift < self._window:
            shift = self._window
        self._drafted_at[slot] = length
        guesses = self._guesses[slot]
        guesses[:, : self._window - shift] = guesses[:, shift:].copy()
        places = np.random.default_rng(length).integers(0, length, (self._levels, shift))
        guesses[:, self._window - shift :] = history.tokens[slot, places]

    def _look_ahead(self, target: CausalModel, history: History, slots: Int32Array) -> torch.Tensor:
        """Logits [n, 1 + window, vocab] behind each text and behind each column of its window."""
        last = history.lengths[slots] - 1
        fed = np.concatenate(
            (history.tokens[slots, last][:, None], self._guesses[slots].reshape(len(slots), -1)),
            axis=1,
        )
        step = WindowStep(self._cache, slots, last, self._sees, self._window)
        width = fed.shape[1]
        ahead = np.concatenate(([0], np.arange(width - self._window, width)))
        rows = (np.arange(len(slots))[:, None] * width + ahead).reshape(-1)
        result = target.forward(
            token_tensor(fed.reshape(-1), target.device),
            step,
            torch.from_numpy(rows).to(target.device),
        )
        return result.logits.view(len(slots), 1 + self._window, -1)

    def _refine(self, slots: Int32Array, said: Int64Array) -> None:
        """Pool the n-grams that the answers [n, window] complete; drop the oldest level."""
        guesses = self._guesses[slots]
        ngrams = np.concatenate((guesses, said[:, None]), axis=1).transpose(0, 2, 1)
        for slot, of_slot in zip(slots.tolist(), ngrams.astype(np.int32), strict=True):
            for ngram in of_slot:
                bucket = int(ngram[0]) % POOL_SIZE
                is_same = bool((self._pool[slot, bucket] == ngram).all())
                self._made[slot, bucket] = self._made[slot, bucket] + 1 if is_same else 1
                self._pool[slot, bucket] = ngram
        self._guesses[slots, :-1] = guesses[:, 1:]
        self._guesses[slots, -1] = said

    def _pooled(self, slot: int, token: int, most: int) -> tuple[list[int], list[float]]:
        """Up to ``most`` tokens that may follow ``token``, and their confidences."""
        tokens: list[int] = []
        sure: list[float] = []
        while len(tokens) < most:
            bucket = token % POOL_SIZE
            ngram = self._pool[slot, bucket].tolist()
            if ngram[0] != token:
                break
            made = int(self._made[slot, bucket])
            tokens += ngram[1:]
            sure += [made / (made + 1)] * self._levels
            token = ngram[-1]
        return tokens[:most], sure[:most]


class WindowStep:
    """A forward over each slot's last token and its window, which leaves the cache as it is.

    ``last`` [n] is the position of the last token. ``sees`` [tokens, tokens] says which tokens of a
    row see which, beside the whole text before the last token.
    """

    def __init__(
        self, cache: SlotCache, slots: Int32Array, last: Int32Array, sees: torch.Tensor, window: int
    ) -> None:
        self._cache = cache
        self._slots = slots.tolist()
        self._last = last.tolist()
        self._sees = sees
        ahead = np.add.outer(np.arange((len(sees) - 1) // window), np.arange(window)) + 1
        offsets = np.concatenate(([0], ahead.reshape(-1)))
        positions = torch.from_numpy(last.astype(np.int64)[:, None] + offsets).to(cache.device)
        self._by_row = positions
        self.positions = positions.view(1, -1)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [1, heads, tokens, head_dim]
        key: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Attend to the text and, as ``sees`` says, to the row's own tokens."""
        width, folds = len(self._sees), query.shape[1] // key.shape[1]
        outputs = []
        for row, (slot, last) in enumerate(zip(self._slots, self._last, strict=True)):
            own = slice(row * width, (row + 1) * width)
            keys = torch.cat(
                (self._cache.keys[layer][slot, :last].transpose(0, 1), key[0, :, own]), dim=1
            )
            values = torch.cat(
                (self._cache.values[layer][slot, :last].transpose(0, 1), value[0, :, own]), dim=1
            )
            positions = self._by_row[row]
            mask = torch.cat((self._sees.new_ones(width, last), self._sees), dim=1)
            if window is not None:
                of_keys = torch.cat((torch.arange(last, device=positions.device), positions))
                mask = mask & (of_keys > positions[:, None] - window)
            outputs.append(
                scaled_dot_product_attention(
                    query[:, :, own],
                    keys.repeat_interleave(folds, dim=0).unsqueeze(0),
                    values.repeat_interleave(folds, dim=0).unsqueeze(0),
                    attn_mask=mask,
                    scale=scaling,
                )
            )
        return torch.cat(outputs, dim=2).transpose(1, 2)


def window_mask(levels: int, window: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which of [last token, level 0, level 1, …] see which [tokens, tokens].

    A guess sees the last token, level 0 up to its own column, and its column up to its own level.
    """
    size = 1 + levels * window
    sees = np.zeros((size, size), dtype=np.bool_)
    sees[:, 0] = True
    for level in range(levels):
        for column in range(window):
            row = 1 + level * window + column
            sees[row, 1 : 2 + column] = True
            for below in range(1, level + 1):
                sees[row, 1 + below * window + column] = True
    return sees
