"""What steps that also prefill tell of decoding, for engines in which hardly any other step comes.

Their times are regressed on what they decoded and on their prompt tokens together, so prefill is
not charged to speculation. With the price of a prompt token eliminated (the Schur complement of its
row), the rest are normal equations like those of other steps, to be added to them.
"""

from __future__ import annotations

import numpy as np

from autospec.records import Float64Array

_MEMORY_STEPS = 256.0
_IN_A_ROW = 8  # such steps before they are all there is to learn from
_LARGEST_ERROR = 0.5  # of a step's time, relative to what was expected, that counts in full


class MixedSteps:
    """Normal equations of the latest steps with prefill, over features [f] and prompt tokens."""

    def __init__(self, size: int) -> None:
        self._gram: Float64Array = np.zeros((size + 1, size + 1))
        self._moment: Float64Array = np.zeros(size + 1)
        self._added_gram: Float64Array = np.zeros((size, size))
        self._added_moment: Float64Array = np.zeros(size)
        self._in_a_row = 0
        self._other_steps = 0.0

    @property
    def are_all(self) -> bool:
        """Whether hardly any other step comes."""
        return self._in_a_row >= _IN_A_ROW

    def observe(
        self,
        x: Float64Array,  # [f]
        prefill_tokens: int,
        seconds: float,
        expected_seconds: float,
        other_steps: float,
    ) -> None:
        """A step's features and time; ``other_steps`` is how many there were without prefill."""
        self._in_a_row = self._in_a_row + 1 if other_steps == self._other_steps else 1
        self._other_steps = other_steps
        error = abs(seconds / expected_seconds - 1.0) if expected_seconds > 0.0 else 0.0
        trust = _LARGEST_ERROR / max(error, _LARGEST_ERROR)
        weight = trust / max(seconds, expected_seconds) ** 2
        keep = 1.0 - 1.0 / _MEMORY_STEPS
        row = np.append(x, float(prefill_tokens))
        self._gram = keep * self._gram + weight * np.outer(row, row)
        self._moment = keep * self._moment + weight * seconds * row

    def prefill_token_seconds(self, beta: Float64Array) -> float:
        """The price of a prompt token that fits best, given the other coefficients [f]."""
        rest = self._moment[-1] - self._gram[-1, :-1] @ beta
        return max(0.0, float(rest / self._gram[-1, -1]))

    def add_to(self, gram: Float64Array, moment: Float64Array) -> None:
        """Add what they tell of decoding to normal equations [f, f], [f], in place of what was
        added before; nothing unless they are all."""
        self.take_from(gram, moment)
        if not self.are_all:
            return
        across = self._gram[:-1, -1]
        share = across / self._gram[-1, -1]
        self._added_gram = self._gram[:-1, :-1] - np.outer(share, across)
        self._added_moment = self._moment[:-1] - share * self._moment[-1]
        gram += self._added_gram
        moment += self._added_moment

    def take_from(self, gram: Float64Array, moment: Float64Array) -> None:
        """Take out of them what was added."""
        gram -= self._added_gram
        moment -= self._added_moment
        self._added_gram[:] = 0.0
        self._added_moment[:] = 0.0

    def forget(self) -> None:
        """The times of all steps have changed."""
        self._gram[:] = 0.0
        self._moment[:] = 0.0
