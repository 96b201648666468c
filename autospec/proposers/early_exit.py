"""Drafting with the target's own first layers, on the target's own cache.

The first layers' keys and values of drafted positions are what verification writes there again, so
there is no cache to keep, nothing to catch up on and no memory to pay: only the layers' time.
Source: Elhoushi et al. 2024 (LayerSkip, arXiv 2404.16710), whose targets are trained for it; others
agree little with their first layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from autospec.engine.cache import SlotCache
from autospec.engine.drafting import DraftTask, Kept, ModelDrafts
from autospec.engine.model import CausalModel, token_tensor
from autospec.errors import ModelError
from autospec.proposers.base import History
from autospec.proposers.drawing import Drawing
from autospec.records import Int32Array, ProposerInfo


class EarlyExitProposer:
    """Drafts token by token through the target's first ``layers``, its last norm and its output.

    ``layers`` None takes a quarter of them. Tokens are chosen as ``Drawing`` says.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        layers: int | None = None,
        *,
        max_k: int = 5,
        min_confidence: float = 0.0,
        name: str = "early_exit",
    ) -> None:
        if max_k < 1:
            raise ModelError(f"{name}: max_k is {max_k}; it must be at least 1")
        if not 0.0 <= min_confidence <= 1.0:
            raise ModelError(f"{name}: min_confidence is {min_confidence}; it must be from 0 to 1")
        self.info = ProposerInfo(name, "sequential", max_k)
        self._layers = layers
        self._min_confidence = min_confidence
        self._target: CausalModel | None = None

    def attach(self, target: CausalModel, cache: SlotCache) -> None:
        """Take the target's first layers and its cache. Raises ModelError for too many layers."""
        layers = self._layers
        if layers is None:
            layers = max(1, target.num_layers // 4)
        if not 1 <= layers < target.num_layers:
            raise ModelError(
                f"{self.info.name}: layers is {layers}; {target.name} has "
                f"{target.num_layers}, so it must be from 1 to {target.num_layers - 1}"
            )
        self._target = target
        self._cache = cache
        self._forward = cast(Callable[..., Any], first_layers(target.model, layers))

    def reset(self, slot: int) -> None:
        """There is nothing to forget."""

    def stale_tokens(self, history: History, slots: Int32Array) -> Int32Array:
        """None: the cache is the target's."""
        return np.zeros(len(slots), dtype=np.int32)

    def memory_bytes(self) -> int:
        """None of its own."""
        return 0

    def commit(self, kept: Kept, history: History) -> None:
        """Nothing: the target has written what the next draft needs."""

    def draft(self, task: DraftTask) -> ModelDrafts:
        """Draft up to ``task.k`` tokens for each row that wants any."""
        target, history = self._target, task.history
        if target is None:
            raise ModelError(f"{self.info.name}: used before it was attached to a target")
        drawing = Drawing(
            task,
            task.k.astype(np.int64),
            target.vocab_size,
            min_confidence=self._min_confidence,
        )
        for depth in range(drawing.width):
            active = drawing.active(depth)
            if not len(active):
                break
            slots = task.slots[active]
            starts = (history.lengths[slots] - 1 + depth).astype(np.int32)
            fed = history.tokens[slots, starts] if depth == 0 else drawing.tokens[active, depth - 1]
            step = target.new_step(self._cache, slots, starts, np.ones(len(slots), dtype=np.int32))
            with torch.inference_mode():
                output = self._forward(
                    input_ids=token_tensor(fed, target.device).unsqueeze(0),
                    position_ids=step.positions,
                    use_cache=False,
                    packed=step,
                )
            drawing.choose(depth, active, output.logits[0])
        return drawing.drafts()


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A view of ``model`` that ends after some layers; all weights are the same objects."""
    inner = copy.copy(cast(Any, model.model))
    inner.config = copy.copy(inner.config)
    inner.config.num_hidden_layers = layers
    outer: Any = copy.copy(model)
    outer._modules = dict(outer._modules)
    outer.model = inner
    return cast(PreTrainedModel, outer)
