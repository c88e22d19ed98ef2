"""FP8 training emulated on a CPU: the GEMMs of `vitral.kernels` with the same rounding and scales, in plain PyTorch.

FP8 values are exact in bf16, so that a bf16 GEMM on rounded operands has the products of an FP8 GEMM. Not emulated: the
fast accumulation of an FP8 GEMM; results are rounded to bf16 before and after they are scaled, on a GPU only after.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.device.cpu_attention import explicit_attention
from vitral.models.vit import EncoderBlock, ViT

FP8_MAX = 448.0  # largest finite e4m3 value
MIN_NORMAL = 2.0**-6
GELU_MAX_SLOPE = 1.13

Operand = tuple[Tensor, Tensor]  # values of e4m3 as bf16, (M, K), and one scale per row, (M, 1)


def round_to_fp8(x: Tensor) -> Tensor:
    """To the nearest e4m3 value, as bf16. Adding 1.5·2²⁰ exponents leaves three bits after the first."""
    exponent = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min(MIN_NORMAL) * (1.5 * 2**20)
    return ((x + exponent) - exponent).bfloat16()


def quantize(x: Tensor, bound: Tensor) -> Operand:
    """`bound`: of the absolute values of each row, (M, 1)."""
    scale = bound.clamp_min(1e-12) / FP8_MAX
    return round_to_fp8(x * (1 / scale)), scale


def quantize_rows(x: Tensor) -> Operand:
    """Activations and gradients: the norm of a row bounds its values."""
    x = x.float()
    return quantize(x, x.norm(dim=1, keepdim=True))


def quantize_weight(weight: Tensor) -> Operand:
    return quantize(weight.contiguous(), weight.abs().amax(dim=1, keepdim=True))


def gemm(x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + bias in bf16."""
    product = (x[0] @ weight[0].t()).float() * x[1] * weight[1].t()
    return (product if bias is None else product + bias).bfloat16()


def weight_gradient(grad_out: Tensor, x: Tensor) -> Tensor:
    return (grad_out.bfloat16().t() @ x.bfloat16()).float()


def weight_gradient_fp8(grad: Operand, x: Tensor, x_scale: Tensor, split: bool = False) -> Tensor:
    """grad_outᵀ·x with one scale per operand (`vitral.kernels.fp8_wgrad`). With `split`, the relative scales of the
    tokens go into both operands."""
    values, scales = grad
    relative = scales / scales.max()
    root = torch.exp2((0.5 * relative.clamp_min(1e-30).log2()).ceil()) if split else torch.ones_like(relative)
    x_values = round_to_fp8(x.float() * (relative / root) / x_scale)
    return (round_to_fp8(values.float() * root).t() @ x_values).float() * scales.max() * x_scale


def norm_scale(norm: Any) -> Tensor:
    """From the bound of any row of a layer norm."""
    return norm.weight.numel() ** 0.5 * (norm.weight.abs().max() + norm.bias.abs().max()) / FP8_MAX


