"""Drafting with an EAGLE head: token by token on the target's states, batched, with a cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from autospec.engine.attention import PackedStep
from autospec.engine.cache import SlotCache
from autospec.engine.drafting import DraftTask, Kept, ModelDrafts
from autospec.engine.model import CausalModel, token_tensor
from autospec.errors import ModelError
from autospec.proposers.base import History
from autospec.proposers.drawing import Drawing
from autospec.proposers.eagle_files import load_eagle
from autospec.proposers.eagle_head import Eagle3Head, EagleHead
from autospec.records import Int32Array, Int64Array, ProposerInfo

CATCH_UP_TOKENS = 2048
"""Entries of all rows together that one forward of the head takes at most."""


class EagleProposer:
    """Drafts with ``head`` of its target; one packed forward of the head per depth.

    Tokens are chosen as ``Drawing`` says. The target's states of all kept positions are stored, so
    that a row that was off, or has just been prefilled, is caught up within its next draft.
    """

    def __init__(
        self,
        head: EagleHead | Eagle3Head,
        *,
        max_k: int = 5,
        min_confidence: float = 0.0,
        name: str | None = None,
    ) -> None:
        name = name or ("eagle3" if isinstance(head, Eagle3Head) else "eagle")
        if max_k < 1:
            raise ModelError(f"{name}: max_k is {max_k}; it must be at least 1")
        if not 0.0 <= min_confidence <= 1.0:
            raise ModelError(f"{name}: min_confidence is {min_confidence}; it must be from 0 to 1")
        self.info = ProposerInfo(name, "sequential", max_k, needs_state=True)
        self.hidden_layers: tuple[int, ...] = head.layout.target_layers
        self._head = head
        self._min_confidence = min_confidence
        self._target: CausalModel | None = None

    @classmethod
    def load(
        cls, folder: str | Path, target: CausalModel, *, max_k: int = 5, name: str | None = None
    ) -> EagleProposer:
        """The head in ``folder`` (see ``eagle_files``). Raises ModelError if it does not fit."""
        return cls(load_eagle(folder, target), max_k=max_k, name=name)

    def attach(self, target: CausalModel, cache: SlotCache) -> None:
        """Move the head to the target and allocate its cache and its store of states."""
        if self._target is target:
            return  # another proposer drafts with this one
        layout = self._head.layout
        if layout.target_hidden_size != target.hidden_size:
            raise ModelError(
                f"{self.info.name}: the head takes states of {layout.target_hidden_size} numbers, "
                f"but those of {target.name} have {target.hidden_size}"
            )
        self._head.attach(target)
        self._target = target
        self._cache = SlotCache(
            layers=layout.num_layers,
            slots=cache.slots,
            capacity=cache.capacity,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            dtype=target.dtype,
            device=target.device,
        )
        self._kv_width = layout.kv_heads * layout.head_dim
        self._features = torch.zeros(
            (cache.slots * cache.capacity, len(layout.target_layers), target.hidden_size),
            dtype=target.dtype,
            device=target.device,
        )
        self._kept_last: Int32Array = np.zeros(cache.slots, dtype=np.int32)

    def reset(self, slot: int) -> None:
        """Forget the slot's last request."""
        self._own_cache.lengths[slot] = 0

    def stale_tokens(self, history: History, slots: Int32Array) -> Int32Array:
        """Kept positions [n] not seen yet, but for those of the last step."""
        missing = history.lengths[slots] - 1 - self._own_cache.lengths[slots]
        stale: Int32Array = np.maximum(missing - self._kept_last[slots], 0).astype(np.int32)
        return stale

    def memory_bytes(self) -> int:
        """Bytes of the head's cache and of the stored states."""
        cache, layout = self._own_cache, self._head.layout
        return layout.state_bytes(cache.slots, cache.capacity, self._features.dtype)

    def commit(self, kept: Kept, history: History) -> None:
        """Store the target's states of what a step kept."""
        assert kept.hidden is not None
        ends = np.cumsum(kept.counts, dtype=np.int64)
        begins = kept.slots.astype(np.int64) * self._own_cache.capacity + kept.starts
        index = np.arange(ends[-1]) + np.repeat(begins - (ends - kept.counts), kept.counts)
        self._features[torch.from_numpy(index).to(self._features.device)] = kept.hidden
        self._kept_last[kept.slots] = kept.counts

    def draft(self, task: DraftTask) -> ModelDrafts:
        """Draft up to ``task.k`` tokens for each row that wants any."""
        head, target = self._head, self._attached
        history = task.history
        # A prompt of one token is decoded at once, when no state of the target is known.
        wanted = np.where(history.lengths[task.slots] > 1, task.k, 0).astype(np.int64)
        drawing = Drawing(
            task,
            wanted,
            target.vocab_size,
            min_confidence=self._min_confidence,
            vocabulary=head.draft_tokens,
        )
        with torch.inference_mode():
            active = drawing.active(0)
            if not len(active):
                return drawing.drafts()
            states = self._go_on(history, task.slots[active])
            for depth in range(drawing.width):
                drawing.choose(depth, active, head.logits(states))
                going_on = drawing.active(depth + 1)
                if not len(going_on):
                    break
                kept = np.flatnonzero(np.isin(active, going_on))
                active, slots = going_on, task.slots[going_on]
                states = self._forward(
                    slots,
                    (history.lengths[slots] - 1 + depth).astype(np.int32),
                    np.ones(len(slots), dtype=np.int32),
                    drawing.tokens[active, depth],
                    states[torch.from_numpy(kept).to(states.device)],
                )
        return drawing.drafts()

    @property
    def _attached(self) -> CausalModel:
        if self._target is None:
            raise ModelError(f"{self.info.name}: used before it was attached to a target")
        return self._target

    @property
    def _own_cache(self) -> SlotCache:
        if self._target is None:
            raise ModelError(f"{self.info.name}: used before it was attached to a target")
        return self._cache

    def _go_on(self, history: History, slots: Int32Array) -> torch.Tensor:
        """Feed the kept positions that the head has not seen; its last state [n] of each row."""
        cache = self._own_cache
        ends = history.lengths[slots] - 1
        starts = np.minimum(cache.lengths[slots], ends - 1)
        while int((ends - starts).sum()) > CATCH_UP_TOKENS:
            share = max(CATCH_UP_TOKENS // len(slots), 1)
            counts = np.minimum(ends - starts - 1, share).astype(np.int32)
            if not counts.any():
                break
            rows = np.flatnonzero(counts)
            self._catch_up(history, slots[rows], starts[rows], counts[rows])
            starts = starts + counts
        counts = (ends - starts).astype(np.int32)
        states = self._catch_up(history, slots, starts, counts)
        cache.lengths[slots] = ends
        last = np.cumsum(counts, dtype=np.int64) - 1
        return states[torch.from_numpy(last).to(states.device)]

    def _catch_up(
        self, history: History, slots: Int32Array, starts: Int32Array, counts: Int32Array
    ) -> torch.Tensor:
        """Run the head over positions whose states are stored."""
        rows = np.repeat(slots.astype(np.int64), counts)
        ends = np.cumsum(counts, dtype=np.int64)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        index = torch.from_numpy(rows * self._own_cache.capacity + positions)
        features = self._features[index.to(self._features.device)]
        following = history.tokens[rows, positions + 1].astype(np.int64)
        return self._forward(slots, starts, counts, following, self._head.fuse(features))

    def _forward(
        self,
        slots: Int32Array,
        starts: Int32Array,
        counts: Int32Array,
        following: Int64Array,  # [tokens]
        states: torch.Tensor,  # [tokens, hidden_size]
    ) -> torch.Tensor:
        """The head's states [tokens, hidden_size] for positions of ``slots`` in its cache."""
        step = PackedStep(self._own_cache, slots, starts, counts, self._kv_width)
        embeddings = self._head.embed(token_tensor(following, states.device))
        result: torch.Tensor = self._head(embeddings, states, step)
        return result
