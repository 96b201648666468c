"""Linear layers on CPU with their bfloat16 weights kept in the layout that oneDNN computes in.

Left alone, oneDNN converts a weight matrix on every call, which for the few tokens of a decoding
step costs a third of the time. The numbers that come out are the same.
"""

from __future__ import annotations

import torch
from torch import nn

_BATCH_HINT = 16
"""Tokens of a typical step; the layout chosen for it serves 1 to several hundred well."""


class PackedLinear(nn.Module):
    """A frozen linear layer over a converted copy of ``linear``'s weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _BATCH_HINT)

    def weight(self) -> torch.Tensor:
        """A copy of the weight [out_features, in_features] in its plain layout."""
        weight: torch.Tensor = self._packed.to_dense()
        return weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` [..., in_features] to [..., out_features]."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            values, self._packed, self.bias, "none", [], ""
        )
        return result


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch build and machine compute ``dtype`` through oneDNN."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(model: nn.Module) -> None:
    """Replace every linear layer of ``model`` in place; tied embeddings keep their own weight."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
