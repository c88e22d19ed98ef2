"""The encoder's linear layers: the GEMMs and their weights in bf16 or FP8.

Master weights stay in fp32 and are cast once per step; weight gradients are fp32. Frozen weights are cast once. The
low-rank update of a LoRA layer is added to its frozen weight before the cast, W + s·B·A, so that the GEMMs of both
passes are those of a plain layer; only the gradients of A and B need thin GEMMs of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitral.device.streams import SideStream
from vitral.kernels.fp8.kernel import FP8_MAX
from vitral.kernels.fp8.op import Fp8Tensor, Fp8Weight, GemmBound, quantize_weight
from vitral.kernels.layernorm_gelu.kernel import GELU_MAX_SLOPE
from vitral.models.lora import LoRALinear
from vitral.models.vit import Encoder

FP8_WGRAD_MIN_WIDTH = 512  # below this, transposing the operands costs more than the FP8 weight-gradient GEMM gains

AllocateFn = Callable[[int, int], Tensor]  # (rows, columns) -> output buffer


class WgradScales(NamedTuple):
    """FP8 scales of the operands of a block's weight-gradient GEMMs, from bounds that follow from the weights alone."""

    norm1: Tensor  # output of the first norm
    norm2: Tensor  # output of the second norm
    gelu: Tensor
    grad_ratio: Tensor  # scale of a gradient row before GELU over that of the same row after `contract`
    expand: Tensor  # norm2·grad_ratio, for the gradient of `expand`


class EncoderWeights:
    """Copies of the encoder's weight matrices for its GEMMs.

    cls_only: the last block computes only class tokens after attention, so that only its qkv GEMM is in FP8.
    fp8_wgrad: weight-gradient GEMMs run in FP8 too.
    """

    def __init__(self, encoder: Encoder, fp8: bool, dtype: torch.dtype, cls_only: bool, fp8_wgrad: bool) -> None:
        self.fp8, self.cls_only, self.fp8_wgrad = fp8, cls_only, fp8_wgrad
        self.blocks: list[Any] = list(encoder.blocks)
        layers = [layer for block in self.blocks for layer in linear_layers(block)]
        self.lora_layers = [layer for layer in layers if isinstance(layer, LoRALinear)]
        self.compute: dict[Tensor, Tensor] = {  # master weight -> copy in the compute dtype
            layer.weight: layer.weight.detach()
            if layer.weight.dtype == dtype and layer not in self.lora_layers
            else layer.weight.detach().to(dtype, copy=True)
            for layer in layers
        }
        self.quantized: dict[Tensor, Fp8Weight] = {}
        self.quantized_t: dict[Tensor, Fp8Weight] = {}  # transposed, for input gradients
        self.wgrad_scales: dict[Any, WgradScales] = {}
        self.side_stream = SideStream(next(encoder.parameters()).device)
        self.cast_is_pending = False
        self.cast(training=False)

    def cast_on_side_stream(self) -> None:
        """Start casting the weights for a training step while the caller computes the embedding."""
        self.side_stream.run(partial(self.cast, training=True))
        self.cast_is_pending = True

    def ensure_cast(self) -> None:
        """Wait for `cast_on_side_stream` if it was called for this step; cast now otherwise."""
        self.side_stream.wait() if self.cast_is_pending else self.cast(training=True)
        self.cast_is_pending = False

    @torch.no_grad()
    def cast(self, training: bool, include_frozen: bool = False) -> None:
        """Cast and quantize the weights that may have changed; with `include_frozen`, those without gradients too."""
        copies = {
            weight: copy
            for weight, copy in self.compute.items()
            if (include_frozen or weight.requires_grad) and copy.dtype != weight.dtype
        }
        if copies:
            torch._foreach_copy_(list(copies.values()), list(copies))
        for lora_layer in self.lora_layers:
            self.compute[lora_layer.weight].copy_(lora_layer.merged_weight())
        if not self.fp8:
            return
        layers = [layer for block in self.blocks for layer in fp8_layers(block, training)]
        used = len(layers) - (len(fp8_layers(self.blocks[-1], training)) - 1 if self.cls_only else 0)
        bounds = torch.zeros(len(layers), 2, 2, device=layers[0].weight.device)
        for layer, (bound, bound_t) in zip(layers[:used], bounds, strict=False):
            self.quantized[layer.weight] = quantize_weight(layer.weight, layer.bias, bound)
            if training:
                self.quantized_t[layer.weight] = quantize_weight(layer.weight.t(), None, bound_t)
        if training and self.fp8_wgrad:
            self.wgrad_scales = dict(zip(self.blocks, compute_wgrad_scales(self.blocks, bounds), strict=True))

    def free_unquantized(self, defragment: Callable[[list[Tensor]], None]) -> None:
        """Free the weights of which inference needs only the FP8 copies.

        The attention projections stay, because attention may return bf16. `defragment` may move the FP8 copies and all
        parameters to other addresses.
        """
        for weight in self.quantized.keys() - {block.attention.project.weight for block in self.blocks}:
            del self.compute[weight]
            weight.data = weight.data.new_empty(0)
        if self.quantized:
            remaining = list(self.compute)
            self.compute.clear()  # these copies alias parameters that are about to move
            defragment([weight.data for weight in self.quantized.values()])
            self.compute = {weight: weight.detach() for weight in remaining}

    def uses_fp8_wgrad(self, num_tokens: int) -> bool:
        """Whether weight gradients are FP8 GEMMs; their summed dimension must be a multiple of 16."""
        return self.fp8_wgrad and num_tokens % 16 == 0

    def linear(
        self, x: Tensor | None, x_fp8: Fp8Tensor | None, weight: Tensor, bias: Tensor | None = None,
        allocate: AllocateFn | None = None,
    ) -> tuple[Tensor, GemmBound | None]:  # fmt: skip
        """x·Wᵀ + bias, in FP8 if `x_fp8` is given, and then also a bound of x·Wᵀ."""
        if x_fp8 is not None:
            quantized = self.quantized[weight]
            out = None if allocate is None else allocate(len(x_fp8.data), len(quantized.data))
            return fp8_linear(x_fp8, quantized, bias, out)
        assert x is not None
        weight_t = self.compute[weight].t()
        out = None if allocate is None else allocate(len(x), weight_t.shape[1])
        if bias is None:
            return torch.mm(x, weight_t, out=out), None
        return torch.addmm(bias.to(x.dtype), x, weight_t, out=out), None

    def input_gradient(
        self, grad_out: Tensor, grad_out_fp8: Fp8Tensor | None, weight: Tensor
    ) -> tuple[Tensor, GemmBound | None]:
        """grad_out·W, in FP8 if `grad_out_fp8` is given, and then also its bound."""
        if grad_out_fp8 is None:
            return grad_out @ self.compute[weight], None
        return fp8_linear(grad_out_fp8, self.quantized_t[weight])


