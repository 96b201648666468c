"""Cost files: the step time of one engine on one device, in YAML, for replay.

An example with every kind of proposer; copy it without the indent::

    shape: packed                 # a step pays for every token; padded: for the longest row times
                                  # the rows; stepped: for one of captured_sizes: [8, 16, 32]
    step:                         # one forward of the target
      fixed_seconds: 0.0065       # however little goes through it
      overhead_seconds: 0.001     # scheduling and sampling around it; 0 unless given
      per_token_seconds: 2.0e-5   # for each running request and each draft token to verify
      per_context_token_seconds: 1.2e-8   # for each token in their caches; 0 unless given
    proposers:
      ngram: {kind: lookup, step_fraction: 0.002, max_k: 8}     # a share of the forward's time
      suffix: {kind: lookup, step_fraction: 0.005, max_k: 16}   # lookups are these two
      eagle3:                     # any other name: traces have accepted.eagle3
        kind: sequential          # a forward for each token; parallel: one for all
        per_depth_seconds: 7.0e-4
        per_context_token_seconds: 1.0e-9   # for each token in the caches; 0 unless given
        max_k: 6
      suffix_after: {kind: appended, head: eagle3, head_k: 2, max_k: 18}   # needs suffix, eagle3
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from autospec.errors import InputError
from autospec.records import Shape

LOOKUPS = ("ngram", "suffix")
"""The lookup proposers that a cost file may name; any other name is a recorded one."""

Seconds = Annotated[float, Field(ge=0)]
MaxK = Annotated[int, Field(ge=1, le=64)]


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class StepSeconds(_Form):
    """A target forward: what every step, every paid token and every cached token takes."""

    fixed_seconds: Annotated[float, Field(gt=0)]
    overhead_seconds: Seconds = 0.0
    per_token_seconds: Seconds
    per_context_token_seconds: Seconds = 0.0


class ModelSeconds(_Form):
    """A model that drafts: one forward per depth (sequential) or one for all (parallel)."""

    kind: Literal["sequential", "parallel"]
    per_depth_seconds: Seconds
    per_context_token_seconds: Seconds = 0.0
    max_k: MaxK = 16


class LookupSeconds(_Form):
    """A lookup, as a share of the target forward of every step in which it runs."""

    kind: Literal["lookup"]
    step_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_k: MaxK = 20


class AppendedSeconds(_Form):
    """A suffix lookup that goes on from ``head_k`` tokens of a model: both are paid."""

    kind: Literal["appended"]
    head: str
    head_k: Annotated[int, Field(ge=1, le=16)] = 2
    max_k: MaxK = 18


class CostFile(_Form):
    """The step time of one engine on one device.

    A step pays for every token (``packed``), for the longest row times the rows (``padded``), or
    for the smallest of ``captured_sizes`` that holds its tokens (``stepped``).
    """

    shape: Shape
    captured_sizes: tuple[Annotated[int, Field(ge=1)], ...] = ()
    step: StepSeconds
    proposers: dict[
        str,
        Annotated[ModelSeconds | LookupSeconds | AppendedSeconds, Field(discriminator="kind")],
    ]

    def charge(
        self, part: ModelSeconds | LookupSeconds | AppendedSeconds
    ) -> tuple[float, float, float]:
        """What drafting takes: a share of the target forward, and of every forward of a model its
        seconds and those per token of context. All forwards of an appended one's model are one.
        """
        if isinstance(part, LookupSeconds):
            return part.step_fraction, 0.0, 0.0
        if isinstance(part, ModelSeconds):
            return 0.0, part.per_depth_seconds, part.per_context_token_seconds
        _, seconds, context_seconds = self.charge(self.proposers[part.head])
        fraction = self.charge(self.proposers["suffix"])[0]
        return fraction, part.head_k * seconds, part.head_k * context_seconds

    @model_validator(mode="after")
    def _check(self) -> CostFile:
        if list(self.captured_sizes) != sorted(set(self.captured_sizes)):
            raise ValueError("captured_sizes must rise")
        if (self.shape == "stepped") != bool(self.captured_sizes):
            raise ValueError("captured_sizes belong to shape 'stepped', which needs them")
        for name, part in self.proposers.items():
            if isinstance(part, LookupSeconds) and name not in LOOKUPS:
                raise ValueError(f"proposers.{name}: a lookup is one of {', '.join(LOOKUPS)}")
            if isinstance(part, AppendedSeconds):
                self._check_appended(name, part)
        return self

    def _check_appended(self, name: str, part: AppendedSeconds) -> None:
        if not isinstance(self.proposers.get(part.head), ModelSeconds):
            raise ValueError(f"proposers.{name}: head {part.head!r} is none of the models here")
        if "suffix" not in self.proposers:
            raise ValueError(f"proposers.{name}: needs the lookup 'suffix' beside it")
        if part.max_k <= part.head_k:
            raise ValueError(
                f"proposers.{name}: max_k {part.max_k} must be above head_k {part.head_k}"
            )


def read_cost_file(path: Path) -> CostFile:
    """A cost file in YAML. Raises InputError that lists every key that is wrong."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: is not YAML: {error}") from None
    try:
        return CostFile.model_validate(value)
    except ValidationError as error:
        mistakes = []
        for each in error.errors(include_url=False):
            key = ".".join(str(part) for part in each["loc"]) or "the file"
            told = each["type"] in {"missing", "value_error"}
            found = "" if told else f", found {str(each['input'])[:60]}"
            mistakes.append(f"{path}: {key}: {each['msg']}{found}")
        raise InputError("\n".join(mistakes)) from None
