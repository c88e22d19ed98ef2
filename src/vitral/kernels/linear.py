"""The encoder's linear layers: the GEMMs and their weights in bf16 or FP8.

Master weights stay in fp32 and are cast once per step; weight gradients are fp32. Frozen weights are cast once. The
low-rank update of a LoRA layer is added to its frozen weight before the cast, W + s·B·A, so that the GEMMs of both
passes are those of a plain layer; only the gradients of A and B need thin GEMMs of their own. Dropout of the update's
input makes it depend on the token, so that it is then added to the output by thin GEMMs (`add_lora`).

Layer scale multiplies the output of a branch by one factor γ per channel. The factors are multiplied into the rows of
the branch's last weight and into its bias before the cast, diag(γ)·W and γ·b, which costs nothing per token; the
gradients of W, b and γ follow from those of the products (`layer_scale`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitral.device.streams import SideStream
from vitral.kernels.dropout.op import Dropout, apply_dropout
from vitral.kernels.fp8.kernel import FP8_MAX
from vitral.kernels.fp8.op import Fp8Tensor, Fp8Weight, GemmBound, quantize_weight
from vitral.kernels.layernorm_gelu.kernel import GELU_MAX_SLOPE
from vitral.models.lora import LoRALinear
from vitral.models.vit import Encoder, QKVLinear

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
    """Copies of the encoder's weight matrices for its GEMMs, and of those biases that are not used as they are.

    cls_only: the last block computes only class tokens after attention, so that only its qkv GEMM is in FP8.
    fp8_wgrad: weight-gradient GEMMs run in FP8 too.
    """

    def __init__(self, encoder: Encoder, fp8: bool, dtype: torch.dtype, cls_only: bool, fp8_wgrad: bool) -> None:
        self.fp8, self.cls_only, self.fp8_wgrad = fp8, cls_only, fp8_wgrad
        self.blocks: list[Any] = list(encoder.blocks)
        self.layers = [layer for block in self.blocks for layer in linear_layers(block)]
        self.layer_scales = {layer: scale for block in self.blocks for layer, scale in layer_scales(block).items()}
        lora_layers = [layer for layer in self.layers if isinstance(layer, LoRALinear)]
        self.merged_lora = [layer for layer in lora_layers if not layer.lora_dropout.p]
        self.separate_lora = [layer for layer in lora_layers if layer.lora_dropout.p]
        self.biases: dict[nn.Linear, Tensor] = {  # scaled, or without the key bias
            layer: layer.bias.detach().clone()
            for layer in self.layers
            if layer in self.layer_scales or isinstance(layer, QKVLinear)
        }
        self.compute: dict[Tensor, Tensor] = self.allocate(dtype)  # master weight -> copy in the compute dtype
        self.quantized: dict[Tensor, Fp8Weight] = {}
        self.quantized_t: dict[Tensor, Fp8Weight] = {}  # transposed, for input gradients
        self.bounds = torch.zeros(len(self.layers), 2, 2, device=next(encoder.parameters()).device)
        self.wgrad_scales: dict[Any, WgradScales] = {}
        self.side_stream = SideStream(next(encoder.parameters()).device)
        self.cast_is_pending = False
        self.cast(training=False, include_frozen=True)

    def is_derived(self, layer: nn.Linear) -> bool:
        """Whether the weight of the GEMMs is not that of the layer: with a low-rank update, or scaled."""
        return layer in self.merged_lora or layer in self.layer_scales

    def bias(self, layer: nn.Linear) -> Tensor | None:
        """The bias as it is added to the output of the GEMM."""
        return self.biases.get(layer, layer.bias)

    def allocate(self, dtype: torch.dtype) -> dict[Tensor, Tensor]:
        return {
            layer.weight: layer.weight.detach()
            if layer.weight.dtype == dtype and not self.is_derived(layer)
            else layer.weight.detach().to(dtype, copy=True)
            for layer in self.layers
        }

    def fetch(self, block: Any, backward: bool = False) -> None:
        """Make the weights of a block available before its GEMMs. Here they always are; see `sharded_weights`."""

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
        changed = [layer for layer in self.layers if include_frozen or self.trains(layer)]
        copies = {
            layer.weight: copy
            for layer in changed
            if (copy := self.compute[layer.weight]).dtype != layer.weight.dtype and not self.is_derived(layer)
        }
        if copies:
            torch._foreach_copy_(list(copies.values()), list(copies))
        for layer in filter(self.is_derived, changed):
            self.derive_weight(layer)
        for layer in changed:
            if isinstance(layer, QKVLinear):
                self.biases[layer].copy_(layer.masked_bias())
        if self.fp8:
            self.quantize(set(changed), training)

    def trains(self, layer: nn.Linear) -> bool:
        """Whether anything that the GEMM or its bias is computed from trains."""
        scale = self.layer_scales.get(layer)
        return any(p.requires_grad for p in layer.parameters()) or (scale is not None and scale.requires_grad)

    def derive_weight(self, layer: nn.Linear) -> None:
        """diag(γ)·(W + s·B·A), and γ·b, where γ or the low-rank update may be absent."""
        weight = layer.weight
        if isinstance(layer, LoRALinear) and layer in self.merged_lora:
            weight = layer.merged_weight()
        if (scale := self.layer_scales.get(layer)) is None:
            self.compute[layer.weight].copy_(weight)
            return
        torch.mul(weight, scale[:, None], out=self.compute[layer.weight])
        torch.mul(layer.bias, scale, out=self.biases[layer])

    def quantize(self, changed: set[nn.Linear], training: bool) -> None:
        """FP8 copies of the changed layers that have FP8 GEMMs."""
        layers = {layer for block in self.blocks for layer in fp8_layers(block, training)}
        if self.cls_only:
            layers -= set(linear_layers(self.blocks[-1])[1:])
        stale = [
            (layer, bounds)
            for layer, bounds in zip(self.layers, self.bounds, strict=True)
            if layer in layers and (layer in changed or (training and layer.weight not in self.quantized_t))
        ]
        if stale:
            torch._foreach_zero_([bounds for _, bounds in stale])
        for layer, (bound, bound_t) in stale:
            matrix = self.compute[layer.weight] if self.is_derived(layer) else layer.weight
            self.quantized[layer.weight] = quantize_weight(matrix, self.bias(layer), bound)
            if training:
                self.quantized_t[layer.weight] = quantize_weight(matrix.t(), None, bound_t)
        if training and self.fp8_wgrad:
            self.wgrad_scales = dict(zip(self.blocks, compute_wgrad_scales(self.blocks, self.bounds), strict=True))

    def free_unquantized(self, defragment: Callable[[list[Tensor]], None]) -> None:
        """Free the weights of which inference needs only the FP8 copies.

        The attention projections stay, because attention may return bf16. `defragment` may move the FP8 copies and all
        parameters to other addresses.
        """
        for weight in self.quantized.keys() - {block.attention.project.weight for block in self.blocks}:
            del self.compute[weight]
            weight.data = weight.data.new_empty(0)
        if self.quantized:
            derived = {layer.weight for layer in self.layers if self.is_derived(layer)}
            remaining = {weight: copy if weight in derived else None for weight, copy in self.compute.items()}
            self.compute.clear()  # the other copies alias parameters that are about to move
            defragment([weight.data for weight in self.quantized.values()])
            self.compute = {weight: weight.detach() if copy is None else copy for weight, copy in remaining.items()}

    def uses_fp8_wgrad(self, block: Any) -> bool:
        """Whether weight gradients of this block are FP8 GEMMs: if all of its weights train."""
        return self.fp8_wgrad and all(layer.weight.requires_grad for layer in linear_layers(block))

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

    def add_lora(self, out: Tensor, layer: LoRALinear, x: Tensor, dropout: Dropout) -> None:
        """Add the low-rank update of dropout(x) to the output of the layer's GEMM, (M, out)."""
        A, B = layer.lora_A.weight.to(x.dtype), self.scaled_lora_B(layer, x.dtype)
        out.addmm_(apply_dropout(x, dropout) @ A.t(), B.t(), alpha=layer.scaling)

    def scaled_lora_B(self, layer: LoRALinear, dtype: torch.dtype) -> Tensor:
        """B, with the layer scale of the output multiplied into its rows."""
        B, scale = layer.lora_B.weight, self.layer_scales.get(layer)
        return (B if scale is None else B * scale[:, None]).to(dtype)

    def lora_input_gradient(self, layer: LoRALinear, grad_out: Tensor, dropout: Dropout) -> Tensor:
        """The gradient of x through the low-rank update of dropout(x), (M, in)."""
        A = layer.lora_A.weight.to(grad_out.dtype)
        return apply_dropout(grad_out @ self.scaled_lora_B(layer, grad_out.dtype) @ (A * layer.scaling), dropout)

    def input_gradient(
        self, grad_out: Tensor | None, grad_out_fp8: Fp8Tensor | None, weight: Tensor
    ) -> tuple[Tensor, GemmBound | None]:
        """grad_out·W, in FP8 if `grad_out_fp8` is given, and then also its bound."""
        if grad_out_fp8 is None:
            assert grad_out is not None
            return grad_out @ self.compute[weight], None
        return fp8_linear(grad_out_fp8, self.quantized_t[weight])


