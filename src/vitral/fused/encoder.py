"""The encoder for training on a GPU: the blocks of vit.py, with kernels.py between the matrix products.

One autograd function for all blocks, forwards and backwards written out. It keeps for each block what cannot be had
again cheaply, in bf16: both residuals and their norms, qkv, what attention gave, and the MLP's hidden numbers before
GELU. Weights stay in fp32; products are of bf16 copies made in each step, and their gradients come out in fp32.

With `fp8` the large products forwards, and the gradients that flow back through them, are of 8-bit numbers: each row
has its own scale, found while it is at hand. The weights' gradients stay products of bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.fused import launch
from vitral.fused.launch import Norm, Norms, Small
from vitral.vit import Encoder, EncoderBlock, Grid, Turn

SPARE = 2**25  # numbers of which a block keeps both sides of GELU; for more, the second is computed again
MOST_COLUMNS = 8192  # a kernel holds whole rows


def why_not(encoder: Encoder) -> str:
    """What this encoder has that the fused one does not know; empty where it knows all."""
    if type(encoder) is not Encoder or not isinstance(encoder.norm, nn.LayerNorm):
        return "an encoder of its own kind"
    blocks: list[Any] = list(encoder.blocks)
    for block in blocks:
        if type(block) is not EncoderBlock:
            return "blocks of their own kind"
        if block.residual1.scale is not None:
            return "layer scale"
        if block.mlp.dropout.p or block.attention.dropout_attention:
            return "dropout"
        if block.mlp.expand.out_features > MOST_COLUMNS:
            return f"more than {MOST_COLUMNS} hidden numbers a token"
        if (block.attention.qkv.in_features // block.attention.heads) % 8:
            return "heads whose width is not a multiple of 8"
    if not all(parameter.requires_grad for parameter in encoder.parameters()):
        return "weights that do not learn"
    return ""


class FusedEncoder:
    """`fused(tokens, grid)` is `encoder(tokens, grid)` in training, with gradients for its parameters."""

    def __init__(self, encoder: Encoder, fp8: bool = False, number: torch.dtype = torch.bfloat16) -> None:
        self.encoder, self.fp8, self.number = encoder, fp8, number
        self.blocks: list[Any] = list(encoder.blocks)
        self.norm: Any = encoder.norm
        self.parameters = list(encoder.parameters())
        self.matrices: list[Tensor] = [p for p in self.parameters if p.ndim == 2]
        self.rounded = [torch.empty_like(p, dtype=number) for p in self.matrices]

    def __call__(self, z_BTD: Tensor, grid: Grid) -> Tensor:
        rotary = self.encoder.rotary_position
        tokens: Tensor = Blocks.apply(z_BTD, None if rotary is None else rotary(grid), self, *self.parameters)  # type: ignore[no-untyped-call]
        return tokens

    def round(self) -> dict[Tensor, Tensor]:
        with torch.no_grad():
            torch._foreach_copy_(self.rounded, self.matrices)
        return dict(zip(self.matrices, self.rounded, strict=True))


@dataclass
class Kept:
    """Of a block, for the way back."""

    z: Tensor
    a: Tensor
    qkv: Tensor
    qkv_BhTd: tuple[Tensor, ...]  # as PyTorch's attention took them, if it did
    o: Tensor
    z2: Tensor
    a2: Tensor
    h: Tensor
    g: Tensor | None  # GELU of it, where that is small
    kept1: Tensor | None
    kept2: Tensor | None


class Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_BTD: Tensor, turn: Turn | None, fused: FusedEncoder, *parameters: Tensor) -> Tensor:
        B, T, D = z_BTD.shape
        weights = fused.round()
        f: Tensor | None
        z, f, bias, kept = z_BTD.reshape(B * T, D).to(fused.number).contiguous(), None, None, None
        ctx.fused, ctx.weights, ctx.turn, ctx.shape = fused, weights, turn, (B, T, D)
        ctx.blocks = []  # and what they keep
        fp8 = fused.fp8
        for block in fused.blocks:
            attention, mlp = block.attention, block.mlp
            z, a, a8 = launch.add_norm(z, f, bias, kept, of(block.norm1), fp8)
            qkv, _ = product(a, a8, weights[attention.qkv.weight], attention.qkv.weight, attention.qkv.bias)
            o, taken = attend(attention, qkv, turn, B, T)
            f, kept = o @ weights[attention.project.weight].t(), stochastic(block.residual1.drop, B, z)
            z2, a2, a8 = launch.add_norm(z, f, attention.project.bias, kept, of(block.norm2), fp8)
            h, known = product(a2, a8, weights[mlp.expand.weight], mlp.expand.weight)
            g, g8 = launch.act(h, mlp.expand.bias, mlp.gelu.approximate == "tanh", known)
            kept1, kept = kept, stochastic(block.residual2.drop, B, z)
            (f, _), bias = product(g, g8, weights[mlp.contract.weight], mlp.contract.weight), mlp.contract.bias
            ctx.blocks.append(
                (block, Kept(z, a, qkv, taken, o, z2, a2, h, g if h.numel() <= SPARE else None, kept1, kept))
            )
            z = z2
        ctx.last, normed, _ = launch.add_norm(z, f, bias, kept, of(fused.norm), False)
        return normed.view(B, T, D)

    @staticmethod
    def backward(ctx: Any, dy_BTD: Tensor) -> tuple[Tensor | None, ...]:
        fused, weights, fp8 = ctx.fused, ctx.weights, ctx.fused.fp8
        B, T, D = ctx.shape
        found: dict[Tensor, Tensor] = {}
        dy = dy_BTD.reshape(B * T, D).to(fused.number).contiguous()
        kept = ctx.blocks[-1][1].kept2
        d, df, d8, sums = launch.add_norm_back(ctx.last, dy, None, kept, of(fused.norm), fp8)
        found[fused.norm.weight], found[fused.norm.bias], dbias = sums
        while ctx.blocks:
            block, was = ctx.blocks.pop()
            attention, mlp = block.attention, block.mlp
            found[mlp.contract.bias] = dbias
            dg, known = product_back(df, d8, weights[mlp.contract.weight], mlp.contract.weight)
            tanh = mlp.gelu.approximate == "tanh"
            g, dh, dh8, found[mlp.expand.bias] = launch.act_back(was.h, mlp.expand.bias, dg, tanh, known, was.g)
            found[mlp.contract.weight] = weight_gradient(df, g)
            found[mlp.expand.weight] = weight_gradient(dh, was.a2)
            da, _ = product_back(dh, dh8, weights[mlp.expand.weight], mlp.expand.weight)
            d, df, _, sums = launch.add_norm_back(was.z2, da, d, was.kept1, of(block.norm2), False)
            found[block.norm2.weight], found[block.norm2.bias], found[attention.project.bias] = sums
            found[attention.project.weight] = weight_gradient(df, was.o.detach())
            do = df @ weights[attention.project.weight]
            dqkv, dqkv8 = attend_back(attention, was, do, ctx.turn, found, fp8, T)
            found[attention.qkv.weight] = weight_gradient(dqkv, was.a)
            da, _ = product_back(dqkv, dqkv8, weights[attention.qkv.weight], attention.qkv.weight)
            before = ctx.blocks[-1][1].kept2 if ctx.blocks else None
            d, df, d8, sums = launch.add_norm_back(was.z, da, d, before, of(block.norm1), fp8 and bool(ctx.blocks))
            found[block.norm1.weight], found[block.norm1.bias], dbias = sums
        return d.view(B, T, D), None, None, *(found[parameter] for parameter in fused.parameters)


def of(norm: nn.LayerNorm) -> Norm:
    return norm.weight, norm.bias, norm.eps


def stochastic(drop: float, images: int, like: Tensor) -> Tensor | None:
    """For each image whether the branch is kept: 0, or what makes the mean one."""
    if not drop:
        return None
    return (torch.rand(images, device=like.device) >= drop).float() / (1 - drop)


Bound = tuple[Tensor, Tensor]  # no number of a product is larger than its row's length times the longest column's


def product(
    x: Tensor | None, x8: Small | None, rounded: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Bound | None]:
    """x·Wᵀ + bias, and how large it can be without the bias, where FP8 is used."""
    if x8 is not None:
        return scaled(x8, launch.shrink(weight.detach()), bias)
    assert x is not None
    return x @ rounded.t() if bias is None else torch.addmm(bias.to(x.dtype), x, rounded.t()), None


def product_back(dy: Tensor, dy8: Small | None, rounded: Tensor, weight: Tensor) -> tuple[Tensor, Bound | None]:
    """dy·W, and the same."""
    return (dy @ rounded, None) if dy8 is None else scaled(dy8, launch.shrink(weight.detach().t()), None)


def scaled(x: Small, w: Small, bias: Tensor | None) -> tuple[Tensor, Bound]:
    """x·wᵀ of FP8 numbers, whose rows have scales."""
    product = torch._scaled_mm(
        x.numbers,
        w.numbers.t(),
        scale_a=x.scales,
        scale_b=w.scales.t(),
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return product, (x.norms, w.norms)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """dyᵀ·x, summed and left in fp32."""
    if dy.device.type == "cpu":
        return dy.t().float() @ x.float()
    return torch.mm(dy.t(), x, out_dtype=torch.float32)


def attend(attention: Any, qkv: Tensor, turn: Turn | None, B: int, T: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What attention gives, M hd, and what PyTorch's own took, if it was that."""
    heads, norms = attention.heads, norms_of(attention)
    if launch.SHORT >= T:
        return launch.short(qkv, heads, T, norms, turn), ()
    q, k, v = qkv.view(B, T, 3, heads, -1).permute(2, 0, 3, 1, 4)
    if norms is not None or turn is not None:
        q, k = launch.turn(qkv, heads, T, norms, turn).view(2, B, T, heads, -1).transpose(2, 3)
    with torch.enable_grad():  # its own way back is PyTorch's
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B * T, -1)
    return o, (q, k, v)


