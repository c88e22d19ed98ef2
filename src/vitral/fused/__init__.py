"""A ViT's training step on a GPU, with kernels of our own between the matrix products: `forward(model, hardware)`.

Imported where a GPU was found, never before: the kernels are written in Triton, which PyTorch brings along there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vitral.fused.encoder import FusedEncoder, unknown
from vitral.hardware import Hardware
from vitral.vit import PatchEmbedding, ViT

__all__ = ["answering", "forward", "why_not"]

MODEST = 224 * 224  # pixels of images of which sixteen are tried at once
OFF = {False: 0.1, True: 0.5}  # of the norm: more than bf16's, or FP8's, rounding adds up to in tens of blocks


def why_not(model: ViT, hardware: Hardware, learning: bool = True) -> str:
    """Why this model is not computed with fused kernels on this machine; empty where it is.

    They are tried and compared with the plain encoder first: not every GPU was at hand when they were written.
    """
    if reason := unknown(model, hardware.fp8, learning):
        return f"the model has {reason}"
    before, training = hardware.random_state(), model.training
    try:
        off = difference(model.eval(), hardware, learning)
    except Exception as error:  # the compiler's, the driver's, of whatever kind
        return f"its kernels fail here: {(str(error).splitlines() or [type(error).__name__])[0]}"
    finally:
        model.train(training)
        hardware.set_random_state(before)
    return "" if off <= OFF[hardware.fp8] else f"its kernels are off by {off:.0%} here"


def difference(model: ViT, hardware: Hardware, learning: bool) -> float:
    """Between the fused encoder and the plain one, for random tokens: the larger of answers' and gradients'."""
    C, (H, W), grid = model.config.channels, model.config.image_size, model.config.grid
    number = torch.bfloat16 if hardware.precision == "bf16" else torch.float32
    images = 16 if H * W <= MODEST else 2  # whose tokens are a multiple of 16: the very kernels that training takes
    with torch.no_grad():
        shaped = model.embed(torch.zeros(images, C, H, W).to(next(model.parameters())), grid)
    tokens, front = torch.randn_like(shaped), asks_first(model)
    dy = torch.randn_like(shaped)[:, : 1 if front else None]
    found = []
    for encoder in (FusedEncoder(model.encoder, hardware.fp8, number, spare=0, front=front), model.encoder):
        given = tokens.clone().requires_grad_(learning)
        with torch.set_grad_enabled(learning), hardware.autocast():
            out = encoder(given, grid)[:, : dy.shape[1]].to(dy)
        found.append([out.detach(), *(torch.autograd.grad(out, given, dy) if learning else ())])
    return max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(*found, strict=True))


def asks_first(model: ViT) -> bool:
    """Whether the head is told about the first token alone."""
    return model.config.pooling == "class"


class Embedding(nn.Module):
    """The first step of a ViT, as a module of its own: images → tokens."""

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model = model

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.model.embed(images_BCHW, self.model.check(images_BCHW))


def forward(model: ViT, hardware: Hardware) -> Callable[[Tensor], Tensor]:
    """Images → logits, for training. Embedding, pooling and head are as PyTorch computes them, in bf16."""
    encoder = FusedEncoder(model.encoder, fp8=hardware.fp8, front=asks_first(model))
    embedding = Embedding(model)
    outside = {f"model.{name}": p for name, p in model.named_parameters() if not name.startswith("encoder.")}

    def embed(images_BCHW: Tensor) -> Tensor:
        rounded = {name: parameter.bfloat16() for name, parameter in outside.items()}
        return functional_call(embedding, rounded, (images_BCHW.bfloat16(),))

    if model.patch_embedding.__class__ is not PatchEmbedding:  # a stem has enough to fuse
        embed = hardware.compiled(embed)

    def fused(images_BCHW: Tensor) -> Tensor:
        grid = model.check(images_BCHW)
        with torch.autocast(images_BCHW.device.type, torch.bfloat16, enabled=False):
            tokens = encoder(embed(images_BCHW), grid)
        with torch.autocast(images_BCHW.device.type, torch.bfloat16):
            return model.head(model.pool(tokens))

    return fused


def answering(model: ViT, fp8: bool) -> Callable[[Tensor], Tensor]:
    """Images → logits, for a model whose weights stay as they are."""
    number, front = next(model.parameters()).dtype, asks_first(model)
    encoder = FusedEncoder(model.encoder, fp8=fp8, number=number, front=front)

    def answer(images_BCHW: Tensor) -> Tensor:
        grid = model.check(images_BCHW)
        return model.head(model.pool(encoder(model.embed(images_BCHW, grid), grid)))

    return answer
