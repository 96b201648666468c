"""Packed attention against attention written out for one request at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autospec.engine.attention import PackedStep
from autospec.engine.cache import SlotCache

KV_HEADS, HEADS, HEAD_DIM = 2, 6, 4
SLOTS, CAPACITY = 7, 40


def plain_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int | None
) -> torch.Tensor:
    """[count, heads, head_dim] of one request whose first query stands at ``start``."""
    rows = []
    for offset in range(query.shape[1]):
        first = 0 if window is None else max(0, start + offset + 1 - window)
        seen = slice(first, start + offset + 1)
        heads = []
        for head in range(HEADS):
            of_head = head // (HEADS // KV_HEADS)
            scores = keys[seen, of_head] @ query[head, offset] * 0.5
            heads.append(torch.softmax(scores, dim=0) @ values[seen, of_head])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Rows of (slot, start, count) in ascending slots, holes between them allowed."""
    slots = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
    rows = []
    for slot in sorted(slots):
        count = draw(st.sampled_from([1, 1, 2, 5, 12]))
        rows.append((slot, draw(st.integers(0, CAPACITY - count)), count))
    return rows


@settings(max_examples=60, deadline=None)
@given(
    rows=layouts(), window=st.sampled_from([None, 1, 6, 64]), kv_width=st.sampled_from([8, 10**6])
)
def test_every_request_sees_its_own_past_only(
    rows: list[tuple[int, int, int]], window: int | None, kv_width: int
) -> None:
    """Whether calls are shared (narrow model) or not (wide model)."""
    generator = torch.Generator().manual_seed(0)
    cache = SlotCache(
        layers=1,
        slots=SLOTS,
        capacity=CAPACITY,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    slots, starts, counts = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    step = PackedStep(cache, slots, starts, counts, kv_width)
    total = int(counts.sum())
    query, key, value = (
        torch.randn(1, heads, total, HEAD_DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    result = step.attend(0, query, key, value, scaling=0.5, window=window)[0]
    for row, (slot, start, count) in enumerate(rows):
        tokens = slice(int(step.offsets[row]), int(step.offsets[row + 1]))
        stored = cache.keys[0][slot, start : start + count]
        assert torch.equal(stored, key[0, :, tokens].transpose(0, 1))
        expected = plain_attention(
            query[0, :, tokens], cache.keys[0][slot], cache.values[0][slot], start, window
        )
        torch.testing.assert_close(result[tokens], expected)


def test_neighbors_of_like_length_share_a_call_and_a_long_one_does_not() -> None:
    cache = SlotCache(
        layers=1,
        slots=8,
        capacity=4096,
        kv_heads=3,
        head_dim=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    slots = np.arange(8, dtype=np.int32)
    starts = np.array([200, 210, 190, 4000, 205, 200, 220, 210], dtype=np.int32)
    step = PackedStep(cache, slots, starts, np.ones(8, dtype=np.int32), 3 * 64)
    assert [group.rows for group in step.groups] == [[0, 1, 2], [3], [4, 5, 6, 7]]


def test_a_model_taken_over_by_the_engine_says_so_when_called_without_it() -> None:
    from autospec.engine.model import CausalModel
    from tests.engine.tiny_models import tiny

    model = CausalModel(tiny("llama"))
    with pytest.raises(ValueError, match="without a packed step"):
        model.model(torch.tensor([[1, 2]]))