def attend_back(
    attention: Any, was: Kept, do: Tensor, turn: Turn | None, found: dict[Tensor, Tensor], fp8: bool, T: int
) -> tuple[Tensor, Small | None]:
    norms, bias, small = norms_of(attention), attention.qkv.bias, None
    if not was.qkv_BhTd:
        dqkv, sums, summed = launch.short_back(was.qkv, do, attention.heads, T, norms, turn, bias is not None)
    else:
        gradients = torch.autograd.grad(was.o, was.qkv_BhTd, do)
        if norms is None and turn is None:
            (dqkv, small, summed), sums = launch.gather(gradients, fp8), None
        else:
            dqkv, sums = launch.turn_back(was.qkv, gradients, norms, turn)
            summed = None if bias is None else dqkv.sum(0, dtype=torch.float32)
    if sums is not None:
        (found[attention.norm_q.weight], found[attention.norm_k.weight]) = sums[0]
        (found[attention.norm_q.bias], found[attention.norm_k.bias]) = sums[1]
    if bias is not None and summed is not None:
        found[bias] = summed
    return dqkv, small


def norms_of(attention: Any) -> Norms | None:
    q, k = attention.norm_q, attention.norm_k
    return (q.weight, k.weight, q.bias, k.bias, q.eps) if isinstance(q, nn.LayerNorm) else None
