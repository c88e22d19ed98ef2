"""First weights that suit a recipe better than the paper's."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from vitral.models.vit import ViT, ViTConfig, patchify


@torch.no_grad()
def start_at_even_odds(model: nn.Module) -> None:
    """Sigmoid: a head that has not learned yet begins by giving each class 1/K, not 1/2.

    AugReg's biases (arXiv 2106.10270) are these: -6.9 for ImageNet's 1000 classes, -10 for ImageNet-21k's 21,843.
    """
    for head in (module for name, module in model.named_modules() if name.endswith("head.out")):
        if isinstance(head, nn.Linear) and not head.weight.any() and not head.bias.any():
            head.bias.fill_(-math.log(max(len(head.bias) - 1, 1)))


Start = Literal["identity", "local", "alike", "whitened"]


@torch.no_grad()
def start_as(names: tuple[Start, ...], model: ViT, images_NCHW: Tensor | None = None) -> None:
    """First weights by these names, in their order. `images_NCHW`: some that training will see, normalised."""
    for name in names:
        if name == "identity":
            identity(model)
        elif name == "local":
            local(model)
        elif name == "alike":
            alike(model)
        elif images_NCHW is not None:
            whitened(model, images_NCHW)


def why_not(names: tuple[Start, ...], variant: str, config: ViTConfig) -> str:
    """What stands against such a start; empty where nothing does."""
    if "local" in names and not ("rotary" in config.positions and config.qk_norm and config.qkv_bias):
        return "start 'local' is for a model with rotary positions, qk_norm and qkv_bias"
    if "whitened" in names and variant != "plain":
        return f"start 'whitened' is for patches of pixels, not for the variant {variant!r}"
    return ""


def identity(model: nn.Module) -> None:
    """Each block begins as the identity: the last matrix of its branches is zero (arXiv 1901.09321, section 3).

    The signal reaches the head unmixed, and each branch joins in when it has learned something.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.project.weight", "mlp.contract.weight")):
            parameter.zero_()


# Where heads look at first, in patches down and across: four to a block, then the next row.
OFFSETS = (
    ((0, 1), (0, -1), (1, 0), (-1, 0)),
    ((1, 1), (-1, -1), (1, -1), (-1, 1)),
    ((0, 2), (0, -2), (2, 0), (-2, 0)),
    ((0, 0), (2, 2), (-2, -2), (0, 0)),
)
STRENGTH = 3.0  # of the bias, against queries and keys of about 1
BLUR = 0.7  # patches


def local(model: ViT) -> None:
    """Each head begins by looking at a neighbour: what a convolution need not learn, and a ViT spends epochs on.

    Biases of queries and keys alone, through the rotary positions: a key's is the same everywhere, a query's is that
    turned by an offset, so their product is largest where the key's place is the query's plus the offset. Signs
    alternate, which their product does not see: the norm of queries and keys would take away a mean.
    """
    config, rotary = model.config, model.encoder.rotary_position
    assert rotary is not None
    d = config.width // config.heads
    frequency = rotary.frequency()
    weight = (frequency * torch.exp(-((frequency * BLUR) ** 2) / 2)).sqrt().repeat(2)
    weight *= STRENGTH * (2 / weight.square().mean()).sqrt() * (-1.0) ** torch.arange(len(weight))
    for index, block in enumerate(model.encoder.blocks):
        q, k, _ = block.get_parameter("attention.qkv.bias").view(3, config.heads, d)
        for head in range(config.heads):
            down, across = OFFSETS[(index + head // 4) % 4][head % 4]
            angle = torch.cat([down * frequency, across * frequency])
            q[head] = torch.cat([weight * angle.cos(), weight * angle.sin()])
            k[head] = torch.cat([weight, torch.zeros_like(weight)])


def alike(model: ViT) -> None:
    """Keys begin half as the queries do: tokens look at what resembles them, as in trained ViTs (arXiv 2305.09828)."""
    for block in model.encoder.blocks:
        q, k, _ = block.get_parameter("attention.qkv.weight").chunk(3)
        k.copy_(0.5 * q + 0.75**0.5 * k)


def whitened(model: ViT, images_NCHW: Tensor, ridge: float = 5e-3) -> None:
    """The patch projection sees what is special in a patch as loudly as its mean: its inputs' covariance becomes 1.

    Pixels next to each other are nearly equal, so that a random projection gives mostly brightness.
    """
    P, project = model.config.patch_size, model.patch_embedding.project
    H, W = (side - side % P for side in images_NCHW.shape[2:])
    patches = patchify(images_NCHW[:, :, :H, :W], P).flatten(0, 1).double().cpu()
    values, vectors = torch.linalg.eigh(patches.t() @ patches / len(patches))
    white = vectors @ torch.diag((values + ridge).rsqrt()) @ vectors.t()
    D, E = project.weight.shape
    mixing = torch.linalg.qr(torch.randn(max(D, E), min(D, E), dtype=torch.float64)).Q
    mixing = (mixing if D >= E else mixing.t()) * max(D / E, 1.0) ** 0.5
    project.weight.copy_(mixing @ white)
