"""The decorators behind every compiled kernel, and records that kernels take by reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import types
from numba.core.extending import overload
from numba.experimental import structref

F = TypeVar("F", bound=Callable[..., object])
Record = TypeVar("Record", bound=tuple[Any, ...])


def compiled(function: F) -> F:
    """Compile with numba in nopython mode, cached on disk, without the GIL.

    Divisions follow IEEE 754, as numpy's do: a check of every divisor costs a fifth of the time.
    """
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))


def compiled_brief(function: F) -> F:
    """``compiled`` for kernels of microseconds: they keep the GIL, which takes longer to get back
    where other threads want it."""
    return cast(F, numba.njit(cache=True, error_model="numpy")(function))


def inlined(function: F) -> F:
    """``compiled_brief`` for a part of one kernel that takes many arrays: calling it would take
    longer than what it does."""
    return cast(F, numba.njit(cache=True, error_model="numpy", forceinline=True)(function))


class _Reference:
    """What Python holds of a record that was made ``by_reference``."""

    __slots__ = ("_meminfo", "_numba_type_")
    _numba_type_: object
    _meminfo: object

    @classmethod
    def _numba_box_(cls, numba_type: object, meminfo: object) -> _Reference:
        made = cls()
        made._numba_type_, made._meminfo = numba_type, meminfo
        return made


@structref.register
class _Referred(types.StructRef):
    """The numba type of such records; their fields tell one from another."""


structref.define_boxing(_Referred, _Reference)


def _refer(record: Record) -> Record:
    raise NotImplementedError("in kernels only")


@overload(_refer)
def _refer_compiled(record):  # type: ignore[no-untyped-def]
    fields = list(zip(record.fields, record.types, strict=True))
    scope = {"new": structref.new, "numba_type": cast(Any, _Referred)(fields)}
    copies = "".join(f"    made.{name} = record.{name}\n" for name, _ in fields)
    exec(f"def refer(record):\n    made = new(numba_type)\n{copies}    return made\n", scope)
    return scope["refer"]


@compiled_brief
def by_reference(record: Record) -> Record:
    """A named tuple of arrays, numbers and others like it, in a form that only kernels can read.

    Every array costs a kernel's caller time; this is passed as one argument, whatever it holds.
    Arrays are shared, numbers copied.
    """
    return _refer(record)
