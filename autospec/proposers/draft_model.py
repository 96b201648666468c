"""Drafting with a smaller model of the same vocabulary, batched, with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from autospec.engine.cache import SlotCache
from autospec.engine.drafting import DraftTask, Kept, ModelDrafts
from autospec.engine.model import CausalModel, token_tensor
from autospec.errors import ModelError
from autospec.proposers.base import History
from autospec.proposers.drawing import Drawing
from autospec.records import Int32Array, Int64Array, ProposerInfo


class DraftModelProposer:
    """Drafts token by token with ``model``; one packed forward per depth over all drafting rows.

    Tokens are chosen as ``Drawing`` says. The cache of a row that was off is caught up within the
    next draft. Sources: Leviathan et al. 2023, Chen et al. 2023.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: CausalModel,
        *,
        max_k: int = 8,
        min_confidence: float = 0.0,
        name: str = "draft_model",
    ) -> None:
        if max_k < 1:
            raise ModelError(f"{name}: max_k is {max_k}; it must be at least 1")
        if not 0.0 <= min_confidence <= 1.0:
            raise ModelError(f"{name}: min_confidence is {min_confidence}; it must be from 0 to 1")
        self.info = ProposerInfo(name, "sequential", max_k, needs_state=True)
        self._model = model
        self._min_confidence = min_confidence
        self._vocab_size = model.vocab_size
        self._cache: SlotCache | None = None

    def attach(self, target: CausalModel, cache: SlotCache) -> None:
        """Check the vocabularies against each other and allocate a cache beside the target's.

        Raises ModelError naming both sizes and the first token that differs.
        """
        check_same_vocabulary(target, self._model)
        self._vocab_size = target.vocab_size
        self._cache = self._model.new_cache(
            cache.slots, min(cache.capacity, self._model.context_tokens)
        )

    def reset(self, slot: int) -> None:
        """Forget the slot's last request."""
        self._own_cache.lengths[slot] = 0

    def stale_tokens(self, history: History, slots: Int32Array) -> Int32Array:
        """Known tokens [n] not seen yet, but for the last, which every draft feeds."""
        missing = history.lengths[slots] - self._own_cache.lengths[slots] - 1
        stale: Int32Array = np.maximum(missing, 0).astype(np.int32)
        return stale

    def memory_bytes(self) -> int:
        """Bytes of the draft's cache."""
        return self._own_cache.memory_bytes()

    def draft(self, task: DraftTask) -> ModelDrafts:
        """Draft up to ``task.k`` tokens for each row that wants any."""
        cache, history = self._own_cache, task.history
        # The last drafted token is not fed, so a row of length L reaches position L + k - 2.
        room = cache.capacity - history.lengths[task.slots] + 1
        wanted = np.minimum(task.k, np.maximum(room, 0)).astype(np.int64)
        wanted[history.lengths[task.slots] > cache.capacity] = 0
        drawing = Drawing(task, wanted, self._vocab_size, min_confidence=self._min_confidence)
        for depth in range(drawing.width):
            active = drawing.active(depth)
            if not len(active):
                break
            drawing.choose(depth, active, self._forward(task, active, drawing.tokens, depth))
        return drawing.drafts()

    def commit(self, kept: Kept, history: History) -> None:
        """Rewind behind the first rejected token; the target's own token has not been fed yet."""
        cache = self._own_cache
        valid = history.lengths[kept.slots] - 1
        cache.lengths[kept.slots] = np.minimum(cache.lengths[kept.slots], valid)

    @property
    def _own_cache(self) -> SlotCache:
        if self._cache is None:
            raise ModelError(f"{self.info.name}: used before it was attached to a target")
        return self._cache

    def _forward(
        self, task: DraftTask, active: Int64Array, tokens: Int64Array, depth: int
    ) -> torch.Tensor:
        """Feed what the draft has not seen; logits [active rows, vocab] of the next token."""
        cache, history = self._own_cache, task.history
        slots = task.slots[active]
        starts = cache.lengths[slots]
        if depth == 0:
            # Every token known by now was cached correctly or is fed again.
            counts = (history.lengths[slots] - starts).astype(np.int32)
        else:
            counts = np.ones(len(slots), dtype=np.int32)
        step = self._model.new_step(cache, slots, starts, counts)
        if depth == 0:
            rows = np.repeat(slots, counts)
            fed = history.tokens[rows, step.token_positions]
        else:
            fed = tokens[active, depth - 1]
        device = self._model.device
        last = torch.from_numpy(step.offsets[1:] - 1).to(device)
        logits = self._model.forward(token_tensor(fed, device), step, last).logits
        cache.lengths[slots] = starts + counts
        return _fitted(logits, self._vocab_size)


def check_same_vocabulary(target: CausalModel, draft: CausalModel) -> None:
    """Raise ModelError unless token ids mean the same to both models.

    Where both have tokenizers these decide, since embeddings are often padded to different sizes;
    else the vocabulary sizes must be equal.
    """
    sizes = f"{target.name} has {target.vocab_size} tokens and {draft.name} has {draft.vocab_size}"
    if target.tokenizer is None or draft.tokenizer is None:
        if target.vocab_size != draft.vocab_size:
            first = min(target.vocab_size, draft.vocab_size)
            raise ModelError(
                f"the vocabularies differ: {sizes}; the first differing token is {first}, "
                "which only one of them has. Use a draft of the target's family"
            )
        return
    target_tokens = _tokens_by_id(target.tokenizer.get_vocab())
    draft_tokens = _tokens_by_id(draft.tokenizer.get_vocab())
    for token_id in range(max(len(target_tokens), len(draft_tokens))):
        ours = target_tokens[token_id] if token_id < len(target_tokens) else None
        theirs = draft_tokens[token_id] if token_id < len(draft_tokens) else None
        if ours != theirs:
            raise ModelError(
                f"the vocabularies differ: {sizes}; the first differing token is {token_id}, "
                f"{ours!r} in the target and {theirs!r} in the draft. "
                "Use a draft of the target's family"
            )


def _tokens_by_id(vocabulary: dict[str, int]) -> Sequence[str | None]:
    tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
    return tokens


def _fitted(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits over the target's vocabulary: padding rows of either model are cut or impossible."""
    missing = vocab_size - logits.shape[1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
