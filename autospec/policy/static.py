"""One proposer and one k, for every request and step."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autospec.policy.base import Decision, Policy, PolicyOptions, View, uniform


class StaticOptions(PolicyOptions):
    """``proposer`` null or ``k`` 0 is plain decoding."""

    name: Literal["static"] = "static"
    proposer: Annotated[str | None, Field(description="who drafts; null for nobody")] = None
    k: Annotated[int, Field(ge=0, le=64, description="draft tokens per request and step")] = 4


class Static(Policy[StaticOptions]):
    """What engines do by default (vLLM ``num_speculative_tokens``)."""

    def decide(self, view: View) -> Decision:
        """The same for everybody."""
        return uniform(view, self.index_of(self.options.proposer), self.options.k)

    def wants_offers(self) -> NDArray[np.bool_]:
        """The chosen lookup alone."""
        return self.lookup_alone(self.index_of(self.options.proposer))
