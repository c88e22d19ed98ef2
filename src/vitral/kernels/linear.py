"""An encoder's weights as its products take them, in bf16 or FP8, made anew in each step; and these products.

Weights stay in fp32; gradients of theirs come out in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitral.device.hardware import Aside
from vitral.kernels import ops as launch
from vitral.kernels.layernorm_gelu.kernel import STEEPEST, TOP
from vitral.kernels.ops import Small
from vitral.models.vit import Encoder

WIDE = 512  # columns from which FP8 gains more in a weight's gradient than turning the matrices costs

Place = Callable[[int, int], Tensor]  # for so many rows and columns
Bound = tuple[Tensor, Tensor]  # no number of a product is larger than its row's length times the longest column's


class Weights:
    """With `front`, the last block has large products for its keys and values alone; `columns`: see FusedEncoder."""

    def __init__(self, encoder: Encoder, fp8: bool, number: torch.dtype, front: bool, columns: bool) -> None:
        self.fp8, self.front, self.columns = fp8, front, columns
        self.blocks: list[Any] = list(encoder.blocks)
        self.rounded: dict[Tensor, Tensor] = {
            p: p.detach() if p.dtype == number else torch.empty_like(p, dtype=number)
            for p in encoder.parameters()
            if p.ndim == 2
        }
        self.small: dict[Tensor, Small] = {}
        self.small_back: dict[Tensor, Small] = {}  # transposed
        self.scales: dict[Any, Scales] = {}  # of blocks whose weights' gradients are products of FP8
        self.beside = Aside(next(encoder.parameters()).device)
        self.rounding = False
        self.round(learning=False)

    def round_beside(self) -> None:
        """The weights, while whoever asks computes the tokens."""
        self.beside.begin(partial(self.round, learning=True))
        self.rounding = True

    def round_now(self) -> None:
        """Unless they are being rounded: then that is waited for."""
        self.beside.wait() if self.rounding else self.round(learning=True)
        self.rounding = False

    @torch.no_grad()
    def round(self, learning: bool) -> None:
        """The weights as they are now, for the products."""
        if copies := {p: copy for p, copy in self.rounded.items() if copy.dtype != p.dtype}:
            torch._foreach_copy_(list(copies.values()), list(copies))
        if not self.fp8:
            return
        layers = [layer for block in self.blocks for layer in large(block, learning)]
        used = len(layers) - (len(large(self.blocks[-1], learning)) - 1 if self.front else 0)
        most = torch.zeros(len(layers), 2, 2, device=layers[0].weight.device)
        for layer, (forth, back) in zip(layers[:used], most, strict=False):
            self.small[layer.weight] = launch.shrink(layer.weight, layer.bias, forth)
            if learning:
                self.small_back[layer.weight] = launch.shrink(layer.weight.t(), None, back)
        if learning and self.columns:
            self.scales = dict(zip(self.blocks, scales_of(self.blocks, most), strict=True))

    def let_go(self, gather: Callable[[list[Tensor]], None]) -> None:
        """Of weights whose FP8 copies are all that answers need: not what follows attention, which may give bf16. What
        stays, these copies and all parameters, `gather` may bring to another place."""
        for weight in self.small.keys() - {block.attention.project.weight for block in self.blocks}:
            del self.rounded[weight]
            weight.data = weight.data.new_empty(0)
        if self.small:
            left = list(self.rounded)
            self.rounded.clear()  # which hold what is to be moved
            gather([small.numbers for small in self.small.values()])
            self.rounded = {weight: weight.detach() for weight in left}

    def by_columns(self, block: Any, dy8: Small | None) -> tuple[Small, Scales] | None:
        """What its weights' gradients need to be products of FP8, if they are: a gradient that is, and scales."""
        return (dy8, self.scales[block]) if dy8 is not None and self.sums_over(len(dy8.numbers)) else None

    def sums_over(self, tokens: int) -> bool:
        """Whether gradients of weights are products of FP8: these sum over multiples of 16 alone."""
        return self.columns and tokens % 16 == 0

    def product(
        self, x: Tensor | None, x8: Small | None, weight: Tensor, bias: Tensor | None = None, place: Place | None = None
    ) -> tuple[Tensor, Bound | None]:
        """x·Wᵀ + bias, and how large it can be without the bias, where FP8 is used."""
        if x8 is not None:
            small = self.small[weight]
            return scaled(x8, small, bias, None if place is None else place(len(x8.numbers), len(small.numbers)))
        assert x is not None
        rounded = self.rounded[weight].t()
        out = None if place is None else place(len(x), rounded.shape[1])
        if bias is None:
            return torch.mm(x, rounded, out=out), None
        return torch.addmm(bias.to(x.dtype), x, rounded, out=out), None

    def product_back(self, dy: Tensor, dy8: Small | None, weight: Tensor) -> tuple[Tensor, Bound | None]:
        """dy·W, and the same."""
        return (dy @ self.rounded[weight], None) if dy8 is None else scaled(dy8, self.small_back[weight])


