"""y = x·Wᵀ + b for a W that never changes: laid out once as oneDNN wants it, in fp32, bf16 or 8-bit integers.

These are the operators that torch.compile itself writes for a frozen model on a CPU; called directly they need no
compiler and no warm-up. GELU and the sum with the residual stream happen while the product is still in the registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS = 1024  # rows of x that the layout is made for; others work as well


class FloatProduct:
    """In fp32 or bf16. The residual stream z stays in fp32."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight_NK.detach().to(dtype).contiguous(), TOKENS)
        self.bias = None if bias_N is None else bias_N.detach().to(dtype)
        self.full = dtype == torch.float32

    def __call__(self, x_MK: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_MK, self.weight, self.bias, "none", [], "")

    def gelu(self, x_MK: Tensor, approximate: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_MK, self.weight, self.bias, "gelu", [], approximate)

    def add_to(self, z_MN: Tensor, x_MK: Tensor) -> Tensor:
        if self.full:
            return torch.ops.mkldnn._linear_pointwise.binary(x_MK, z_MN, self.weight, self.bias, "add")
        return z_MN.add_(self(x_MK))


class ByteProduct:
    """x in unsigned bytes that stand for step·(byte − zero), W in signed bytes with a step for each of its rows.

    What differs between the columns of x was moved into W beforehand (see engine.py), so that one step serves all.
    """

    def __init__(
        self, weight_NK: Tensor, bias_N: Tensor | None, step: float, zero: int, out: torch.dtype = torch.float32
    ) -> None:
        weight_NK = weight_NK.detach().float()
        self.steps = (weight_NK.abs().amax(dim=1) / 127).clamp_min(1e-12)
        rounded = (weight_NK / self.steps[:, None]).round().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(rounded, None)
        self.zeros = torch.zeros(len(rounded), dtype=torch.int64)
        self.bias = None if bias_N is None else bias_N.detach().float()
        self.step, self.zero, self.out = step, zero, out

    def _given(self, x_MK: Tensor) -> tuple[Tensor, float, int, Tensor, Tensor, Tensor]:
        return x_MK, self.step, self.zero, self.weight, self.steps, self.zeros

    def __call__(self, x_MK: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_pointwise(*self._given(x_MK), self.bias, 1.0, 0, self.out, "none", [], "")

    def gelu_to_bytes(self, x_MK: Tensor, approximate: str, step: float, zero: int) -> Tensor:
        """The activation, as the bytes that the next product reads."""
        return torch.ops.onednn.qlinear_pointwise(
            *self._given(x_MK), self.bias, step, zero, torch.uint8, "gelu", [], approximate
        )

    def add_to(self, z_MN: Tensor, x_MK: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_pointwise.binary(
            *self._given(x_MK), z_MN, self.bias, 1.0, 0, torch.float32, 1.0, 0, "sum", 1.0, "none", [], ""
        )


def to_bytes(quanta: Tensor) -> Tensor:
    """Whole steps in −128 … 127, written over, as unsigned bytes with zero at 128.

    By way of int8, because torch converts floats to int8 with vector instructions and to uint8 without.
    """
    return quanta.round_().clamp_(-128, 127).to(torch.int8).view(torch.uint8).bitwise_xor_(128)
