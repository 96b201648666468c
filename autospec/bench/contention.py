"""Whether other processes took processor time that a measurement needed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_OTHERS_CORES = 0.25
_IDLE_CORES = 0.5


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Seconds so far: on the clock, of processor time idle, in use, and in use by this process."""

    clock: float
    idle: float
    used: float
    own: float


def read_cpu() -> CpuReading | None:
    """The counters now; None where the system does not tell."""
    try:
        with Path("/proc/stat").open(encoding="ascii") as file:
            ticks = [int(number) for number in file.readline().split()[1:9]]
        user, nice, system, idle, io_wait, interrupts, soft_interrupts, stolen = ticks
    except (OSError, ValueError):
        return None
    per_second = os.sysconf("SC_CLK_TCK")
    used = user + nice + system + interrupts + soft_interrupts + stolen
    own = os.times()
    return CpuReading(
        clock=time.monotonic(),
        idle=(idle + io_wait) / per_second,
        used=used / per_second,
        own=own.user + own.system,
    )


def was_disturbed(before: CpuReading | None, after: CpuReading | None) -> bool:
    """Whether others used a quarter of a core or more while hardly any was idle."""
    if before is None or after is None or after.clock <= before.clock:
        return False
    seconds = after.clock - before.clock
    others = (after.used - before.used) - (after.own - before.own)
    return others > _OTHERS_CORES * seconds and after.idle - before.idle < _IDLE_CORES * seconds
