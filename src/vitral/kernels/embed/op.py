"""A ViT's first tokens: straight from 8-bit pixels in answers, and from varied images in training. Patches are read
where they lie, and class token, positions and bias are added while the product is at hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.kernels.embed import kernel as embed_kernels
from vitral.kernels.linear import weight_gradient
from vitral.kernels.precompile import compile_ahead, launcher
from vitral.kernels.self_check import Say, largest, reason_against
from vitral.models.vit import PatchEmbedding, ViT

ROWS, PIECE = 128, 64  # patches of a program, and how many of their pixels pass by at once
OWN = ("patch_embedding.", "class_token.", "position_embedding.", "registers")  # parameters that make the tokens
OFF = 0.02  # by what share tokens, and gradients, may be off: what bf16 rounds

Seen = Callable[[Tensor], Tensor]  # uint8 images as a model takes them


def known(model: ViT) -> bool:
    config, own = model.config, type(model)
    plain = own.embed is ViT.embed and type(model.patch_embedding) is PatchEmbedding
    return plain and config.channels * config.patch_size**2 % PIECE == 0 == config.width % 16


def embedding_of(model: ViT, preprocessing: Preprocessing, hardware: Hardware, seen: Seen) -> Seen | None:
    """uint8 images of the model's size → tokens, if the kernel knows its patches and gives here what PyTorch gives."""
    if not known(model) or preprocessing.image_size != model.config.image_size:
        return None
    embed = Embed(model, preprocessing)
    images = torch.zeros(some_images(model), dtype=torch.uint8, device=hardware.device)

    @torch.no_grad()
    def difference() -> float:
        images.random_(256)
        return largest([embed(images)], [model.embed(seen(images), model.config.grid)])

    compile_ahead(partial(embed, images))
    return None if tried(hardware, difference) else embed


def learning_embedding_of(model: ViT, hardware: Hardware, say: Say) -> Seen | None:
    """Normalised images → tokens, with gradients for all that makes them: on the same conditions."""
    if not known(model) or model.dropout.p:
        return None
    parameters = [p for name, p in model.named_parameters() if name.startswith(OWN)]
    if not all(parameter.requires_grad for parameter in parameters):
        return None
    number = torch.bfloat16 if hardware.precision == "bf16" else torch.float32
    embed = partial(embedded, model, number)

    @torch.no_grad()
    def rehearsal() -> None:
        context, images = SimpleNamespace(), torch.empty(some_images(model), device=hardware.device)
        given = images.to(number), model.patch_embedding.project.weight, *parts(model), model.config.patch_size
        Embedded.backward(context, Embedded.forward(context, *given))

    def difference() -> float:
        images = torch.randn(some_images(model), device=hardware.device)
        found: list[list[Tensor]] = []
        for way in (embed, partial(model.embed, grid=model.config.grid)):
            tokens = way(images).float()
            pull = torch.linspace(1, 2, tokens.numel(), device=tokens.device).view_as(tokens)  # sums that do not vanish
            found.append([tokens.detach(), *torch.autograd.grad((tokens * pull).sum(), parameters)])
        return largest(*found)

    compile_ahead(rehearsal)
    if reason := tried(hardware, difference):
        say(f"patches are embedded step by step: {reason}")
    return None if reason else embed


def tried(hardware: Hardware, difference: Callable[[], float]) -> str:
    before = hardware.random_state()
    try:
        return reason_against(difference, OFF)
    finally:
        hardware.set_random_state(before)


def some_images(model: ViT) -> tuple[int, ...]:
    return (3, model.config.channels, *model.config.image_size)


def parts(model: ViT) -> tuple[Tensor, Tensor]:
    """What stands before the patches, F D, and what is added to each of them, N D."""
    N = math.prod(model.config.grid)
    rows, front = model.patch_embedding.project.bias.expand(N, -1), []
    places = None if model.position_embedding is None else model.position_embedding.rows(model.config.grid)[0]
    if places is not None:
        rows = rows + places[-N:]
    if model.class_token is not None:
        front.append(model.class_token.token[0] + (0 if places is None else places[:1]))
    if model.registers is not None:
        front.append(model.registers[0])
    return torch.cat(front) if front else rows[:0], rows


class Embed:
    """For a model that learns no more."""

    def __init__(self, model: ViT, preprocessing: Preprocessing) -> None:
        weight, each = model.patch_embedding.project.weight.detach(), model.config.patch_size**2
        mean, std = (torch.tensor(v, device=weight.device) * 255 for v in (preprocessing.mean, preprocessing.std))
        self.weight, self.patch = weight, model.config.patch_size
        self.scale, self.shift = (v.repeat_interleave(each).contiguous() for v in (1 / std, -mean / std))
        with torch.no_grad():
            self.front, rows = parts(model)
            self.rows = rows.float().contiguous()

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        return tokens_of(images_BCHW, self.weight, self.front, self.rows, self.patch, (self.scale, self.shift))


def embedded(model: ViT, number: torch.dtype, images_BCHW: Tensor) -> Tensor:
    given = images_BCHW.to(number), model.patch_embedding.project.weight, *parts(model), model.config.patch_size
    tokens: Tensor = Embedded.apply(*given)  # type: ignore[no-untyped-call]
    return tokens


class Embedded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images_BCHW: Tensor, weight: Tensor, front: Tensor, rows: Tensor, patch: int) -> Tensor:
        ctx.images, ctx.front, ctx.patch = images_BCHW, len(front), patch
        number = images_BCHW.dtype
        return tokens_of(images_BCHW, weight.to(number), front.to(number), rows.float().contiguous(), patch)

    @staticmethod
    def backward(ctx: Any, dy_BTD: Tensor) -> tuple[Tensor | None, ...]:
        dy = dy_BTD.to(ctx.images.dtype).contiguous()
        sums = dy.sum(0, dtype=torch.float32)
        matrix = unfolded(ctx.images, ctx.patch, ctx.front)
        return None, weight_gradient(dy.flatten(0, 1), matrix), sums[: ctx.front], sums[ctx.front :], None


def tokens_of(
    images_BCHW: Tensor, weight_DK: Tensor, front_FD: Tensor, rows_ND: Tensor, patch: int,
    normal: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """B F+N D. `normal`: by what pixels are multiplied, and what is added then, for each number of a patch."""
    (B, C, H, W), (N, D), front = images_BCHW.shape, rows_ND.shape, len(front_FD)
    tokens = weight_DK.new_empty(B, front + N, D)
    if front:
        tokens[:, :front] = front_FD
    columns = min(D & -D, 128)  # a power of two that divides them
    launcher(embed_kernels.embed, (D // columns, triton.cdiv(B * N, ROWS)))(
        images_BCHW.contiguous(), *(normal or (None, None)), weight_DK, rows_ND, tokens, B * N,
        C=C, H=H, W=W, P=patch, D=D, FRONT=front, NORMALISE=normal is not None, ROWS=ROWS, N=columns, PIECE=PIECE,
        STAGES=3, num_warps=4,
    )  # fmt: skip
    return tokens


def unfolded(images_BCHW: Tensor, patch: int, front: int) -> Tensor:
    """M K: a row for each token."""
    B, C, H, W = images_BCHW.shape
    tokens, numbers, rows = B * (front + H * W // patch**2), C * patch**2, 32
    out = images_BCHW.new_empty(tokens, numbers)
    launcher(embed_kernels.unfold, (triton.cdiv(tokens, rows), numbers // PIECE))(
        images_BCHW.contiguous(), out, tokens, C=C, H=H, W=W, P=patch, FRONT=front, ROWS=rows, PIECE=PIECE
    )
    return out
