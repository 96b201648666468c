"""A table from the number of running requests to a proposer and k."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, field_validator

from autospec.policy.base import Decision, Policy, PolicyOptions, View, plain, uniform


class Band(PolicyOptions):
    """Up to ``max_requests`` running requests (null: any number), ``proposer`` drafts ``k``."""

    max_requests: Annotated[int, Field(ge=1)] | None = None
    proposer: str | None = None
    k: Annotated[int, Field(ge=0, le=64)] = 0


class ScheduleOptions(PolicyOptions):
    """Bands in rising order; above the last one nobody drafts."""

    name: Literal["schedule"] = "schedule"
    table: Annotated[tuple[Band, ...], Field(min_length=1)]

    @field_validator("table")
    @classmethod
    def _check_order(cls, table: tuple[Band, ...]) -> tuple[Band, ...]:
        bounds = [
            float("inf") if band.max_requests is None else band.max_requests for band in table
        ]
        if bounds != sorted(set(bounds)):
            raise ValueError("max_requests must rise from band to band, null only in the last one")
        return table

    def named(self) -> Iterable[str]:
        """The proposers that the options name."""
        return [band.proposer for band in self.table if band.proposer is not None]


class Schedule(Policy[ScheduleOptions]):
    """What vLLM (``num_speculative_tokens_per_batch_size``) and TensorRT-LLM offer by hand."""

    def decide(self, view: View) -> Decision:
        """The first band that holds the running requests."""
        for band in self.options.table:
            if band.max_requests is None or view.requests <= band.max_requests:
                return uniform(view, self.index_of(band.proposer), band.k)
        return plain(view.requests)
