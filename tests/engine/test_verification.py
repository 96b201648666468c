"""Verification of mixed rows, against the rule written out for one row at a time."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from autospec.engine.verification import residual, verify_choices, verify_sampled
from autospec.records import Int64Array


@given(data=st.data(), num_rows=st.integers(1, 6), depth=st.integers(0, 5))
def test_greedy_rows_keep_drafts_while_they_are_the_targets_choice(
    data: st.DataObject, num_rows: int, depth: int
) -> None:
    small = st.integers(0, 2)
    lengths = data.draw(st.lists(st.integers(0, depth), min_size=num_rows, max_size=num_rows))
    drafts = [data.draw(st.lists(small, min_size=depth, max_size=depth)) for _ in range(num_rows)]
    choices = [
        data.draw(st.lists(small, min_size=length + 1, max_size=length + 1)) for length in lengths
    ]
    offsets = np.cumsum([0] + [length + 1 for length in lengths])[:-1]
    verdict = verify_choices(
        np.concatenate([np.array(row, dtype=np.int64) for row in choices]),
        offsets.astype(np.int64),
        np.array(drafts, dtype=np.int64).reshape(num_rows, depth),
        np.array(lengths, dtype=np.int64),
    )
    for row in range(num_rows):
        accepted = 0
        while accepted < lengths[row] and drafts[row][accepted] == choices[row][accepted]:
            accepted += 1
        assert verdict.accepted[row] == accepted
        assert verdict.final[row] == choices[row][accepted]


def test_point_masses_and_sampled_drafts_are_told_apart() -> None:
    """Target probability 0.3 of token 0; the uniform is 0.5."""
    probs = torch.tensor([[0.3, 0.7], [0.5, 0.5]] * 3, dtype=torch.float64)
    draft_probs = torch.tensor([[[0.5, 0.5]], [[0.9, 0.1]]], dtype=torch.float64)
    drafts: Int64Array = np.zeros((3, 1), dtype=np.int64)
    verdict = verify_sampled(
        probs,
        np.array([0, 2, 4]),
        drafts,
        np.ones(3, dtype=np.int64),
        draft_probs,
        np.array([[0], [1], [-1]]),
        torch.tensor([[0.1, 0.5]] * 3, dtype=torch.float64),
    )
    # 0.5 * 0.5 < 0.3 keeps the first; 0.5 * 0.9 and 0.5 * 1 do not keep the others.
    assert verdict.accepted.tolist() == [1, 0, 0]
    assert verdict.final.tolist() == [0, 1, 1]


def test_a_rejected_point_mass_is_never_the_recovered_token() -> None:
    probs = torch.full((2000, 4), 0.25, dtype=torch.float64)
    numbers = torch.rand(1000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drafts: Int64Array = np.full((1000, 1), 2, dtype=np.int64)
    verdict = verify_sampled(
        probs,
        np.arange(0, 2000, 2),
        drafts,
        np.ones(1000, dtype=np.int64),
        None,
        np.full((1000, 1), -1),
        numbers,
    )
    rejected = verdict.accepted == 0
    assert 700 < rejected.sum() < 800
    assert not (verdict.final[rejected] == 2).any()


def test_a_residual_that_rounds_to_nothing_falls_back_to_the_target() -> None:
    target = torch.tensor([[0.5, 0.5], [0.25, 0.75]])
    draft = torch.tensor([[0.5, 0.5], [0.75, 0.25]])
    assert residual(target, draft).tolist() == [[0.5, 0.5], [0.0, 0.5]]
