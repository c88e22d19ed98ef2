"""The encoder for training on a GPU: the blocks of vit.py, with kernels.py between the matrix products.

One autograd function for all blocks, forwards and backwards written out. It keeps for each block what cannot be had
again cheaply, in bf16: both residuals, qkv, what attention gave, and the MLP's hidden numbers before GELU; norms and
GELU too, where they are small. Weights stay in fp32; products are of bf16 copies made in each step, and gradients of
weights come out in fp32.

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
from vitral.vit import Encoder, EncoderBlock, Grid, Residual, Turn, ViT

SPARE = 2**25  # hidden numbers: with more, a block keeps neither GELU nor norms and computes them again
MOST_COLUMNS = 4096  # a kernel holds whole rows of tokens


Bound = tuple[Tensor, Tensor]  # no number of a product is larger than its row's length times the longest column's


def unknown(model: ViT, fp8: bool = False, learning: bool = True) -> str:
    """What this model has that the fused encoder does not know; empty where it knows all."""
    encoder, own = model.encoder, type(model)
    if (own.forward, own.features, type(encoder)) != (ViT.forward, ViT.features, Encoder):
        return "a way of its own from images to logits"
    if not isinstance(encoder.norm, nn.LayerNorm):
        return "another norm at its end"
    blocks: list[Any] = list(encoder.blocks)
    for block in blocks:
        if type(block) is not EncoderBlock:
            return "blocks of their own kind"
        if block.residual1.scale is not None:
            return "layer scale"
        if learning and (block.mlp.dropout.p or block.attention.dropout_attention):
            return "dropout"
        if block.attention.qkv.in_features > MOST_COLUMNS:
            return f"tokens wider than {MOST_COLUMNS}"
        if (block.attention.qkv.in_features // block.attention.heads) % 8:
            return "heads whose width is not a multiple of 8"
        if fp8 and (block.mlp.expand.in_features % 16 or block.mlp.expand.out_features % 16):
            return "widths that are no multiples of 16, as FP8 products need them"
    if learning and not all(parameter.requires_grad for parameter in encoder.parameters()):
        return "weights that do not learn"
    return ""


class FusedEncoder:
    """`fused(tokens, grid)` is `encoder(tokens, grid)`, with gradients for its parameters where they are wanted."""

    def __init__(
        self, encoder: Encoder, fp8: bool = False, number: torch.dtype = torch.bfloat16, spare: int | None = None
    ) -> None:
        self.encoder, self.fp8, self.number = encoder, fp8, number
        self.spare = SPARE if spare is None else spare
        self.blocks: list[Any] = list(encoder.blocks)
        self.norm: Any = encoder.norm
        self.parameters = list(encoder.parameters())
        self.rounded: dict[Tensor, Tensor] = {
            p: torch.empty_like(p, dtype=number) for p in self.parameters if p.ndim == 2
        }
        self.small: dict[Tensor, Small] = {}  # where weights stay as they are
        self.round()

    def __call__(self, z_BTD: Tensor, grid: Grid) -> Tensor:
        rotary = self.encoder.rotary_position
        turn = None if rotary is None else rotary(grid)
        if not torch.is_grad_enabled():
            return through(self, z_BTD, turn, None)[1].view(z_BTD.shape)
        tokens: Tensor = Blocks.apply(z_BTD, turn, self, *self.parameters)  # type: ignore[no-untyped-call]
        return tokens

    @torch.no_grad()
    def round(self) -> None:
        """The weights as they are now, for the products."""
        torch._foreach_copy_(list(self.rounded.values()), list(self.rounded))

    def settle(self) -> None:
        """The weights will not change any more: FP8 copies are made once."""
        if self.fp8:
            for block in self.blocks:
                for layer in (block.attention.qkv, block.mlp.expand, block.mlp.contract):
                    self.small[layer.weight] = launch.shrink(layer.weight.detach().float())

    def product(
        self, x: Tensor | None, x8: Small | None, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Bound | None]:
        """x·Wᵀ + bias, and how large it can be without the bias, where FP8 is used."""
        if x8 is not None:
            return scaled(x8, self.small.get(weight) or launch.shrink(weight.detach()), bias)
        assert x is not None
        rounded = self.rounded[weight].t()
        return x @ rounded if bias is None else torch.addmm(bias.to(x.dtype), x, rounded), None

    def product_back(self, dy: Tensor, dy8: Small | None, weight: Tensor) -> tuple[Tensor, Bound | None]:
        """dy·W, and the same."""
        if dy8 is None:
            return dy @ self.rounded[weight], None
        return scaled(dy8, launch.shrink(weight.detach().t()))


@dataclass
class Kept:
    """Of a block, for the way back. What is None is computed again there."""

    block: Any
    z: Tensor
    a: Tensor | None
    qkv: Tensor
    qkv_BhTd: tuple[Tensor, ...]  # as PyTorch's attention took them, if it did
    o: Tensor
    z2: Tensor
    a2: Tensor | None
    h: Tensor
    g: Tensor | None
    kept1: Tensor | None
    kept2: Tensor | None


def through(fused: FusedEncoder, z_BTD: Tensor, turn: Turn | None, keep: list[Kept] | None) -> tuple[Tensor, Tensor]:
    """The tokens after all blocks, before and after the last norm: M D. What the way back needs is put into `keep`."""
    B, T, D = z_BTD.shape
    f: Tensor | None
    z, f, bias, kept = z_BTD.reshape(B * T, D).to(fused.number).contiguous(), None, None, None
    for block in fused.blocks:
        attention, mlp = block.attention, block.mlp
        z, a, a8 = launch.add_norm(z, f, bias, kept, of(block.norm1), fused.fp8)
        qkv, _ = fused.product(a, a8, attention.qkv.weight, attention.qkv.bias)
        o, taken = attend(attention, qkv, turn, B, T, keep is not None)
        f, kept = o @ fused.rounded[attention.project.weight].t(), stochastic(block.residual1, B, z)
        z2, a2, a8 = launch.add_norm(z, f, attention.project.bias, kept, of(block.norm2), fused.fp8)
        h, known = fused.product(a2, a8, mlp.expand.weight)
        g, g8 = launch.act(h, mlp.expand.bias, mlp.gelu.approximate == "tanh", known)
        kept1, kept = kept, stochastic(block.residual2, B, z)
        (f, _), bias = fused.product(g, g8, mlp.contract.weight), mlp.contract.bias
        if keep is not None:
            own = (a, a2, g) if h.numel() <= fused.spare else (None, None, None)
            keep.append(Kept(block, z, own[0], qkv, taken, o, z2, own[1], h, own[2], kept1, kept))
        z = z2
    last, normed, _ = launch.add_norm(z, f, bias, kept, of(fused.norm), False)
    return last, normed


class Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_BTD: Tensor, turn: Turn | None, fused: FusedEncoder, *parameters: Tensor) -> Tensor:
        fused.round()
        ctx.fused, ctx.turn, ctx.shape, ctx.blocks = fused, turn, z_BTD.shape, []
        ctx.last, normed = through(fused, z_BTD, turn, ctx.blocks)
        return normed.view(z_BTD.shape)

    @staticmethod
    def backward(ctx: Any, dy_BTD: Tensor) -> tuple[Tensor | None, ...]:
        fused, fp8 = ctx.fused, ctx.fused.fp8
        B, T, D = ctx.shape
        found: dict[Tensor, Tensor] = {}
        dy = dy_BTD.reshape(B * T, D).to(fused.number).contiguous()
        d = launch.add_norm_back(ctx.last, dy, None, ctx.blocks[-1].kept2, of(fused.norm), fp8)
        found[fused.norm.weight], found[fused.norm.bias], dbias = d.sums
        while ctx.blocks:
            was: Kept = ctx.blocks.pop()
            block, attention, mlp = was.block, was.block.attention, was.block.mlp
            found[mlp.contract.bias] = dbias
            dg, known = fused.product_back(d.f, d.f_small, mlp.contract.weight)
            tanh = mlp.gelu.approximate == "tanh"
            g, dh, dh8, found[mlp.expand.bias] = launch.act_back(was.h, mlp.expand.bias, dg, tanh, known, was.g)
            found[mlp.contract.weight] = weight_gradient(d.f, g)
            da, _ = fused.product_back(dh, dh8, mlp.expand.weight)
            d = launch.add_norm_back(was.z2, da, d.z, was.kept1, of(block.norm2), again=was.a2 is None)
            found[mlp.expand.weight] = weight_gradient(dh, was.a2, d.normed)
            found[block.norm2.weight], found[block.norm2.bias], found[attention.project.bias] = d.sums
            found[attention.project.weight] = weight_gradient(d.f, was.o.detach())
            do = d.f @ fused.rounded[attention.project.weight]
            dqkv, dqkv8 = attend_back(attention, was, do, ctx.turn, found, fp8, T)
            da, _ = fused.product_back(dqkv, dqkv8, attention.qkv.weight)
            before = ctx.blocks[-1].kept2 if ctx.blocks else None
            d = launch.add_norm_back(
                was.z, da, d.z, before, of(block.norm1), fp8 and bool(ctx.blocks), again=was.a is None
            )
            found[attention.qkv.weight] = weight_gradient(dqkv, was.a, d.normed)
            found[block.norm1.weight], found[block.norm1.bias], dbias = d.sums
        return d.z.view(B, T, D), None, None, *(found[parameter] for parameter in fused.parameters)


def of(norm: nn.LayerNorm) -> Norm:
    return norm.weight, norm.bias, norm.eps


def stochastic(residual: Residual, images: int, like: Tensor) -> Tensor | None:
    """For each image whether the branch is kept: 0, or what makes the mean one."""
    if not (residual.training and residual.drop):
        return None
    return (torch.rand(images, device=like.device) >= residual.drop).float() / (1 - residual.drop)


def scaled(x: Small, w: Small, bias: Tensor | None = None) -> tuple[Tensor, Bound]:
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


def weight_gradient(dy: Tensor, kept: Tensor | None, again: Tensor | None = None) -> Tensor:
    """dyᵀ·x, summed and left in fp32, with x as it was kept, or else as it was computed again."""
    x = again if kept is None else kept
    assert x is not None
    if dy.device.type == "cpu":
        return dy.t().float() @ x.float()
    return torch.mm(dy.t(), x, out_dtype=torch.float32)


def attend(
    attention: Any, qkv: Tensor, turn: Turn | None, B: int, T: int, learning: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What attention gives, M hd, and what PyTorch's own took, if it was that."""
    heads, norms = attention.heads, norms_of(attention)
    if launch.SHORT >= T:
        return launch.short(qkv, heads, T, norms, turn), ()
    q, k, v = qkv.view(B, T, 3, heads, -1).permute(2, 0, 3, 1, 4)
    if norms is not None or turn is not None:
        q, k = launch.turn(qkv, heads, T, norms, turn).view(2, B, T, heads, -1).transpose(2, 3)
    with torch.set_grad_enabled(learning):  # its own way back is PyTorch's
        q, k, v = (x.detach().requires_grad_(learning) for x in (q, k, v))
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
