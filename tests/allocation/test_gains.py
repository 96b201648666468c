from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autospec.allocation.gains import latency_gains, throughput_gains, weigh


def test_throughput_gains_are_survivals() -> None:
    hazards = np.array([[[0.5, 0.5, 0.8]]], dtype=np.float32)
    gains = np.zeros_like(hazards)
    throughput_gains(hazards, np.array([[2]], dtype=np.int16), np.ones(1), np.ones(1), gains)
    assert gains[0, 0].tolist() == [0.5, 0.25, 0.0]  # nothing beyond the limit


def test_weights_leave_what_is_beyond_the_limit_alone() -> None:
    """It is another step's, and would be weighed again and again."""
    gains = np.ones((2, 1, 3), dtype=np.float32)
    weigh(2, gains, np.array([[2, 0]], dtype=np.int16), np.array([4.0, 4.0]))
    assert gains[:, 0].tolist() == [[4.0, 4.0, 1.0], [1.0, 1.0, 1.0]]


def test_latency_gains_shorten_the_time_per_token() -> None:
    """One certain token halves a request's time per token, a second one takes it to a third."""
    hazards = np.ones((1, 1, 2), dtype=np.float32)
    gains = np.zeros_like(hazards)
    latency_gains(hazards, np.array([[2]], dtype=np.int16), np.ones(1), np.array([3.0]), gains)
    assert gains[0, 0] == pytest.approx([3 * (1 - 1 / 2), 3 * (1 / 2 - 1 / 3)])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=12))
def test_gains_never_rise_with_the_position(hazards: list[float]) -> None:
    array = np.array([[hazards]], dtype=np.float32)
    limits = np.array([[len(hazards)]], dtype=np.int16)
    gains = np.zeros_like(array)
    throughput_gains(array, limits, np.ones(1), np.ones(1), gains)
    assert (np.diff(gains[0, 0]) <= 1e-6).all()
    latency_gains(array, limits, np.ones(1), np.ones(1), gains)
    assert (np.diff(gains[0, 0]) <= 1e-6).all()
    assert 0.0 <= gains.sum() <= 1.0
