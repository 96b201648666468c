"""The policies that YAML can name: one file each, listed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autospec.policy.base import Policy, PolicyOptions
from autospec.policy.bayes import Bayes, BayesOptions
from autospec.policy.ema import Ema, EmaOptions
from autospec.policy.exp3 import Exp3, Exp3Options
from autospec.policy.gate import Gate, GateOptions
from autospec.policy.goodput import Goodput, GoodputOptions
from autospec.policy.hedge import Hedge, HedgeOptions
from autospec.policy.heuristic import Heuristic, HeuristicOptions
from autospec.policy.lookup_first import LookupFirst, LookupFirstOptions
from autospec.policy.nightjar import Nightjar, NightjarOptions
from autospec.policy.off import Off, OffOptions
from autospec.policy.schedule import Schedule, ScheduleOptions
from autospec.policy.static import Static, StaticOptions
from autospec.policy.thompson import Thompson, ThompsonOptions
from autospec.policy.ucb import Ucb, UcbOptions
from autospec.records import ProposerInfo

POLICIES: dict[type[PolicyOptions], type[Policy[Any]]] = {
    OffOptions: Off,
    StaticOptions: Static,
    ScheduleOptions: Schedule,
    LookupFirstOptions: LookupFirst,
    GoodputOptions: Goodput,
    HeuristicOptions: Heuristic,
    EmaOptions: Ema,
    GateOptions: Gate,
    UcbOptions: Ucb,
    Exp3Options: Exp3,
    ThompsonOptions: Thompson,
    NightjarOptions: Nightjar,
    HedgeOptions: Hedge,
    BayesOptions: Bayes,
}
OPTIONS: tuple[type[PolicyOptions], ...] = tuple(POLICIES)


def make_policy(
    options: PolicyOptions, proposers: Sequence[ProposerInfo], rng: np.random.Generator
) -> Policy[Any]:
    """The policy that ``options`` belong to."""
    return POLICIES[type(options)](options, proposers, rng)
