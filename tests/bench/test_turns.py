"""Runs that take turns."""

from __future__ import annotations

from functools import partial

from autospec.bench.turns import take_turns


def test_the_one_that_is_least_far_goes_next() -> None:
    order: list[str] = []
    steps = {"slow": 0.125, "fast": 0.5, "odd": 0.375}
    shares = dict.fromkeys(steps, 0.0)

    def run(name: str) -> float:
        order.append(name)
        shares[name] += steps[name]
        others = [share for other, share in shares.items() if other != name]
        assert shares[name] - steps[name] <= min(others)
        return shares[name]

    take_turns({name: partial(run, name) for name in steps})
    assert order[:4] == ["slow", "fast", "odd", "slow"]
    assert {name: order.count(name) for name in steps} == {"slow": 8, "fast": 2, "odd": 3}


def test_a_run_that_ends_at_once_has_one_turn() -> None:
    turns: list[str] = []

    def run() -> float:
        turns.append("only")
        return 1.0

    take_turns({"only": run})
    assert turns == ["only"]
    take_turns({})
