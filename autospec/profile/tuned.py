"""What ``autospec tune`` adds to a profile: settings, rates, figures, where they are from."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from autospec.records import Kind, Shape

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Quantity = Annotated[float, Field(ge=0)]


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ProposerSettings(_Form):
    """How one proposer drafts. ``min_match`` to ``cache_tokens`` are a lookup's, None where it has
    no such setting; ``min_confidence`` is the draft probability at which a model stops."""

    kind: Kind
    max_k: Annotated[int, Field(ge=1, le=64)]
    min_match: Positive | None = None
    max_match: Positive | None = None
    max_walk: Positive | None = None
    cache_tokens: Count | None = None
    min_confidence: Share | None = None


class KCap(_Form):
    """From ``load`` running requests on, up to the next cap, nobody drafts more than ``k``."""

    load: Positive
    k: Annotated[int, Field(ge=0, le=64)]


class DraftRates(_Form):
    """Per decoding step of a request, when k is always j + 1: the share of steps with a draft
    (``drafting[j]``), and how many draft tokens are verified (``drafted[j]``) and accepted
    (``accepted[j]``) on average."""

    drafting: tuple[Share, ...]
    drafted: tuple[Quantity, ...]
    accepted: tuple[Quantity, ...]


class WorkloadRates(_Form):
    """One workload, measured. ``context_tokens`` is the mean over output positions."""

    requests: Count
    tokens: Count
    context_tokens: Quantity
    proposers: dict[str, DraftRates]


class Interval(_Form):
    """A ratio of goodputs with its 95 % confidence interval over ``rounds`` paired rounds."""

    value: Quantity
    low: Quantity
    high: Quantity
    rounds: Positive


class LoadFigures(_Form):
    """Speedups over plain decoding at one load.

    ``proposer`` and ``k`` are the best fixed choice by prediction (None and 0: plain), with the
    speedup predicted for it; ``measured`` is that of the chosen settings under the controller,
    ``untuned`` that of the default settings, on held-out requests.
    """

    load: Positive
    proposer: str | None = None
    k: Count = 0
    predicted: Quantity
    measured: Interval | None = None
    untuned: Interval | None = None


class Provenance(_Form):
    """Where a tuning comes from; ``prompts_digest`` is the SHA-256 of the file of requests."""

    command: str
    date: str
    engine: str
    device: str
    versions: dict[str, str]
    prompts: str
    prompts_digest: str
    seed: int


class Tuning(_Form):
    """A tuning run's results. ``kept`` says that the settings are not the default ones, because
    they won outside the noise; ``crossover`` is the load from which speculation no longer pays,
    None if it paid at every load that was looked at."""

    shape: Shape = "packed"
    captured_sizes: tuple[Positive, ...] = ()
    proposers: dict[str, ProposerSettings]
    caps: tuple[KCap, ...] = ()
    kept: bool
    workloads: dict[str, WorkloadRates]
    loads: tuple[LoadFigures, ...]
    crossover: Positive | None = None
    provenance: Provenance
