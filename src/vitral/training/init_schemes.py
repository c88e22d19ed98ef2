"""Weight initialisations that suit short training runs better than the paper's.

Each scheme changes the weights of a freshly initialised ViT in place; a recipe lists the ones to apply, in order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vitral.models.vit import ViT, patchify
from vitral.recipes.options import InitScheme
from vitral.training.optim.param_groups import HEAD_OUTPUT, RESIDUAL_OUTPUT


@torch.no_grad()
def apply_init_schemes(schemes: tuple[InitScheme, ...], model: ViT, images_NCHW: Tensor | None = None) -> None:
    """Apply the schemes in order. `images_NCHW`: normalised training images, which "whitened_patches" needs."""
    for scheme in schemes:
        if scheme == "identity":
            identity(model)
        elif scheme == "local_heads":
            local_heads(model)
        elif scheme == "qk_similar":
            qk_similar(model)
        elif images_NCHW is not None:
            whitened_patches(model, images_NCHW)


@torch.no_grad()
def init_sigmoid_head_bias(model: nn.Module) -> None:
    """Start a sigmoid head that is still zero at probability 1/K per class instead of 1/2.

    These are the biases of AugReg (arXiv 2106.10270): -6.9 for the 1000 classes of ImageNet, -10 for ImageNet-21k.
    """
    for head in (module for name, module in model.named_modules() if name.endswith(HEAD_OUTPUT)):
        if isinstance(head, nn.Linear) and not head.weight.any() and not head.bias.any():
            head.bias.fill_(-math.log(max(len(head.bias) - 1, 1)))


def identity(model: nn.Module) -> None:
    """Zero the last matrix of each residual branch, so that every block starts as the identity (arXiv 1901.09321).

    The tokens reach the head unchanged at first, and each branch contributes as it learns.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(RESIDUAL_OUTPUT):
            parameter.zero_()


# Offsets (down, right) in patches that heads attend to at first: four heads per row, one row per block in turn.
OFFSETS = (
    ((0, 1), (0, -1), (1, 0), (-1, 0)),
    ((1, 1), (-1, -1), (1, -1), (-1, 1)),
    ((0, 2), (0, -2), (2, 0), (-2, 0)),
    ((0, 0), (2, 2), (-2, -2), (0, 0)),
)
STRENGTH = 3.0  # magnitude of the biases; queries and keys are about 1
BLUR = 0.7  # width of the attended neighbourhood in patches


def local_heads(model: ViT) -> None:
    """Make each head attend to one neighbouring patch at first: locality, which a ViT otherwise spends epochs learning.

    Only the biases of queries and keys are set; RoPE makes them position-dependent. All keys get the same bias b, all
    queries get b rotated by an offset, so that their dot product is largest where key position = query position +
    offset. The signs of b alternate, because QK-norm would remove a common mean; they cancel in the dot product.
    """
    config, rotary = model.config, model.encoder.rotary_position
    assert rotary is not None
    head_dim = config.width // config.heads
    frequency = rotary.frequency()
    bias = (frequency * torch.exp(-((frequency * BLUR) ** 2) / 2)).sqrt().repeat(2)
    bias *= STRENGTH * (2 / bias.square().mean()).sqrt() * (-1.0) ** torch.arange(len(bias))
    for index, block in enumerate(model.encoder.blocks):
        q, k, _ = block.get_parameter("attention.qkv.bias").view(3, config.heads, head_dim)
        for head in range(config.heads):
            down, right = OFFSETS[(index + head // 4) % 4][head % 4]
            angle = torch.cat([down * frequency, right * frequency])
            q[head] = torch.cat([bias * angle.cos(), bias * angle.sin()])
            k[head] = torch.cat([bias, torch.zeros_like(bias)])


def qk_similar(model: ViT) -> None:
    """Correlate key weights with query weights (0.5), so that tokens attend to similar tokens (arXiv 2305.09828)."""
    for block in model.encoder.blocks:
        q, k, _ = block.get_parameter("attention.qkv.weight").chunk(3)
        k.copy_(0.5 * q + 0.75**0.5 * k)


def whitened_patches(model: ViT, images_NCHW: Tensor, ridge: float = 5e-3) -> None:
    """Whiten the input of the patch projection: patches get identity covariance before a random orthogonal map.

    Neighbouring pixels are nearly equal, so a random projection would mostly respond to brightness.
    """
    P, project = model.config.patch_size, model.patch_embedding.project
    H, W = (side - side % P for side in images_NCHW.shape[2:])
    patches = patchify(images_NCHW[:, :, :H, :W], P).flatten(0, 1).double().cpu()
    eigenvalues, eigenvectors = torch.linalg.eigh(patches.t() @ patches / len(patches))
    whitening = eigenvectors @ torch.diag((eigenvalues + ridge).rsqrt()) @ eigenvectors.t()
    D, E = project.weight.shape
    rotation = torch.linalg.qr(torch.randn(max(D, E), min(D, E), dtype=torch.float64)).Q
    rotation = (rotation if D >= E else rotation.t()) * max(D / E, 1.0) ** 0.5
    project.weight.copy_(rotation @ whitening)