def linear_layers(block: Any) -> list[nn.Linear]:
    """All linear layers of a block."""
    return [block.attention.qkv, block.attention.project, block.mlp.expand, block.mlp.contract]


def fp8_layers(block: Any, training: bool) -> list[nn.Linear]:
    """Linear layers of a block that run in FP8. Training keeps the attention output, `project`'s input, in bf16."""
    attention, mlp = block.attention, block.mlp
    return [attention.qkv, *([] if training else [attention.project]), mlp.expand, mlp.contract]


def compute_wgrad_scales(blocks: list[Any], bounds: Tensor) -> list[WgradScales]:
    """Operand scales of all blocks. `bounds`: (3·blocks, 2, 2) of qkv, expand and contract, each also transposed.

    A LayerNorm row is not longer than √D·(max|weight| + max|bias|).
    """
    norms = [norm for block in blocks for norm in (block.norm1, block.norm2)]
    max_abs = torch._foreach_norm([norm.weight for norm in norms] + [norm.bias for norm in norms], math.inf)
    max_row_norm = torch.stack(max_abs).view(2, -1, 2).sum(0) * norms[0].weight.numel() ** 0.5
    (_, expand, contract) = bounds.unflatten(0, (len(blocks), 3)).unbind(1)
    norm1, norm2 = (max_row_norm / FP8_MAX.value).unbind(1)
    gelu = norm2 * expand[:, 0, 0] + expand[:, 0, 1] / FP8_MAX.value
    grad_ratio = GELU_MAX_SLOPE.value * contract[:, 1, 0]
    scales = torch.stack([norm1, norm2, gelu, grad_ratio, norm2 * grad_ratio], dim=1).clamp_min(1e-30)
    aligned = scales[:, :, None].expand(-1, -1, 4).contiguous()  # GEMMs read scales at multiples of 16 bytes
    return [WgradScales(*row.unbind()) for row in aligned[:, :, 0]]


class Workspace:
    """Buffers that all blocks reuse in inference. Allocating them per block would fragment the memory."""

    def __init__(self, tokens: Tensor, hidden_size: int, branch_rows: int) -> None:
        """tokens: (M, D). hidden_size: elements of the MLP's hidden activations. branch_rows: rows of a branch."""
        M, D = tokens.shape
        self.wide_buffer = tokens.new_empty(max(hidden_size, M * 3 * D))
        self.branch_buffer = tokens.new_empty(branch_rows * D)

    def wide(self, rows: int, columns: int) -> Tensor:
        """For qkv, then for the MLP's hidden activations."""
        return self.wide_buffer[: rows * columns].view(rows, columns)

    def branch(self, rows: int, columns: int) -> Tensor:
        """For the output of the attention branch, then of the MLP branch."""
        return self.branch_buffer[: rows * columns].view(rows, columns)


def fp8_linear(
    x: Fp8Tensor, weight: Fp8Weight, bias: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, GemmBound]:
    """x·Wᵀ + bias in bf16 from FP8 operands with one scale per row, and the bound of x·Wᵀ."""
    product = torch._scaled_mm(
        x.data,
        weight.data.t(),
        scale_a=x.scales,
        scale_b=weight.scales.t(),
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
        out=out,
    )
    return product, GemmBound(x.row_norms, weight.bound)


def weight_gradient(grad_out: Tensor, x: Tensor | None) -> Tensor:
    """grad_outᵀ·x, accumulated and returned in fp32."""
    assert x is not None
    if grad_out.device.type == "cpu":
        return grad_out.t().float() @ x.float()
    return torch.mm(grad_out.t(), x, out_dtype=torch.float32)


def needs_weight_gradient(layer: nn.Linear) -> bool:
    """Whether the weight of a layer or its low-rank update trains."""
    return layer.weight.requires_grad or (isinstance(layer, LoRALinear) and layer.lora_A.weight.requires_grad)


def lora_gradients(layer: LoRALinear, grad_out: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of A and B from those of the layer's output, (M, out), and its input, (M, in).

    Through thin GEMMs, s·(grad_out·B)ᵀ·x and s·grad_outᵀ·(x·Aᵀ), instead of the gradient of the whole weight.
    """
    A, B = layer.lora_A.weight.to(x.dtype), layer.lora_B.weight.to(x.dtype)
    grad_A = weight_gradient(grad_out @ B, x)
    grad_B = weight_gradient(grad_out, x @ A.t())
    return grad_A * layer.scaling, grad_B * layer.scaling
