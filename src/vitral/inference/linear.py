"""Linear layers with fixed weights on the CPU, y = x·Wᵀ + b, in fp32, bf16 or int8.

Weights are packed once into oneDNN's layout. These are the operators that torch.compile generates for a frozen model;
calling them directly needs neither a compiler nor warm-up. GELU and the residual addition are fused into the GEMM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PACKING_ROWS = 1024  # number of rows of x that the packed layout is optimised for; any number works


def make_linear(weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> PackedLinear | PlainLinear:
    """An fp32 or bf16 linear layer. Without AVX-512, oneDNN's fused fp32 kernels are slower than PyTorch's own."""
    is_plain = dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() != "AVX512"
    return PlainLinear(weight_NK, bias_N) if is_plain else PackedLinear(weight_NK, bias_N, dtype)


class PlainLinear:
    """fp32 linear layer of PyTorch."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self.weight = weight_NK.detach().float().contiguous()
        self.bias = None if bias_N is None else bias_N.detach().float()

    def __call__(self, x_MK: Tensor) -> Tensor:
        return F.linear(x_MK, self.weight, self.bias)

    def gelu(self, x_MK: Tensor, approximate: str) -> Tensor:
        return F.gelu(self(x_MK), approximate=approximate)

    def add_to(self, z_MN: Tensor, x_MK: Tensor) -> Tensor:
        """z + linear(x)."""
        return self(x_MK).add_(z_MN)


class PackedLinear:
    """fp32 or bf16 linear layer. The residual stream z stays in fp32."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight_NK.detach().to(dtype).contiguous(), PACKING_ROWS)
        self.bias = None if bias_N is None else bias_N.detach().to(dtype)
        self.is_fp32 = dtype == torch.float32

    def __call__(self, x_MK: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_MK, self.weight, self.bias, "none", [], "")

    def gelu(self, x_MK: Tensor, approximate: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_MK, self.weight, self.bias, "gelu", [], approximate)

    def add_to(self, z_MN: Tensor, x_MK: Tensor) -> Tensor:
        """z + linear(x); may overwrite z."""
        if self.is_fp32:
            return torch.ops.mkldnn._linear_pointwise.binary(x_MK, z_MN, self.weight, self.bias, "add")
        return z_MN.add_(self(x_MK))


class Int8Linear:
    """int8 linear layer: x is uint8 with one scale and zero point, W is int8 with one scale per output row.

    x represents scale·(x − zero_point). Differences between the columns of x are folded into W beforehand (see
    cpu_blocks.py), so that a single scale suffices.
    """

    def __init__(
        self,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        scale: float,
        zero_point: int,
        out_dtype: torch.dtype = torch.float32,
    ) -> None:
        weight_NK = weight_NK.detach().float()
        self.weight_scales = (weight_NK.abs().amax(dim=1) / 127).clamp_min(1e-12)
        quantized = (weight_NK / self.weight_scales[:, None]).round().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(quantized, None)
        self.weight_zero_points = torch.zeros(len(quantized), dtype=torch.int64)
        self.bias = None if bias_N is None else bias_N.detach().float()
        self.scale, self.zero_point, self.out_dtype = scale, zero_point, out_dtype

    def _operands(self, x_MK: Tensor) -> tuple[Tensor, float, int, Tensor, Tensor, Tensor]:
        return x_MK, self.scale, self.zero_point, self.weight, self.weight_scales, self.weight_zero_points

    def __call__(self, x_MK: Tensor) -> Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            *self._operands(x_MK), self.bias, 1.0, 0, self.out_dtype, "none", [], ""
        )

    def gelu_uint8(self, x_MK: Tensor, approximate: str, out_scale: float, out_zero_point: int) -> Tensor:
        """GELU(linear(x)), quantized for the next layer."""
        return torch.ops.onednn.qlinear_pointwise(
            *self._operands(x_MK), self.bias, out_scale, out_zero_point, torch.uint8, "gelu", [], approximate
        )

    def add_to(self, z_MN: Tensor, x_MK: Tensor) -> Tensor:
        """z + linear(x); overwrites z."""
        return torch.ops.onednn.qlinear_pointwise.binary(
            *self._operands(x_MK), z_MN, self.bias, 1.0, 0, torch.float32, 1.0, 0, "sum", 1.0, "none", [], ""
        )


def to_uint8(x: Tensor) -> Tensor:
    """Round x, in units of the scale, to uint8 with zero point 128. Overwrites x.

    Goes through int8, because torch converts float to int8 with vector instructions but not float to uint8.
    """
    return x.round_().clamp_(-128, 127).to(torch.int8).view(torch.uint8).bitwise_xor_(128)
