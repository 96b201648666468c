"""Packed ragged attention over a slot cache, registered with transformers' attention interface.

One forward carries the new tokens of many requests, concatenated without padding. Each attends to
the cached positions of its own slot up to itself. The model's own code runs unchanged: it only
calls the function registered here, which finds the layout of the step in its keyword arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from autospec.engine.cache import SlotCache
from autospec.records import Int32Array, Int64Array

ATTENTION_NAME = "autospec_packed"

CALL_COST = 500 * 192
"""Fixed cost of an attention call, in cached positions x kv_heads x head_dim, measured on CPU."""

QUERY_COST = 0.09
"""Cost of each further query token of a row, as a share of the first one's, measured on CPU."""


class AttentionStep(Protocol):
    """Where the tokens of one forward stand, and what each of them attends to."""

    positions: torch.Tensor  # [1, tokens]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [1, heads, tokens, head_dim]
        key: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """What was attended to [1, tokens, heads, head_dim]."""
        ...


@dataclass(slots=True)
class _Group:
    """Requests in neighboring slots that share one attention call."""

    first_slot: int
    last_slot: int
    rows: list[int]
    max_count: int
    max_length: int
    gather: torch.Tensor | None = None  # [slots * max_count] token of each padded query
    tokens: tuple[int, int] = (0, 0)  # token range when nothing is padded
    starts: torch.Tensor | None = None  # [slots], None when no mask is needed without a window
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    def cost(self) -> float:
        slots = self.last_slot - self.first_slot + 1
        return slots * self.max_length * (1.0 + QUERY_COST * (self.max_count - 1))


