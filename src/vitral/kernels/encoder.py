"""The encoder on a GPU: the blocks of vit.py, with kernels.py between the matrix products.

One autograd function for all blocks, forwards and backwards written out. It keeps for each block what cannot be had
again cheaply, in bf16: both residuals, qkv, what attention gave, and the MLP's hidden numbers before GELU; norms and
GELU too, where they are small. Weights stay in fp32; products are of bf16 copies made in each step, and gradients of
weights come out in fp32.

Where only the first token is asked for afterwards, as a class token is, the last block takes the others as keys and
values alone: nothing else of theirs reaches the answer.

With `fp8` the large products forwards, and the gradients that flow back through them, are of 8-bit numbers: each row
has its own scale, found while it is at hand. So are the gradients of their weights in wide models (`columns.py`); in
narrow ones they stay products of bf16, as does what attention gave, where the way back will need it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.kernels import ops as launch
from vitral.kernels.fp8_wgrad import op as columns
from vitral.kernels.linear import Bound, Room, Scales, Weights, weight_gradient
from vitral.kernels.ops import Norm, Normed, NormGradients, Norms, Small
from vitral.models.vit import Encoder, EncoderBlock, Grid, Residual, Turn, ViT

SPARE = 2**25  # hidden numbers: with more, a block keeps neither GELU nor norms and computes them again
MOST_COLUMNS = 4096  # a kernel holds whole rows of tokens


def unknown(model: ViT, fp8: bool = False, learning: bool = True) -> str:
    """What this model has that the fused encoder does not know; empty where it knows all."""
    encoder, own = model.encoder, type(model)
    if (own.forward, own.features, own.pool, type(encoder)) != (ViT.forward, ViT.features, ViT.pool, Encoder):
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
    """`fused(tokens, grid)` is `encoder(tokens, grid)`, with gradients for its parameters where they are wanted.

    With `front`, it is the first token of that: B 1 D. With `columns`, gradients of weights are products of FP8 too.
    From `rows` tokens on, all of a block but attention is one kernel forwards, unless much is kept for the way back; in
    answers of FP8, the MLP's expansion and GELU are."""

    def __init__(
        self,
        encoder: Encoder,
        fp8: bool = False,
        number: torch.dtype = torch.bfloat16,
        spare: int | None = None,
        front: bool = False,
        columns: bool = False,
        rows: int | None = None,
    ) -> None:
        self.encoder, self.fp8, self.number, self.front, self.rows = encoder, fp8, number, front, rows
        self.spare = SPARE if spare is None else spare
        self.blocks: list[Any] = list(encoder.blocks)
        self.norm: Any = encoder.norm
        self.parameters = list(encoder.parameters())
        self.weights = Weights(encoder, fp8, number, front, columns)
        branches = [branch for block in self.blocks for branch in (block.residual1, block.residual2)]
        self.dropping: list[Residual] = [branch for branch in branches if branch.drop]
        self.drops = torch.tensor([[branch.drop] for branch in self.dropping], device=self.parameters[0].device)

    def __call__(self, z_BTD: Tensor, grid: Grid) -> Tensor:
        turn = self.turn(grid)
        if not torch.is_grad_enabled():
            normed = through(self, z_BTD, turn, None).plain
            assert normed is not None
            return normed.view(len(z_BTD), -1, z_BTD.shape[2])
        tokens: Tensor = Blocks.apply(z_BTD, turn, self, *self.parameters)  # type: ignore[no-untyped-call]
        return tokens

    def turn(self, grid: Grid) -> Turn | None:
        rotary = self.encoder.rotary_position
        return None if rotary is None else rotary(grid)

    @torch.no_grad()
    def there_and_back(self, z_BTD: Tensor, grid: Grid) -> None:
        """Forwards and backwards in this thread; autograd goes back in one of its own."""
        context = SimpleNamespace()
        Blocks.backward(context, Blocks.forward(context, z_BTD, self.turn(grid), self, *self.parameters))


