"""The loss through frozen rows against plain autograd."""

from __future__ import annotations

import pytest
import torch

from autospec.training.rows_loss import rows_loss

torch.set_num_threads(1)


@pytest.mark.parametrize("count", [1, 7, 300])
def test_value_and_gradient_are_those_of_cross_entropy(count: int) -> None:
    torch.manual_seed(0)
    states = torch.randn(count, 12, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(30, 12, dtype=torch.float64)
    probs = torch.rand(count, 4, dtype=torch.float64).softmax(dim=-1)
    columns = torch.stack([torch.randperm(30)[:4] for _ in range(count)])
    loss = 3.0 * rows_loss(states, rows, probs, columns.int())
    loss.backward()
    assert states.grad is not None
    plain = states.detach().clone().requires_grad_()
    wanted = torch.zeros(count, 30, dtype=torch.float64).scatter(1, columns, probs)
    expected = 3.0 * torch.nn.functional.cross_entropy(plain @ rows.T, wanted)
    expected.backward()
    assert plain.grad is not None
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(states.grad, plain.grad)


def test_half_precision_rows_leave_the_states_in_theirs() -> None:
    torch.manual_seed(0)
    states = torch.randn(5, 12, requires_grad=True)
    rows = torch.randn(30, 12).to(torch.bfloat16)
    loss = rows_loss(states, rows, torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.int32))
    loss.backward()
    assert loss.dtype == torch.float32
    assert states.grad is not None
    assert states.grad.dtype == torch.float32
    expected = torch.nn.functional.cross_entropy(
        states.detach() @ rows.float().T, torch.zeros(5, dtype=torch.int64)
    )
    torch.testing.assert_close(loss.detach(), expected, rtol=0.02, atol=0.02)
