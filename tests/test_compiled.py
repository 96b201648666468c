"""Records by reference, as kernels see them."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import NamedTuple

import numpy as np
import pytest

from autospec.compiled import by_reference, compiled_brief, prepared
from autospec.records import Float64Array, Int16Array


class Inner(NamedTuple):
    values: Float64Array
    scale: float


class Outer(NamedTuple):
    inner: Inner
    table: Int16Array
    rows: int
    is_on: bool


@compiled_brief
def add_up(outer: Outer) -> float:
    total = 0.0
    if outer.is_on:
        for row in range(outer.rows):
            for column in range(outer.table.shape[1]):
                total += outer.table[row, column] * outer.inner.scale
            outer.inner.values[row] = total
    return total


def made(*, is_on: bool = True) -> tuple[Outer, Float64Array]:
    values = np.zeros(2)
    table = np.arange(6, dtype=np.int16).reshape(2, 3)
    return by_reference(Outer(by_reference(Inner(values, 0.5)), table, 2, is_on)), values


def test_kernels_read_numbers_and_write_arrays() -> None:
    outer, values = made()
    assert add_up(outer) == 7.5
    assert values.tolist() == [1.5, 7.5]
    assert add_up(made(is_on=False)[0]) == 0.0


def test_a_reference_keeps_its_arrays_alive() -> None:
    outers = [made()[0] for _ in range(200)]
    gc.collect()
    [np.full(6, 99, dtype=np.int16) for _ in range(1000)]
    assert [add_up(outer) for outer in outers] == [7.5] * 200


def test_what_kernels_could_not_read_is_refused() -> None:
    with pytest.raises(ValueError, match="values is not contiguous"):
        by_reference(Inner(np.zeros(4)[::2], 1.0))
    outer, _ = made()
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(outer)
    with pytest.raises(TypeError, match="cannot be copied"):
        pickle.dumps(outer)


def test_a_prepared_kernel_does_the_same_for_the_types_that_it_was_compiled_for() -> None:
    inners = [by_reference(Inner(np.full(3, each), 2.0)) for each in (1.0, 5.0)]
    table = np.ones((2, 2), dtype=np.int16)
    records = [by_reference(Outer(inner, table, 2, True)) for inner in inners]
    expected = [add_up(each) for each in records]
    ready = prepared(add_up, records[0])
    assert [ready(each) for each in records] == expected
    with pytest.raises(KeyError):
        prepared(add_up, 1.0)