class Kept(NamedTuple):
    """Of a block, for the way back. What is None is computed again there."""

    block: Any
    one: Normed
    qkv: Tensor
    taken: tuple[Tensor, ...]  # queries, keys and values as attention took them; none where it was `launch.short`
    lse: Tensor | None  # the logarithms of softmax's sums, where `launch.attend` left them
    o: Tensor
    two: Normed
    h: Tensor
    g: Tensor | None
    kept1: Tensor | None
    kept2: Tensor | None
    front: bool  # whether `o` and all behind it are of the first tokens alone


class Sum(NamedTuple):
    """z + kept·(f + bias), which the next norm computes."""

    z: Tensor
    f: Tensor | None = None
    bias: Tensor | None = None
    kept: Tensor | None = None


class Asked(NamedTuple):
    """A block's tokens with their norm, and what attention is asked."""

    one: Normed
    qkv: Tensor
    known: Bound | None = None


def through(fused: FusedEncoder, z_BTD: Tensor, turn: Turn | None, keep: list[Kept] | None) -> Normed:
    """The tokens after all blocks and the last norm: M D. What the way back needs is put into `keep`; without, there is
    room for what comes again in each block, and the tokens stay where they are."""
    B, T, D = z_BTD.shape
    z, asked = Sum(z_BTD.reshape(B * T, D).to(fused.number).contiguous()), None
    chosen = stochastic(fused, B)
    spare = any(spares(fused, block, (B, T), keep) for block in fused.blocks)
    by_rows = fused.rows is not None and fused.rows <= B * T and not (chosen or spare or fused.fp8)
    room = None
    if keep is None:  # by rows, only the last block asks for it, and perhaps only for first tokens
        hidden = max(block.mlp.expand.out_features for block in fused.blocks)
        at_once = expands_at_once(fused, B * T, keep)
        added = B if by_rows and fused.front else B * T
        room = Room(z.z, hidden * (B * fused.front if at_once else added), added)
    for block, after in zip(fused.blocks, (*fused.blocks[1:], None), strict=True):
        asked = asked or questions(fused, block, z, (B, T), keep, room)
        if by_rows and after is not None:
            asked = through_rows(fused, block, after, asked, turn, (B, T), keep)
        else:
            z, asked = through_block(fused, block, asked, turn, (B, T), chosen, keep, room), None
    return launch.add_norm(*z, of(fused.norm), False, in_place=keep is None)


def questions(
    fused: FusedEncoder, block: Any, z: Sum, shape: tuple[int, int], keep: list[Kept] | None, room: Room | None
) -> Asked:
    in_place = keep is None and block is not fused.blocks[0]  # whose tokens are the caller's
    spare, qkv = spares(fused, block, shape, keep), block.attention.qkv
    one = launch.add_norm(*z, of(block.norm1), fused.fp8, spare or not fused.fp8, in_place)
    asked = fused.weights.product(one.plain, one.small, qkv.weight, qkv.bias, None if room is None else room.wide)
    return Asked(one._replace(plain=one.plain if spare else None, small=None), *asked)


def spares(fused: FusedEncoder, block: Any, shape: tuple[int, int], keep: list[Kept] | None) -> bool:
    """Whether norms and GELU are kept for the way back too."""
    tokens = shape[0] * shape[1]
    few = tokens * block.mlp.expand.out_features <= fused.spare
    return keep is not None and few and not fused.weights.sums_over(tokens)


def expands_at_once(fused: FusedEncoder, tokens: int, keep: list[Kept] | None) -> bool:
    """Whether expansion and GELU are one, but where only first tokens are left."""
    return fused.fp8 and keep is None and fused.rows is not None and fused.rows <= tokens


