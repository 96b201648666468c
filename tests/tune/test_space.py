from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autospec.errors import InputError
from autospec.profile.tuned import KCap, ProposerSettings
from autospec.proposers.settings import LONE_LOOKUPS, LOOKUP_DEFAULTS, make_lookup, settings_of
from autospec.tune.space import NO_CAP, make_space

DRAFT = {"draft": ProposerSettings(kind="sequential", max_k=4, min_confidence=0.0)}
SPACE = make_space({**LOOKUP_DEFAULTS, **DRAFT}, (1, 4, 16), with_confidence=True)


def test_the_default_point_is_the_untuned_settings_without_caps() -> None:
    found, caps = SPACE.decode(SPACE.default)
    assert found == {**LOOKUP_DEFAULTS, **DRAFT}
    assert caps == ()


@st.composite
def points(draw: st.DrawFn) -> tuple[float | int, ...]:
    values: list[float | int] = []
    for each in SPACE.dimensions:
        if each.kind == "choice":
            values.append(draw(st.sampled_from(each.choices)))
        elif each.kind == "real":
            values.append(draw(st.floats(each.low, each.high, allow_subnormal=False)))
        else:
            values.append(draw(st.integers(int(each.low), int(each.high))))
    return tuple(values)


@settings(max_examples=60, deadline=None)
@given(points())
def test_every_point_makes_settings_that_fit_together(point: tuple[float | int, ...]) -> None:
    found, caps = SPACE.decode(point)
    for name in LOOKUP_DEFAULTS:
        make_lookup(name, found[name], 1, 64)
    assert [cap.load for cap in caps] == sorted({cap.load for cap in caps})
    again, same_caps = SPACE.decode(SPACE.encode(found, _per_load(caps)))
    assert again == found
    assert same_caps == caps


def _per_load(caps: tuple[KCap, ...]) -> tuple[KCap, ...]:
    """Caps by load rather than from load on."""
    found = []
    for load in (1, 4, 16):
        k = next((cap.k for cap in reversed(caps) if cap.load <= load), 32)
        found.append(KCap(load=load, k=k))
    return tuple(found)


def test_a_cap_ends_where_the_next_load_has_none() -> None:
    point = list(SPACE.default)
    names = [each.name for each in SPACE.dimensions]
    point[names.index("cap.4")] = 1
    assert SPACE.decode(tuple(point))[1] == (KCap(load=4, k=1), KCap(load=16, k=32))
    point[names.index("cap.4")] = NO_CAP
    assert SPACE.decode(tuple(point))[1] == ()


def test_a_cap_that_no_draft_reaches_is_none() -> None:
    point = list(SPACE.default)
    names = [each.name for each in SPACE.dimensions]
    point[names.index("ngram.max_k")] = point[names.index("suffix.max_k")] = 8
    point[names.index("cap.1")] = NO_CAP - 2
    assert SPACE.decode(tuple(point))[1] == ()
    point[names.index("suffix.max_k")] = 9
    assert SPACE.decode(tuple(point))[1] == (KCap(load=1, k=8), KCap(load=4, k=32))


def test_settings_of_a_profile_overlay_the_defaults() -> None:
    assert settings_of(None, beside_model=True) == LOOKUP_DEFAULTS
    assert settings_of(None, beside_model=False) == LONE_LOOKUPS


def test_an_unknown_lookup_is_refused() -> None:
    with pytest.raises(InputError, match="'eagle' is no lookup; there are ngram, suffix"):
        make_lookup("eagle", LOOKUP_DEFAULTS["ngram"], 1, 8)