class PackedStep:
    """The layout of one forward: row ``i`` appends ``counts[i]`` tokens to ``slots[i]``.

    ``starts[i]`` is the position of the first of them. Rows are in ascending order of slots, each
    slot at most once. Per token, in row order: ``token_positions`` (host) and ``positions`` [1,
    tokens] (device) are its position in its request, ``write_positions`` (host) and ``write_index``
    (device) are ``slot * capacity + position``.
    """

    def __init__(
        self,
        cache: SlotCache,
        slots: Int32Array,
        starts: Int32Array,
        counts: Int32Array,
        kv_width: int,
    ) -> None:
        self.cache = cache
        self.offsets: Int64Array = np.zeros(len(slots) + 1, dtype=np.int64)
        np.cumsum(counts, out=self.offsets[1:])
        total = int(self.offsets[-1])
        positions = np.arange(total, dtype=np.int64) + np.repeat(starts - self.offsets[:-1], counts)
        write = positions + np.repeat(slots.astype(np.int64) * cache.capacity, counts)
        self.token_positions: Int64Array = positions
        self.write_positions: Int64Array = write
        device = cache.device
        self.positions = torch.from_numpy(positions).to(device).unsqueeze(0)
        self.write_index = torch.from_numpy(write).to(device)
        self.groups = _grouped(slots.tolist(), starts.tolist(), counts.tolist(), kv_width)
        self.restore: torch.Tensor | None = None
        self._lay_out(slots, starts, counts)

    def _lay_out(self, slots: Int32Array, starts: Int32Array, counts: Int32Array) -> None:
        restore: NDArray[np.int64] = np.zeros(int(self.offsets[-1]), dtype=np.int64)
        padded_offset, padded = 0, False
        for group in self.groups:
            num_slots = group.last_slot - group.first_slot + 1
            size = num_slots * group.max_count
            gather: NDArray[np.int64] = np.zeros((num_slots, group.max_count), dtype=np.int64)
            group_starts: NDArray[np.int64] = np.zeros(num_slots, dtype=np.int64)
            first, last = int(self.offsets[group.rows[0]]), int(self.offsets[group.rows[-1] + 1])
            for row in group.rows:
                local = int(slots[row]) - group.first_slot
                begin, count = int(self.offsets[row]), int(counts[row])
                gather[local, :count] = np.arange(begin, begin + count)
                restore[begin : begin + count] = (
                    padded_offset + local * group.max_count + np.arange(count)
                )
                group_starts[local] = starts[row]
            if size != last - first:
                padded = True
                group.gather = torch.from_numpy(gather.reshape(-1)).to(self.cache.device)
            group.tokens = (first, last)
            if num_slots > 1 or group.max_count > 1:
                group.starts = torch.from_numpy(group_starts).to(self.cache.device)
            else:
                group.masks[None] = None
            padded_offset += size
        if padded:
            self.restore = torch.from_numpy(restore).to(self.cache.device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [1, heads, tokens, head_dim]
        key: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Store the new keys and values, attend, and return [1, tokens, heads, head_dim]."""
        self.cache.write(layer, self.write_index, key[0].transpose(0, 1), value[0].transpose(0, 1))
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        kv_heads, head_dim = keys.shape[2], keys.shape[3]
        queries = query[0].transpose(0, 1)  # [tokens, heads, head_dim]
        folds = queries.shape[1] // kv_heads
        outputs = []
        for group in self.groups:
            if group.gather is None:
                rows = queries[group.tokens[0] : group.tokens[1]]
            else:
                rows = queries.index_select(0, group.gather)
            num_slots = group.last_slot - group.first_slot + 1
            # The query heads of a key/value head are folded into the query axis: CPU kernels are
            # several times slower with grouped heads than with more query rows.
            folded = rows.reshape(num_slots, group.max_count, kv_heads, folds, head_dim).transpose(
                1, 2
            )
            span = slice(group.first_slot, group.last_slot + 1)
            attended = scaled_dot_product_attention(
                folded.reshape(num_slots, kv_heads, group.max_count * folds, head_dim),
                keys[span, : group.max_length].transpose(1, 2),
                values[span, : group.max_length].transpose(1, 2),
                attn_mask=self._mask(group, folds, window, query.dtype),
                scale=scaling,
            )
            attended = attended.view(num_slots, kv_heads, group.max_count, folds, head_dim)
            outputs.append(
                attended.transpose(1, 2).reshape(num_slots * group.max_count, -1, head_dim)
            )
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self.restore is not None:
            joined = joined.index_select(0, self.restore)
        return joined.unsqueeze(0)

    def _mask(
        self, group: _Group, folds: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Additive mask [slots, 1, max_count * folds, max_length], once per step and window."""
        if window is not None and group.max_length <= window:
            window = None
        if window not in group.masks:
            group.masks[window] = self._make_mask(group, folds, window, dtype)
        return group.masks[window]

    def _make_mask(
        self, group: _Group, folds: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor:
        device = self.cache.device
        if group.starts is None:  # one query token: it sees all of its slot but for the window
            starts = torch.full((1,), group.max_length - 1, device=device)
        else:
            starts = group.starts
        queries = starts[:, None] + torch.arange(group.max_count, device=device)  # [slots, count]
        queries = queries.repeat_interleave(folds, dim=1)[:, None, :, None]
        cached = torch.arange(group.max_length, device=device)
        hidden = cached > queries
        if window is not None:
            hidden |= cached <= queries - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        return mask.masked_fill_(hidden, float("-inf"))


def _grouped(slots: list[int], starts: list[int], counts: list[int], kv_width: int) -> list[_Group]:
    """Join neighbors greedily while one padded call is cheaper than two exact ones."""
    call_cost = CALL_COST / kv_width
    groups: list[_Group] = []
    for row, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
        single = _Group(slot, slot, [row], count, start + count)
        if groups:
            last = groups[-1]
            joined = _Group(
                last.first_slot,
                slot,
                last.rows,
                max(last.max_count, count),
                max(last.max_length, single.max_length),
            )
            if joined.cost() <= last.cost() + single.cost() + call_cost:
                joined.rows.append(row)
                groups[-1] = joined
                continue
        groups.append(single)
    return groups


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed: AttentionStep | None = None,
    **unused: object,
) -> tuple[torch.Tensor, None]:
    """What a layer of the model calls, as transformers defines it; ``unused`` are its own flags."""
    if packed is None:
        raise ValueError("a model loaded for the embedded engine was called without a packed step")
    layer = module.layer_idx
    assert isinstance(layer, int)
    return packed.attend(layer, query, key, value, scaling, sliding_window), None


AttentionInterface.register(ATTENTION_NAME, packed_attention)