def through_rows(
    fused: FusedEncoder, block: Any, after: Any, asked: Asked, turn: Turn | None, shape: tuple[int, int],
    keep: list[Kept] | None,
) -> Asked:  # fmt: skip
    """All of a block behind attention in one pass, and what the next one asks."""
    (one, qkv, _), weights = asked, fused.weights.rounded
    o, _, taken, lse = attend(block.attention, qkv, turn, *shape, front=False, learning=keep is not None, known=None)
    assert o is not None
    if keep is None:
        out = torch.empty_like(one.x) if block is fused.blocks[0] else one.x
        launch.rows(o, one.x, out, qkv, block, after, weights)
        return Asked(one._replace(x=out), qkv)
    h = one.x.new_empty(len(one.x), block.mlp.expand.out_features)
    between = launch.Between(torch.empty_like(one.x), h, *(torch.empty_like(one.stats) for _ in range(2)))
    next_one, next_qkv = Normed(torch.empty_like(one.x), between.stats_one, None), torch.empty_like(qkv)
    launch.rows(o.detach(), one.x, next_one.x, next_qkv, block, after, weights, between)
    two = Normed(between.two, between.stats_two, None)
    keep.append(Kept(block, one, qkv, taken, lse, o, two, h, None, None, None, False))
    return Asked(next_one, next_qkv)


def through_block(
    fused: FusedEncoder, block: Any, asked: Asked, turn: Turn | None, shape: tuple[int, int],
    chosen: dict[Residual, Tensor], keep: list[Kept] | None, room: Room | None,
) -> Sum:  # fmt: skip
    (B, T), attention, mlp, (one, qkv, known) = shape, block.attention, block.mlp, asked
    spare = spares(fused, block, shape, keep)
    wide, added = (None, None) if room is None else (room.wide, room.added)
    front = fused.front and block is fused.blocks[-1]
    o, o8, taken, lse = attend(attention, qkv, turn, B, T, front, keep is not None, known)
    z, fp8 = Sum(one.x[::T].contiguous() if front else one.x), fused.fp8 and not front
    f, _ = fused.weights.product(o, o8, attention.project.weight, None, added)
    kept1, kept2 = chosen.get(block.residual1), chosen.get(block.residual2)
    z = Sum(z.z, f, attention.project.bias, kept1)
    in_place = keep is None and block is not fused.blocks[0]
    two = launch.add_norm(*z, of(block.norm2), fp8, spare or not fp8, in_place)
    tanh = mlp.gelu.approximate == "tanh"
    g: Tensor | None = None
    g8: Small | None
    if two.small is not None and expands_at_once(fused, B * T, keep):
        g8 = launch.expand(two.small, fused.weights.small[mlp.expand.weight], mlp.expand.bias, tanh)
    else:
        h, known = fused.weights.product(two.plain, two.small, mlp.expand.weight, None, wide)
        g, g8 = launch.act(h, mlp.expand.bias, tanh, known, in_place=keep is None)
    two = two._replace(plain=two.plain if spare else None, small=None)
    if keep is not None:
        assert o is not None
        keep.append(Kept(block, one, qkv, taken, lse, o, two, h, g if spare else None, kept1, kept2, front))
    f, _ = fused.weights.product(g, g8, mlp.contract.weight, None, added)
    return Sum(two.x, f, mlp.contract.bias, kept2)


class Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_BTD: Tensor, turn: Turn | None, fused: FusedEncoder, *parameters: Tensor) -> Tensor:
        fused.weights.round_now()
        ctx.fused, ctx.turn, ctx.shape, ctx.blocks = fused, turn, z_BTD.shape, []
        ctx.last = through(fused, z_BTD, turn, ctx.blocks)
        return ctx.last.plain.view(len(z_BTD), -1, z_BTD.shape[2])

    @staticmethod
    def backward(ctx: Any, dy_BTD: Tensor) -> tuple[Tensor | None, ...]:
        fused, fp8 = ctx.fused, ctx.fused.fp8
        B, T, D = ctx.shape
        found: dict[Tensor, Tensor] = {}
        dy = dy_BTD.reshape(-1, D).to(fused.number).contiguous()
        sums, fp8_too = launch.Sums(), fp8 and not fused.front
        d = launch.add_norm_back(ctx.last, dy, None, ctx.blocks[-1].kept2, of(fused.norm), sums, fp8_too)
        found[fused.norm.weight], found[fused.norm.bias], dbias = d.sums
        while ctx.blocks:
            was: Kept = ctx.blocks.pop()
            block, attention, mlp = was.block, was.block.attention, was.block.mlp
            found[mlp.contract.bias] = dbias
            da, dh = mlp_back(fused, was, d, sums, found)
            d = launch.add_norm_back(was.two, da, d.z, was.kept1, of(block.norm2), sums, again=dh is not None)
            if dh is not None:
                found[mlp.expand.weight] = weight_gradient(dh, d.normed)
            found[block.norm2.weight], found[block.norm2.bias], found[attention.project.bias] = d.sums
            found[attention.project.weight] = weight_gradient(d.f, was.o.detach())
            do = d.f @ fused.weights.rounded[attention.project.weight]
            dqkv, dqkv8 = attend_back(attention, was, do, ctx.turn, found, sums, fp8, T)
            da, _ = fused.weights.product_back(dqkv, dqkv8, attention.qkv.weight)
            passed = among_zeros(d.z, T) if was.front else d.z
            before = ctx.blocks[-1].kept2 if ctx.blocks else None
            if small := fused.weights.by_columns(block, dqkv8):
                found[attention.qkv.weight] = qkv_gradient(was, *small)
            again, fp8_too = small is None, fp8 and bool(ctx.blocks)
            d = launch.add_norm_back(was.one, da, passed, before, of(block.norm1), sums, fp8_too, again)
            sums.take()
            if again:
                found[attention.qkv.weight] = weight_gradient(dqkv, d.normed)
            found[block.norm1.weight], found[block.norm1.bias], dbias = d.sums
        return d.z.view(B, T, D), None, None, *(found[parameter] for parameter in fused.parameters)


