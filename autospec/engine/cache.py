"""Preallocated key/value cache of a model, one slot per running request."""

from __future__ import annotations

import numpy as np
import torch

from autospec.records import Int32Array


class SlotCache:
    """Keys and values of ``layers`` layers, each ``[slots, capacity, kv_heads, head_dim]``.

    ``lengths[slot]`` is how many positions of a slot are valid. Rejected draft tokens are undone by
    lowering it: what lies behind is never attended to and is overwritten by the next step. The
    memory starts as zeros, because a masked position must still hold a finite number.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (slots, capacity, kv_heads, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.lengths: Int32Array = np.zeros(slots, dtype=np.int32)
        self.slots = slots
        self.capacity = capacity
        self.device = device
        self._flat_keys = [keys.view(slots * capacity, kv_heads, head_dim) for keys in self.keys]
        self._flat_values = [
            values.view(slots * capacity, kv_heads, head_dim) for values in self.values
        ]

    def write(
        self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store [tokens, kv_heads, head_dim] at ``index`` = ``slot * capacity + position``."""
        self._flat_keys[layer].index_copy_(0, index, keys)
        self._flat_values[layer].index_copy_(0, index, values)

    def memory_bytes(self) -> int:
        """Bytes of all keys and values together."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))
