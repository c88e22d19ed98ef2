"""A ViT's training step on a GPU, with kernels of our own between the matrix products: `forward(model, hardware)`.

Imported where a GPU was found, never before: the kernels are written in Triton, which PyTorch brings along there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vitral.fused.encoder import FusedEncoder, why_not
from vitral.hardware import Hardware
from vitral.vit import PatchEmbedding, ViT

__all__ = ["answering", "forward", "why_not"]


class Embedding(nn.Module):
    """The first step of a ViT, as a module of its own: images → tokens."""

    def __init__(self, model: ViT) -> None:
        super().__init__()
        self.model = model

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.model.embed(images_BCHW, self.model.check(images_BCHW))


def forward(model: ViT, hardware: Hardware) -> Callable[[Tensor], Tensor]:
    """Images → logits, for training. Embedding, pooling and head are as PyTorch computes them, in bf16."""
    encoder = FusedEncoder(model.encoder, fp8=hardware.fp8)
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
    encoder = FusedEncoder(model.encoder, fp8=fp8, number=next(model.parameters()).dtype)
    encoder.settle()

    def answer(images_BCHW: Tensor) -> Tensor:
        grid = model.check(images_BCHW)
        return model.head(model.pool(encoder(model.embed(images_BCHW, grid), grid)))

    return answer