def mlp_back(
    fused: FusedEncoder, was: Kept, d: NormGradients, sums: launch.Sums, found: dict[Tensor, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The gradient of what the MLP was given; and that of h, if the weights' next gradient is still to be had of it."""
    mlp, tanh = was.block.mlp, was.block.mlp.gelu.approximate == "tanh"
    dg, known = fused.weights.product_back(d.f, d.f_small, mlp.contract.weight)
    dh8: Small | None
    if small := fused.weights.by_columns(was.block, d.f_small):
        f8, scales = small
        shares = columns.shares_of(f8.scales)
        dh8, dh, g, found[mlp.expand.bias] = columns.gelu_back(
            was.h, mlp.expand.bias, dg, tanh, f8.scales, scales.steep, shares.rest, scales.g, sums
        )
        x = columns.normed(was.two, of(was.block.norm2), shares.whole, scales.two)
        found[mlp.contract.weight] = columns.product(columns.turned(f8, shares.root), g, shares.top, scales.g)
        found[mlp.expand.weight] = columns.product(dh, x, shares.top, scales.expand)
        return fused.weights.product_back(dg, dh8, mlp.expand.weight)[0], None
    g, dh, dh8, found[mlp.expand.bias] = launch.act_back(was.h, mlp.expand.bias, dg, tanh, known, was.g, sums)
    found[mlp.contract.weight] = weight_gradient(d.f, g)
    return fused.weights.product_back(dh, dh8, mlp.expand.weight)[0], dh


def qkv_gradient(was: Kept, dqkv8: Small, scales: Scales) -> Tensor:
    shares = columns.shares_of(dqkv8.scales)
    x = columns.normed(was.one, of(was.block.norm1), shares.whole, scales.one)
    return columns.product(columns.turned(dqkv8), x, shares.top, scales.one)


def among_zeros(rows: Tensor, T: int) -> Tensor:
    """These rows as each T-th, and zeros between."""
    out = rows.new_zeros(len(rows) * T, rows.shape[1])
    out[::T] = rows
    return out


def of(norm: nn.LayerNorm) -> Norm:
    return norm.weight, norm.bias, norm.eps


def stochastic(fused: FusedEncoder, images: int) -> dict[Residual, Tensor]:
    """For each image whether a branch is kept: 0, or what makes the mean one. Drawn for all blocks at once."""
    if not (fused.dropping and fused.dropping[0].training):
        return {}
    kept = torch.rand(len(fused.dropping), images, device=fused.drops.device) >= fused.drops
    return dict(zip(fused.dropping, (kept.float() / (1 - fused.drops)).unbind(), strict=True))


def attend(
    attention: Any, qkv: Tensor, turn: Turn | None, B: int, T: int, front: bool, learning: bool, known: Bound | None
) -> tuple[Tensor | None, Small | None, tuple[Tensor, ...], Tensor | None]:
    """What attention gives to all tokens or to the first, M hd, as bf16 or, where that is possible and nobody goes the
    way back, as FP8; and of `Kept` what was taken, and the logarithms."""
    heads, norms, D = attention.heads, norms_of(attention), qkv.shape[1] // 3
    if launch.SHORT >= T and not front:
        return launch.short(qkv, heads, T, norms, turn), None, (), None
    q, k, v = qkv.chunk(3, dim=1)
    if norms is not None or turn is not None:
        q, k = launch.turn(qkv, heads, T, norms, turn).view(2, -1, D)
    if launch.LONG >= T and launch.WIDE * heads >= D and not front:
        if known is not None and not learning:
            return None, launch.attend_small(q, k, v, heads, T, known), (), None
        o, lse = launch.attend(q, k, v, heads, T)
        return o, None, (q, k, v), lse
    q, k, v = (x.unflatten(0, (B, T)).unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    if front:
        q = q[:, :, :1]
    with torch.set_grad_enabled(learning):  # its own way back is PyTorch's
        q, k, v = (x.detach().requires_grad_(learning) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, D)
    return o, None, (q, k, v), None


def attend_back(
    attention: Any, was: Kept, do: Tensor, turn: Turn | None, found: dict[Tensor, Tensor], later: launch.Sums,
    fp8: bool, T: int,
) -> tuple[Tensor, Small | None]:  # fmt: skip
    """The gradient of qkv, and that as FP8, unless it was short."""
    heads, norms, biased = attention.heads, norms_of(attention), attention.qkv.bias is not None
    out: Tensor | None = None
    sums: Tensor | None = None
    if was.lse is not None:
        q, k, v = was.taken
        out = launch.attend_back(q, k, v, was.o, was.lse, do, heads, T)
    elif not was.taken:
        out = launch.short_back(was.qkv, do, heads, T, norms, turn)
    if out is not None and was.taken and norms is None and turn is None:
        dqkv, (summed, small) = out, launch.cast(out, biased, fp8, later)
    else:
        if out is not None:
            gradients = launch.by_heads(out, heads, T)
        else:
            dq, dk, dv = torch.autograd.grad(was.o, was.taken, do)
            gradients = (F.pad(dq, (0, 0, 0, T - 1)) if was.front else dq, dk, dv)
        dqkv, sums, summed = launch.turn_back(was.qkv, gradients, norms, turn, biased, later, out)
        _, small = launch.cast(dqkv, False, fp8 and bool(was.taken), later)
    if sums is not None:
        (found[attention.norm_q.weight], found[attention.norm_k.weight]) = sums[0]
        (found[attention.norm_q.bias], found[attention.norm_k.bias]) = sums[1]
    if summed is not None:
        found[attention.qkv.bias] = summed
    return dqkv, small


def norms_of(attention: Any) -> Norms | None:
    q, k = attention.norm_q, attention.norm_k
    return (q.weight, k.weight, q.bias, k.bias, q.eps) if isinstance(q, nn.LayerNorm) else None
