"""A drafter with known acceptance for vLLM's ``custom_class``: it replays the target's outputs."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

_KEY = 5


class ReplayDrafter:
    """Drafts what the target will say; each token is wrong with probability ``error``."""

    texts: ClassVar[dict[tuple[int, ...], list[int]]] = {}
    error: ClassVar[float] = 0.2
    seed: ClassVar[int] = 0

    def __init__(self, vllm_config: Any) -> None:
        self._k = int(vllm_config.speculative_config.num_speculative_tokens)
        self._vocabulary = int(vllm_config.model_config.get_vocab_size())

    @classmethod
    def learn(cls, prompt: list[int], output: list[int]) -> None:
        """The target answers ``prompt`` with ``output``."""
        cls.texts[tuple(prompt[:_KEY])] = [*prompt, *output]

    def load_model(self, *_: Any, **__: Any) -> None:
        """There is none."""

    def propose(
        self, sampled_token_ids: list[list[int]], lengths: Any, tokens: Any, **_: Any
    ) -> list[list[int]]:
        """The tokens after each request's text, some of them wrong."""
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            text = self.texts.get(tuple(tokens[row, :_KEY].tolist()))
            if not sampled or text is None:
                drafts.append([])
                continue
            count = int(lengths[row])
            rng = np.random.default_rng([type(self).seed, count, *text[:_KEY]])
            wrong = rng.random(self._k) < type(self).error
            truth = text[count : count + self._k]
            truth += [0] * (self._k - len(truth))
            drafts.append(
                [
                    (token + int(is_wrong)) % self._vocabulary
                    for token, is_wrong in zip(truth, wrong, strict=True)
                ]
            )
        return drafts
