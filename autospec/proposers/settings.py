"""How each proposer drafts unless a profile says otherwise, and lookups made accordingly."""

from __future__ import annotations

from collections.abc import Mapping

from autospec.errors import InputError
from autospec.profile.learned import Profile
from autospec.profile.tuned import ProposerSettings
from autospec.proposers.base import LookupProposer
from autospec.proposers.ngram import NgramProposer
from autospec.proposers.suffix import SuffixProposer

LOOKUP_DEFAULTS: Mapping[str, ProposerSettings] = {
    "ngram": ProposerSettings(kind="lookup", max_k=8, min_match=2, max_match=4),
    "suffix": ProposerSettings(
        kind="lookup", max_k=16, min_match=2, max_match=32, max_walk=64, cache_tokens=0
    ),
}
"""How lookups draft beside a model."""

LONE_LOOKUPS: Mapping[str, ProposerSettings] = {
    **LOOKUP_DEFAULTS,
    "suffix": LOOKUP_DEFAULTS["suffix"].model_copy(update={"min_match": 1, "max_walk": 128}),
}
"""How they draft alone. What followed the last token before is then better than nothing: on
recorded traces it made 11 / 7 / 3 / 1 % at 1 / 8 / 32 / 128 running requests, and no difference
beside EAGLE-3."""


def untuned_lookups(*, beside_model: bool) -> Mapping[str, ProposerSettings]:
    """``ngram`` and ``suffix`` as they draft unless a profile says otherwise."""
    return LOOKUP_DEFAULTS if beside_model else LONE_LOOKUPS


def settings_of(profile: Profile | None, *, beside_model: bool) -> dict[str, ProposerSettings]:
    """Settings of proposers by name: the defaults of lookups, and what a profile was tuned to."""
    tuned = {} if profile is None or profile.tuned is None else profile.tuned.proposers
    return {**untuned_lookups(beside_model=beside_model), **tuned}


def make_lookup(name: str, settings: ProposerSettings, slots: int, capacity: int) -> LookupProposer:
    """``ngram`` or ``suffix`` with these settings; those that are None are the default ones.

    Raises InputError for another name, or settings that do not fit together.
    """
    if name not in LOOKUP_DEFAULTS:
        raise InputError(f"{name!r} is no lookup; there are {', '.join(LOOKUP_DEFAULTS)}")
    known = settings.model_dump(exclude_none=True)
    filled = LOOKUP_DEFAULTS[name].model_copy(update=known)
    assert filled.min_match is not None
    assert filled.max_match is not None
    if name == "ngram":
        return NgramProposer(slots, capacity, filled.max_k, filled.min_match, filled.max_match)
    assert filled.max_walk is not None
    assert filled.cache_tokens is not None
    return SuffixProposer(
        slots,
        capacity,
        filled.max_k,
        filled.min_match,
        filled.max_match,
        filled.cache_tokens,
        max_walk=filled.max_walk,
    )
