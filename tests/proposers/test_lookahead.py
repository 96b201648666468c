"""Lookahead's window and pool, against plain decoding of every column on its own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from autospec.engine.decoder import Decoder
from autospec.engine.drafting import DraftTask, ModelDrafts
from autospec.engine.model import CausalModel
from autospec.engine.request import GenerationRequest
from autospec.engine.sampling import SamplingParameters
from autospec.errors import ModelError
from autospec.proposers.lookahead import LookaheadProposer
from autospec.records import Int32Array, Int64Array
from tests.engine.tiny_models import CAPACITY, ScriptedController, greedy, tiny
from tests.proposers.head_folders import draft_task

torch.set_num_threads(1)


class Checked(LookaheadProposer):
    """Keeps each draft with its text and with the window before and after."""

    def __init__(self, window: int, ngram: int) -> None:
        super().__init__(window=window, ngram=ngram, max_k=4)
        self.seen: list[tuple[list[int], Int64Array, Int64Array, list[int]]] = []
        self.windows: dict[int, tuple[Int64Array, Int64Array]] = {}

    def _refine(self, slots: Int32Array, said: Int64Array) -> None:
        before = self._guesses[slots]
        super()._refine(slots, said)
        pairs = zip(before, self._guesses[slots], strict=True)
        self.windows = dict(zip(slots.tolist(), pairs, strict=True))

    def draft(self, task: DraftTask) -> ModelDrafts:
        drafts = super().draft(task)
        for row, slot in enumerate(task.slots.tolist()):
            if task.k[row]:
                text = task.history.tokens[slot, : task.history.lengths[slot]].tolist()
                drafted = drafts.tokens[row, : drafts.lengths[row]].tolist()
                self.seen.append((text, *self.windows[slot], drafted))
        return drafts


@pytest.mark.parametrize("family, window, ngram", [("llama", 4, 3), ("mistral-window", 3, 4)])
def test_the_window_holds_what_the_target_says_behind_each_column(
    family: str, window: int, ngram: int
) -> None:
    """And the first draft is its next token; and the target's output stays its own."""
    model = tiny(family)
    lookahead = Checked(window, ngram)
    controller = ScriptedController(1, 4, np.random.default_rng(0))
    decoder = Decoder(
        CausalModel(copy.deepcopy(model)), [lookahead], controller, slots=2, capacity=CAPACITY
    )
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8] * 3]
    outputs = decoder.generate([GenerationRequest(prompt, max_tokens=24) for prompt in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == greedy(model, prompt, 24)
    assert len(lookahead.seen) > 15
    for text, before, after, drafted in lookahead.seen[::5]:
        assert drafted[0] == greedy(model, text, 1)[0]
        assert after[:-1].tolist() == before[1:].tolist()
        for column in range(window):
            prefix = [*text, *before[0, : column + 1], *before[1:, column]]
            assert after[-1, column] == greedy(model, [int(each) for each in prefix], 1)[0]


def test_what_repeats_is_found_in_the_pool() -> None:
    """Greedy output of a tiny model falls into a loop, which the pool then holds."""
    controller = ScriptedController(1, 4, np.random.default_rng(0), fixed_k=4)
    decoder = Decoder(
        CausalModel(tiny("llama")), [LookaheadProposer(max_k=4)], controller, slots=1, capacity=120
    )
    decoder.generate([GenerationRequest([1, 2, 3], max_tokens=90)])
    accepted = [int(result.accepted[0]) for _, result in controller.results if result.verified[0]]
    assert min(accepted) >= 1  # the first token is the target's own
    assert np.mean(accepted) > 1.5


def test_pooled_tokens_are_point_masses_and_the_first_is_drawn() -> None:
    target = CausalModel(tiny("llama"))
    lookahead = LookaheadProposer(window=3, max_k=4)
    cache = target.new_cache(1, 40)
    lookahead.attach(target, cache)
    decoder = Decoder(target, slots=1, capacity=40)
    assert lookahead.memory_bytes() > 0
    lookahead._pool[0, :, 0] = np.arange(256)
    lookahead._pool[0, :, 1:] = 7
    lookahead._made[0] = 3
    history = decoder._scheduler.history
    history.tokens[0, :3] = [4, 5, 6]
    history.lengths[0] = 3
    drafts = lookahead.draft(draft_task(history, [4], SamplingParameters(temperature=1.0)))
    assert drafts.lengths.tolist() == [4]
    assert drafts.probs_row.tolist() == [[0, -1, -1, -1]]
    assert drafts.probs is not None
    assert float(drafts.probs[0, 0].sum()) == pytest.approx(1.0)
    assert drafts.probs[0, 0, drafts.tokens[0, 0]] > 0


@pytest.mark.parametrize("field, value", [("window", 0), ("ngram", 1), ("max_k", 0)])
def test_bad_settings_are_refused(field: str, value: int) -> None:
    with pytest.raises(ModelError, match=f"lookahead: {field} is {value}; it must be at least"):
        LookaheadProposer(
            window=value if field == "window" else 5,
            ngram=value if field == "ngram" else 3,
            max_k=value if field == "max_k" else 5,
        )