class Fp8Linear(torch.autograd.Function):
    """The projection to queries, keys and values. `x_scale` is given if weight gradients are in FP8 too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, x_scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(x.bfloat16(), weight, x_scale)
        return gemm(quantize_rows(x), quantize_weight(weight), bias)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, x_scale = ctx.saved_tensors
        grad = quantize_rows(grad_out)
        grad_weight = weight_gradient(grad_out, x) if x_scale is None else weight_gradient_fp8(grad, x, x_scale)
        return gemm(grad, quantize_weight(weight.t())).float(), grad_weight, grad_out.float().sum(0), None


class Fp8Mlp(torch.autograd.Function):
    """Expansion, GELU, contraction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x_scale: Tensor | None) -> Tensor:
        hidden = gemm(quantize_rows(x), quantize_weight(w1))
        gelu = F.gelu(hidden.float() + b1)
        bound = x.norm(dim=1, keepdim=True) * w1.norm(dim=1).max() + b1.abs().max()
        ctx.save_for_backward(x.bfloat16(), hidden, w1, b1, w2, x_scale)
        return gemm(quantize(gelu, bound), quantize_weight(w2), b2)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, w1, b1, w2, x_scale = ctx.saved_tensors
        grad = quantize_rows(grad_out)
        grad_gelu = gemm(grad, quantize_weight(w2.t())).float()
        with torch.enable_grad():
            biased = (hidden.float() + b1).requires_grad_()
            gelu = F.gelu(biased)
        (grad_hidden,) = torch.autograd.grad(gelu, biased, grad_gelu)
        ratio = w2.norm(dim=0).max() * GELU_MAX_SLOPE
        grad_hidden_fp8 = quantize(grad_hidden, grad_out.float().norm(dim=1, keepdim=True) * ratio)
        if x_scale is None:
            grad_w1, grad_w2 = weight_gradient(grad_hidden, x), weight_gradient(grad_out, gelu.detach())
        else:
            gelu_scale = x_scale * w1.norm(dim=1).max() + b1.abs().max() / FP8_MAX
            grad_w1 = weight_gradient_fp8(grad_hidden_fp8, x, x_scale)
            grad_w2 = weight_gradient_fp8(grad, gelu.detach(), gelu_scale, split=True)
        grad_x = gemm(grad_hidden_fp8, quantize_weight(w1.t())).float()
        return grad_x, grad_w1, grad_hidden.sum(0), grad_w2, grad_out.float().sum(0), None


class Fp8Block:
    """The forward pass of a block in training, tokens in bf16. `cls_only`: on a GPU, the last block of a model that
    pools the class token computes only that token's MLP, in bf16."""

    def __init__(self, block: EncoderBlock, fp8_wgrad: bool, cls_only: bool) -> None:
        self.block, self.fp8_wgrad, self.cls_only = block, fp8_wgrad, cls_only
        self.exact = block.forward

    def __call__(self, z_BTD: Tensor, rope: Tensor | None = None, attentions: list[Tensor] | None = None) -> Tensor:
        block, attention, mlp = self.block, self.block.attention, self.block.mlp
        if not block.training:
            return self.exact(z_BTD, rope, attentions)
        assert rope is None
        assert isinstance(mlp.activation, torch.nn.GELU)
        with torch.autocast("cpu", enabled=False):
            B, T, D = z_BTD.shape
            z = z_BTD.bfloat16().float().reshape(B * T, D)
            scale1, scale2 = (norm_scale(n).detach() if self.fp8_wgrad else None for n in (block.norm1, block.norm2))
            qkv = Fp8Linear.apply(block.norm1(z), attention.qkv.weight, attention.qkv.bias, scale1)  # type: ignore[no-untyped-call]
            q, k, v = qkv.view(B, T, 3, attention.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            out = explicit_attention(q, k, v).transpose(1, 2).reshape(B * T, D)
            projected = F.linear(out, attention.project.weight.bfloat16(), attention.project.bias.bfloat16())
            z = block.residual1(z.view(B, T, D), projected.float().view(B, T, D)).bfloat16().float().view(B * T, D)
            normed, layers = block.norm2(z), (mlp.expand, mlp.contract)
            if self.cls_only:
                w1, b1, w2, b2 = (t.bfloat16() for layer in layers for t in (layer.weight, layer.bias))
                branch = F.linear(F.gelu(F.linear(normed.bfloat16(), w1, b1)), w2, b2)
            else:
                tensors = (t for layer in layers for t in (layer.weight, layer.bias))
                branch = Fp8Mlp.apply(normed, *tensors, scale2)  # type: ignore[no-untyped-call]
            return block.residual2(z.view(B, T, D), branch.float().view(B, T, D)).bfloat16()


def emulate_fp8(model: ViT, fp8_wgrad: bool) -> None:
    """Train this model with the rounding of FP8. Evaluation stays as it is."""
    blocks = list(model.encoder.blocks)
    for block in blocks:
        assert isinstance(block, EncoderBlock)
        cls_only = block is blocks[-1] and model.config.pooling == "class"
        block.forward = Fp8Block(block, fp8_wgrad, cls_only)  # type: ignore[method-assign]
