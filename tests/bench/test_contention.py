"""Disturbance by other processes, from made-up counters and the real ones."""

from __future__ import annotations

from dataclasses import replace

from autospec.bench.contention import CpuReading, read_cpu, was_disturbed

START = CpuReading(clock=100.0, idle=50.0, used=80.0, own=10.0)


def later(*, idle: float, others: float, own: float) -> CpuReading:
    """Ten seconds after the start."""
    return CpuReading(110.0, START.idle + idle, START.used + others + own, START.own + own)


def test_others_disturb_only_where_no_core_is_idle() -> None:
    assert was_disturbed(START, later(idle=0.0, others=9.0, own=11.0))  # both want both cores
    assert not was_disturbed(START, later(idle=0.5, others=0.5, own=19.0))
    assert not was_disturbed(START, later(idle=60.0, others=9.0, own=11.0))  # eight cores


def test_nothing_known_is_not_disturbed() -> None:
    assert not was_disturbed(None, START)
    assert not was_disturbed(START, None)
    assert not was_disturbed(START, replace(later(idle=0.0, others=9.0, own=1.0), clock=100.0))


def test_the_real_counters_go_up() -> None:
    before = read_cpu()
    after = read_cpu()
    assert before is not None
    assert after is not None
    assert after.clock >= before.clock
    assert after.own >= before.own
    assert after.used >= before.used > 0.0
