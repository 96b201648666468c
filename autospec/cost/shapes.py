"""The tokens that a target forward pays for, by the engine's shape."""

from __future__ import annotations

from autospec.compiled import compiled_brief
from autospec.records import Int32Array, Shape


@compiled_brief
def round_up(tokens: int, captured: Int32Array) -> int:
    """The smallest captured size that holds ``tokens``; above the largest, the number itself."""
    for c in range(captured.shape[0]):
        if captured[c] >= tokens:
            return int(captured[c])
    return tokens


SHAPES: dict[Shape, int] = {"packed": 0, "padded": 1, "stepped": 2}
"""Shapes as kernels know them."""

PADDED = SHAPES["padded"]
STEPPED = SHAPES["stepped"]


def paid_tokens(
    shape: Shape, captured: Int32Array, requests: int, verified: int, longest: int
) -> int:
    """Tokens a target forward pays for: ``verified`` drafts in all, ``longest`` of a request."""
    return int(tokens_to_pay(SHAPES[shape], captured, requests, verified, longest))


@compiled_brief
def tokens_to_pay(
    shape: int, captured: Int32Array, requests: int, verified: int, longest: int
) -> int:
    """``paid_tokens`` in kernels."""
    if shape == PADDED:
        return requests * (1 + longest)
    total = requests + verified
    return round_up(total, captured) if shape == STEPPED and total > 0 else total