def large(block: Any, learning: bool) -> list[nn.Linear]:
    """The layers of a block whose products are of FP8. What attention gave is kept as bf16 for the way back."""
    attention, mlp = block.attention, block.mlp
    return [attention.qkv, *([] if learning else [attention.project]), mlp.expand, mlp.contract]


class Scales(NamedTuple):
    """Of what a block's weights' gradients are products of, as FP8: from bounds that follow from its weights alone."""

    one: Tensor  # what the first norm gives
    two: Tensor
    g: Tensor  # GELU
    steep: Tensor  # a row's scale before GELU, in that behind the product after it
    expand: Tensor  # `two` times `steep`


def scales_of(blocks: list[Any], most: Tensor) -> list[Scales]:
    """From `shrink`'s numbers about their large layers. No row of a norm is longer than √D times gain and shift."""
    norms = [norm for block in blocks for norm in (block.norm1, block.norm2)]
    gains = torch._foreach_norm([norm.weight for norm in norms] + [norm.bias for norm in norms], math.inf)
    length = torch.stack(gains).view(2, -1, 2).sum(0) * norms[0].weight.numel() ** 0.5
    (_, expand, contract) = most.unflatten(0, (len(blocks), 3)).unbind(1)
    one, two = (length / TOP.value).unbind(1)
    g = two * expand[:, 0, 0] + expand[:, 0, 1] / TOP.value
    steep = STEEPEST.value * contract[:, 1, 0]
    every = torch.stack([one, two, g, steep, two * steep], dim=1).clamp_min(1e-30)
    apart = every[:, :, None].expand(-1, -1, 4).contiguous()  # products read scales at multiples of 16 bytes alone
    return [Scales(*row.unbind()) for row in apart[:, :, 0]]


class Room:
    """Places for what answers compute again and again: such as come and go leave gaps that the next does not fit."""

    def __init__(self, tokens: Tensor, hidden: int, added: int) -> None:
        """For so many hidden numbers in all, and for so many tokens to which something is added."""
        M, D = tokens.shape
        self.widest = tokens.new_empty(max(hidden, M * 3 * D))
        self.narrow = tokens.new_empty(added * D)

    def wide(self, rows: int, columns: int) -> Tensor:
        """For queries, keys and values, and then for the MLP's hidden numbers."""
        return self.widest[: rows * columns].view(rows, columns)

    def added(self, rows: int, columns: int) -> Tensor:
        """For what the tokens are given by attention, and then by the MLP."""
        return self.narrow[: rows * columns].view(rows, columns)


def scaled(x: Small, w: Small, bias: Tensor | None = None, out: Tensor | None = None) -> tuple[Tensor, Bound]:
    """x·wᵀ of FP8 numbers, whose rows have scales."""
    product = torch._scaled_mm(
        x.numbers,
        w.numbers.t(),
        scale_a=x.scales,
        scale_b=w.scales.t(),
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
        out=out,
    )
    return product, (x.norms, w.norms)


def weight_gradient(dy: Tensor, x: Tensor | None) -> Tensor:
    """dyᵀ·x, summed and left in fp32."""
    assert x is not None
    if dy.device.type == "cpu":
        return dy.t().float() @ x.float()
    return torch.mm(dy.t(), x, out_dtype=torch.float32)
