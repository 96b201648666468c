"""Plain decoding, always."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autospec.policy.base import Decision, Policy, PolicyOptions, View, plain


class OffOptions(PolicyOptions):
    """No options."""

    name: Literal["off"] = "off"


class Off(Policy[OffOptions]):
    """The baseline, and the way to switch speculation off without taking AutoSpec out."""

    def decide(self, view: View) -> Decision:
        """Nobody drafts."""
        return plain(view.requests)

    def wants_offers(self) -> NDArray[np.bool_]:
        """None."""
        return np.zeros_like(self.lookup)
