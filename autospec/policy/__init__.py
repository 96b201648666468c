"""The policies that YAML can name: one file each, listed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autospec.policy.base import Policy, PolicyOptions
from autospec.policy.goodput import Goodput, GoodputOptions
from autospec.policy.lookup_first import LookupFirst, LookupFirstOptions
from autospec.policy.off import Off, OffOptions
from autospec.policy.schedule import Schedule, ScheduleOptions
from autospec.policy.static import Static, StaticOptions
from autospec.records import ProposerInfo

POLICIES: dict[type[PolicyOptions], type[Policy[Any]]] = {
    OffOptions: Off,
    StaticOptions: Static,
    ScheduleOptions: Schedule,
    LookupFirstOptions: LookupFirst,
    GoodputOptions: Goodput,
}
OPTIONS: tuple[type[PolicyOptions], ...] = tuple(POLICIES)


def make_policy(
    options: PolicyOptions, proposers: Sequence[ProposerInfo], rng: np.random.Generator
) -> Policy[Any]:
    """The policy that ``options`` belong to."""
    return POLICIES[type(options)](options, proposers, rng)
