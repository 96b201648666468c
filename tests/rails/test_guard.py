from __future__ import annotations

import numpy as np

from autospec.rails.guard import Guard, note_held, note_speculative

OCTAVE = 3
PLAIN = 10.0  # tokens that plain decoding would commit in a step's time


def speculate(guard: Guard, committed: float, steps: int, seed: int = 0) -> int | None:
    """Steps of ``committed`` tokens on average; returns when the guard activated."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        if note_speculative(guard.reference, OCTAVE, int(rng.poisson(committed)), PLAIN):
            return step
    return None


def hold(guard: Guard) -> int:
    """Plain steps until it lets go."""
    steps = 0
    while guard.is_holding(OCTAVE):
        note_held(guard.reference, OCTAVE)
        steps += 1
    return steps


def test_a_loss_activates_it_and_the_hold_ends() -> None:
    guard = Guard(margin=0.02, window_steps=64, hold_steps=50)
    assert not guard.is_holding(OCTAVE)
    assert speculate(guard, 6, 200) is not None
    assert guard.is_holding(OCTAVE)
    assert hold(guard) == 50
    assert speculate(guard, 30, 500) is None


def test_it_waits_for_half_a_window() -> None:
    guard = Guard(margin=0.02, window_steps=64, hold_steps=50)
    activated = speculate(guard, 1, 200)
    assert activated is not None
    assert 31 <= activated <= 64


def test_a_gain_never_activates_it() -> None:
    assert speculate(Guard(0.02, 64, 64), 12, 5000) is None


def test_noise_around_the_margin_seldom_activates_it() -> None:
    """At exactly plain decoding's goodput a loss of 2% must not be seen in noise."""
    activations = sum(
        speculate(Guard(0.02, 64, 64), 10, 300, seed) is not None for seed in range(20)
    )
    assert activations <= 3


def test_a_loss_within_the_margin_is_tolerated() -> None:
    guard = Guard(margin=0.3, window_steps=64, hold_steps=64)
    assert speculate(guard, 8, 1000) is None


def test_holds_double_while_losses_go_on() -> None:
    guard = Guard(0.02, 16, 10)
    holds = []
    for _ in range(8):
        assert speculate(guard, 3, 100) is not None
        holds.append(hold(guard))
    assert holds == [10, 20, 40, 80, 160, 320, 320, 320]


def test_a_gain_in_between_resets_the_hold() -> None:
    guard = Guard(0.02, 16, 10)
    for _ in range(3):
        assert speculate(guard, 3, 100) is not None
        hold(guard)
    assert speculate(guard, 30, 100) is None
    assert speculate(guard, 1, 400) is not None
    assert hold(guard) == 10


def test_plain_steps_outside_a_hold_do_not_matter() -> None:
    guard = Guard(0.02, 16, 10)
    for _ in range(100):
        note_held(guard.reference, OCTAVE)
    assert not guard.is_holding(OCTAVE)
    assert speculate(guard, 3, 100) is not None
    assert hold(guard) == 10


def test_each_octave_is_watched_by_itself() -> None:
    guard = Guard(0.02, 16, 10)
    assert speculate(guard, 3, 100) is not None
    assert not guard.is_holding(OCTAVE + 1)
    note_held(guard.reference, OCTAVE + 1)
    assert hold(guard) == 10
