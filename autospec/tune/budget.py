"""Time that a tuning run may take, counted over interruptions."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from autospec.errors import InputError

_MOST_LOAD = 1024
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_budget(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``15m`` or ``1.5h``. Raises InputError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh]?)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise InputError(f"--budget: {text!r} is no time; write 90s, 15m or 1h")
    return float(found[1]) * _UNITS[found[2]]


def parse_loads(text: str) -> tuple[int, ...]:
    """Running requests of a comma separated list, rising. Raises InputError."""
    found = set()
    for part in (part.strip() for part in text.split(",")):
        if not (part.isascii() and part.isdigit() and 1 <= int(part) <= _MOST_LOAD):
            raise InputError(
                f"--loads: {part!r} is not a number of requests from 1 to {_MOST_LOAD}"
            )
        found.add(int(part))
    return tuple(sorted(found))


class Budget:
    """Seconds spent so far and left, those of earlier, interrupted runs included."""

    def __init__(
        self, seconds: float, spent: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds = seconds
        self._earlier = spent
        self._clock = clock
        self._began = clock()

    @property
    def spent(self) -> float:
        """Seconds used."""
        return self._earlier + self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds that remain, at least 0."""
        return max(0.0, self.seconds - self.spent)

    def left_until(self, share: float) -> float:
        """Seconds until a share of the whole budget is used, at least 0."""
        return max(0.0, self.seconds * share - self.spent)
