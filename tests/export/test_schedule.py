from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autospec.export.schedule import Band, fit_bands
from autospec.records import Float64Array

SIZES = [1, 2, 3, 4, 6, 8, 12, 16]


def table(best: list[int], depth: int, loss: float = 0.2) -> Float64Array:
    """Goodput 1 at the best k of each size, ``loss`` less for each step away from it."""
    return np.array([[1.0 - loss * abs(k - top) / depth for k in range(depth)] for top in best])


def test_bands_follow_the_best_k() -> None:
    found = fit_bands(SIZES, table([4, 4, 4, 2, 2, 0, 0, 0], 5))
    assert found == (Band(1, 3, 4), Band(4, 6, 2), Band(7, 16, 0))


def test_of_equal_k_the_smaller_is_taken() -> None:
    flat = np.ones((len(SIZES), 6))
    flat[:, 0] = 0.5
    assert fit_bands(SIZES, flat) == (Band(1, 16, 1),)


def test_a_loss_within_the_tolerance_is_no_reason_for_a_larger_k() -> None:
    goodputs = np.array([[0.5, 0.996, 1.0]] * len(SIZES))
    assert fit_bands(SIZES, goodputs) == (Band(1, 16, 1),)
    assert fit_bands(SIZES, goodputs, tolerance=0.0) == (Band(1, 16, 2),)


def test_falling_refuses_to_rise_where_the_engine_must() -> None:
    goodputs = table([1, 1, 3, 3, 3, 3, 1, 1], 4)
    assert [band.k for band in fit_bands(SIZES, goodputs)] == [1, 3, 1]
    fallen = [band.k for band in fit_bands(SIZES, goodputs, falling=True)]
    assert fallen == sorted(fallen, reverse=True)


def test_few_bands_are_kept_to() -> None:
    goodputs = table([7, 6, 5, 4, 3, 2, 1, 0], 8, loss=1.0)
    assert len(fit_bands(SIZES, goodputs, most_bands=2)) == 2
    assert len(fit_bands(SIZES, goodputs, most_bands=1)) == 1
    assert len(fit_bands(SIZES, goodputs, most_bands=8)) == 8


def test_what_is_not_to_be_had_is_never_chosen() -> None:
    goodputs = table([4] * 8, 5)
    goodputs[4:, 2:] = np.nan
    found = fit_bands(SIZES, goodputs)
    assert found == (Band(1, 4, 4), Band(5, 16, 1))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(0.1, 2.0), min_size=4, max_size=4),
        min_size=len(SIZES),
        max_size=len(SIZES),
    ),
    st.booleans(),
)
def test_bands_cover_every_size_once(rows: list[list[float]], falling: bool) -> None:
    goodputs = np.array(rows)
    found = fit_bands(SIZES, goodputs, falling=falling)
    assert found[0].first == 1
    assert found[-1].last == SIZES[-1]
    for one, other in itertools.pairwise(found):
        assert other.first == one.last + 1
        assert one.k != other.k
        if falling:
            assert other.k < one.k
    chosen = [next(band.k for band in found if size <= band.last) for size in SIZES]
    weights = np.log2(np.array(SIZES) + 1.0) - np.log2([1, *(size + 1 for size in SIZES[:-1])])
    mean = float(weights @ np.log(goodputs[np.arange(len(SIZES)), chosen]))
    constant = max(float(weights @ np.log(goodputs[:, k])) for k in range(4))
    assert mean >= constant - 0.01 * weights.sum()


def test_a_single_size() -> None:
    assert fit_bands([1], np.array([[1.0, 2.0]])) == (Band(1, 1, 1),)


@pytest.mark.parametrize("most_bands", [1, 3])
def test_plain_everywhere(most_bands: int) -> None:
    goodputs = table([0] * 8, 3)
    assert fit_bands(SIZES, goodputs, most_bands=most_bands) == (Band(1, 16, 0),)
