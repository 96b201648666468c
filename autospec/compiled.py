"""The decorators behind every compiled kernel, and records that kernels take by reference."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import config, typeof
from numba.core import cgutils, types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
    unbox,
)
from numpy.typing import NDArray

from autospec.kernel_cache import PACKAGE, kernel_cache, places, state_of_kernels

F = TypeVar("F", bound=Callable[..., object])
Record = TypeVar("Record", bound=tuple[Any, ...])

CACHE = kernel_cache(state_of_kernels(PACKAGE, numba.__version__), places())
"""Where machine code is kept; None where no folder can be written."""


def compiled(function: F) -> F:
    """Compile with numba in nopython mode, cached on disk, without the GIL.

    Divisions follow IEEE 754, as numpy's do: a check of every divisor costs a fifth of the time.
    """
    return _cached(function, numba.njit(cache=True, nogil=True, error_model="numpy"))


def compiled_brief(function: F) -> F:
    """``compiled`` for kernels of microseconds: they keep the GIL, which takes longer to get back
    where other threads want it."""
    return _cached(function, numba.njit(cache=True, error_model="numpy"))


def inlined(function: F) -> F:
    """``compiled_brief`` for a part of one kernel that takes many arrays: calling it would take
    longer than what it does."""
    return _cached(function, numba.njit(cache=True, error_model="numpy", forceinline=True))


def is_ready(kernel: Callable[..., object]) -> bool:
    """Whether it need not be compiled: it was called before, or its machine code is on disk."""
    if cast(Any, kernel).overloads:
        return True
    return CACHE is not None and any(CACHE.rglob(f"*.{kernel.__name__}-*.nbi"))


def _cached(function: F, compile_with: Callable[[F], Any]) -> F:
    """Compile with numba's cache where ``kernel_cache`` says; numba looks now, and only now."""
    settings = cast(Any, config)
    before = settings.CACHE_DIR
    if CACHE is not None:
        settings.CACHE_DIR = str(CACHE)
    try:
        return cast(F, compile_with(function))
    finally:
        settings.CACHE_DIR = before


def prepared(kernel: F, *arguments: object) -> F:
    """A kernel that has been called with such arguments, for others of exactly these types.

    Their types are looked at no more in each call, which takes a third of it. Whoever calls it has
    checked them.
    """
    compiled_for = tuple(typeof(each) for each in arguments)
    return cast(F, cast(Any, kernel).overloads[compiled_for].entry_point)


class _Referred(types.Type):
    """The numba type of a record by reference, which is the address of its words.

    An array takes a word for its data and one for each length, all else takes one.
    """

    def __init__(self, fields: tuple[tuple[str, types.Type], ...]) -> None:
        self.fields = dict(fields)
        self.words: dict[str, int] = {}
        size = 0
        for name, kind in fields:
            self.words[name] = size
            size += 1 + (kind.ndim if isinstance(kind, types.Array) else 0)
        super().__init__(name=f"Referred({fields})")


class _Reference(int):
    """What Python holds of a record by reference, its address; it keeps the record alive."""

    _record: tuple[Any, ...]
    _words: NDArray[np.int64]
    _numba_type_: _Referred

    def __new__(
        cls, record: tuple[Any, ...], numba_type: _Referred, words: list[int]
    ) -> _Reference:
        array = np.array(words, dtype=np.int64)
        reference = super().__new__(cls, array.ctypes.data)
        reference._record, reference._words, reference._numba_type_ = record, array, numba_type
        return reference

    def __reduce__(self) -> str:
        raise TypeError("a record by reference cannot be copied: its address would stay the same")


@typeof_impl.register(_Reference)
def _type_of(reference: _Reference, context: object) -> _Referred:
    return reference._numba_type_


def by_reference(record: Record) -> Record:
    """A named tuple of arrays, numbers and others like it, in a form that only kernels can read.

    Every array costs a kernel's caller time, and every array that a kernel reads from a record of
    numba's own is counted, twice. This is passed as one argument and nothing of it is counted.
    Arrays are shared and must be contiguous, numbers copied.
    """
    fields: list[tuple[str, types.Type]] = []
    words: list[int] = []
    for name, value in zip(cast(Any, record)._fields, record, strict=True):
        kind = typeof(value)
        fields.append((name, kind))
        if isinstance(value, np.ndarray):
            if not value.flags.c_contiguous:
                raise ValueError(f"{name} is not contiguous")
            words += [value.ctypes.data, *value.shape]
        elif isinstance(value, _Reference):
            words.append(int(value))
        elif isinstance(value, float):
            words += struct.unpack("q", struct.pack("d", value))
        else:
            words.append(int(cast(int, value)))
    return cast(Record, _Reference(record, _Referred(tuple(fields)), words))


register_model(_Referred)(models.OpaqueModel)


@unbox(_Referred)  # type: ignore[untyped-decorator]
def _unbox(numba_type: Any, reference: Any, c: Any) -> NativeValue:
    return NativeValue(c.builder.inttoptr(c.pyapi.long_as_longlong(reference), cgutils.voidptr_t))


@infer_getattr
class _Fields(AttributeTemplate):
    key = _Referred

    def generic_resolve(  # type: ignore[override]
        self, numba_type: _Referred, name: str
    ) -> types.Type | None:
        return numba_type.fields.get(name)


@lower_getattr_generic(_Referred)  # type: ignore[untyped-decorator]
def _read(context: Any, builder: Any, numba_type: _Referred, address: Any, name: str) -> Any:
    """A field's value; words never change while a kernel runs, whatever else it writes."""
    word, number = (context.get_value_type(kind) for kind in (types.int64, types.float64))
    words = builder.bitcast(address, word.as_pointer())
    kind = numba_type.fields[name]

    def load(offset: int, of: Any = word) -> Any:
        place = builder.gep(words, [word(numba_type.words[name] + offset)])
        loaded = builder.load(builder.bitcast(place, of.as_pointer()))
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder)
        itemsize = word(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
        shape = [load(1 + axis) for axis in range(kind.ndim)]
        strides = [itemsize]
        for length in shape[:0:-1]:
            strides.insert(0, builder.mul(strides[0], length))
        context.populate_array(
            array,
            data=load(0, array.data.type),
            shape=shape,
            strides=strides,
            itemsize=itemsize,
            meminfo=None,
        )
        return array._getvalue()
    if isinstance(kind, types.Float):
        return load(0, number)
    if isinstance(kind, types.Boolean):
        return builder.trunc(load(0), context.get_value_type(kind))
    return builder.inttoptr(load(0), cgutils.voidptr_t) if isinstance(kind, _Referred) else load(0)
