"""Look tokens up where the match is good, else let the model draft."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autospec.policy.base import Decision, Policy, PolicyOptions, View
from autospec.records import NO_PROPOSER


class LookupFirstOptions(PolicyOptions):
    """``min_confidence`` is on the raw confidence of the first looked-up token."""

    name: Literal["lookup_first"] = "lookup_first"
    lookup: str = "suffix"
    model: Annotated[str | None, Field(description="null: plain decoding without a match")] = None
    min_confidence: Annotated[float, Field(ge=0, le=1)] = 0.5
    lookup_k: Annotated[int, Field(ge=0, le=64)] = 8
    model_k: Annotated[int, Field(ge=0, le=64)] = 3

    def named(self) -> Iterable[str]:
        """The proposers that the options name."""
        return (self.lookup,) if self.model is None else (self.lookup, self.model)


class LookupFirst(Policy[LookupFirstOptions]):
    """The hybrid of suffix decoding (arXiv 2411.04975): the baseline that bandits lose against."""

    def decide(self, view: View) -> Decision:
        """Per request, by its best offer."""
        options = self.options
        lookup, model = self.index_of(options.lookup), self.index_of(options.model)
        proposer = np.full(view.requests, NO_PROPOSER, dtype=np.int16)
        k = np.zeros(view.requests, dtype=np.int16)
        if model >= 0:
            k = np.minimum(view.limits[model], options.model_k).astype(np.int16)
            proposer[k > 0] = model
        if lookup >= 0:
            good = (view.limits[lookup] > 0) & (
                view.confidence[lookup, :, 0] >= options.min_confidence
            )
            k[good] = np.minimum(view.limits[lookup, good], options.lookup_k)
            proposer[good] = lookup
        return Decision(proposer, k)

    def wants_offers(self) -> NDArray[np.bool_]:
        """The chosen lookup alone."""
        wanted = np.zeros_like(self.lookup)
        chosen = self.index_of(self.options.lookup)
        if chosen >= 0:
            wanted[chosen] = self.lookup[chosen]
        return wanted
