"""Arrays from outside, made safe for compiled kernels, which check nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

INT16 = np.dtype(np.int16)
INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)


def checked(
    array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...], name: str
) -> NDArray[Any]:
    """The array in this dtype and contiguous; itself where it is. ValueError for another shape."""
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    if array.dtype is dtype and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array, dtype=dtype)
