"""The decorators behind every compiled kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile with numba in nopython mode, cached on disk, without the GIL.

    Divisions follow IEEE 754, as numpy's do: a check of every divisor costs a fifth of the time.
    """
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))


def compiled_brief(function: F) -> F:
    """``compiled`` for kernels of microseconds: they keep the GIL, which takes longer to get back
    where other threads want it."""
    return cast(F, numba.njit(cache=True, error_model="numpy")(function))