def linear_layers(block: Any) -> list[nn.Linear]:
    """All linear layers of a block."""
    return [block.attention.qkv, block.attention.project, block.mlp.expand, block.mlp.contract]


def layer_scales(block: Any) -> dict[nn.Linear, Tensor]:
    """The factors of layer scale and the layers whose outputs they multiply."""
    branches = (block.attention.project, block.residual1.scale), (block.mlp.contract, block.residual2.scale)
    return {layer: scale for layer, scale in branches if scale is not None}


def fp8_layers(block: Any, training: bool) -> list[nn.Linear]:
    """Linear layers of a block that run in FP8. Training keeps the attention output, `project`'s input, in bf16."""
    attention, mlp = block.attention, block.mlp
    return [attention.qkv, *([] if training else [attention.project]), mlp.expand, mlp.contract]


def compute_wgrad_scales(blocks: list[Any], bounds: Tensor) -> list[WgradScales]:
    """Operand scales of all blocks. `bounds`: (4·blocks, 2, 2) of `linear_layers`, each also transposed.

    A LayerNorm row is not longer than √D·(max|weight| + max|bias|).
    """
    norms = [norm for block in blocks for norm in (block.norm1, block.norm2)]
    max_abs = torch._foreach_norm([norm.weight for norm in norms] + [norm.bias for norm in norms], math.inf)
    max_row_norm = torch.stack(max_abs).view(2, -1, 2).sum(0) * norms[0].weight.numel() ** 0.5
    _, _, expand, contract = bounds.unflatten(0, (len(blocks), 4)).unbind(1)
    norm1, norm2 = (max_row_norm / FP8_MAX.value).unbind(1)
    dropout_factor = 1 / (1 - max(block.mlp.dropout.p for block in blocks))  # of the values that dropout keeps
    gelu = dropout_factor * (norm2 * expand[:, 0, 0] + expand[:, 0, 1] / FP8_MAX.value)
    grad_ratio = dropout_factor * GELU_MAX_SLOPE.value * contract[:, 1, 0]
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


def lora_gradients(
    layer: LoRALinear, grad_out: Tensor, x: Tensor, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of A and B from those of the layer's output, (M, out), and its input, (M, in).

    Through thin GEMMs, s·(grad_out·B)ᵀ·x and s·grad_outᵀ·(x·Aᵀ), instead of the gradient of the whole weight.
    `scale`: layer scale of the output, (out,).
    """
    A, B = layer.lora_A.weight.to(x.dtype), layer.lora_B.weight
    scaled_B = (B if scale is None else B * scale[:, None]).to(x.dtype)
    grad_A = weight_gradient(grad_out @ scaled_B, x) * layer.scaling
    grad_B = weight_gradient(grad_out, x @ A.t()) * layer.scaling
    return grad_A, grad_B if scale is None else grad_B * scale[:, None]
