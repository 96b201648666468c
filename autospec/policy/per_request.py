"""Numbers that a policy keeps per running request, found again by handle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autospec.records import Float64Array, Int64Array


class PerRequest:
    """``width`` numbers for each request of the last batch; a request that leaves is forgotten."""

    def __init__(self, width: int) -> None:
        self._handles = np.zeros(0, dtype=np.int64)
        self._values = np.zeros((0, width))

    def align(self, handles: Int64Array, fresh: Float64Array) -> Float64Array:
        """The numbers [n, width] of the requests in ``handles``, to be changed in place.

        Requests that were not in the last batch start with ``fresh`` [width].
        """
        if len(handles) == len(self._handles) and (handles == self._handles).all():
            return self._values
        at, known = self._places(handles)
        values = np.tile(fresh, (len(handles), 1))
        values[known] = self._values[at[known]]
        self._handles, self._values = handles.copy(), values
        return values

    def of(self, handles: Int64Array) -> tuple[Float64Array, Int64Array]:
        """The numbers [m, width] of those in ``handles`` that are known, and their rows [m].

        The numbers are a copy; ``put`` writes them back.
        """
        at, known = self._places(handles)
        return self._values[at[known]], np.flatnonzero(known)

    def put(self, handles: Int64Array, values: Float64Array) -> None:
        """Write the numbers [m, width] of known requests."""
        at, known = self._places(handles)
        self._values[at[known]] = values[known]

    def left(self, handles: Int64Array) -> Float64Array:
        """The numbers [m, width] of requests of the last batch that are not in ``handles``."""
        return self._values[~np.isin(self._handles, handles)]

    def _places(
        self, handles: Int64Array
    ) -> tuple[Int64Array, np.ndarray[Any, np.dtype[np.bool_]]]:
        if len(self._handles) == 0:
            return np.zeros(len(handles), dtype=np.int64), np.zeros(len(handles), dtype=np.bool_)
        order = np.argsort(self._handles, kind="stable")
        found = np.searchsorted(self._handles, handles, sorter=order)
        at = order[np.minimum(found, len(order) - 1)].astype(np.int64)
        return at, self._handles[at] == handles

    def state(self) -> Mapping[str, Any]:
        """Handles and numbers, as JSON."""
        return {"handles": self._handles.tolist(), "values": self._values.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state``."""
        self._handles = np.array(state["handles"], dtype=np.int64)
        self._values = np.array(state["values"], dtype=np.float64).reshape(
            len(self._handles), self._values.shape[1]
        )
