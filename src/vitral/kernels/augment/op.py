"""Shift, flip, normalisation and CutMix in one pass over the batch, instead of about sixty operations.

Each operation of RandAugment, TrivialAugment and colour jitter is one more pass, instead of about two hundred.
Random numbers are drawn as in `data.augment.augment_batch`, in the same order: the same seed gives the same images.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch
import triton
from torch import Generator, Tensor

from vitral.data.augment import AugmentConfig, Batch, sample_gammas
from vitral.data.autoaugment import AutoAugmentPolicy
from vitral.data.preprocess import Preprocessing
from vitral.kernels.augment.autoaugment_kernel import apply_ops_kernel
from vitral.kernels.augment.kernel import augment_kernel
from vitral.kernels.precompile import launch

BLOCK_PIXELS = 512


def fused_augment(
    config: AugmentConfig,
    table_CN: Tensor,
    num_classes: int,
    images_BCHW: Tensor,
    labels_B: Tensor,
    rng: Generator,
    mix_enabled: Tensor | None = None,
) -> Batch:
    """uint8 images (B, C, H, W) and labels (B,) to normalised images and soft targets (B, K).

    `table_CN` (C, 256) maps bytes to normalised values; see `normalization_table`. Labels (B, K) are targets already
    and are mixed with the weights that the kernel gives the images.
    """
    if labels_B.ndim == 2:
        positions_B = torch.arange(len(labels_B), device=labels_B.device)
        images, weights_BB = fused_augment(config, table_CN, len(labels_B), images_BCHW, positions_B, rng, mix_enabled)
        own_weight_B1 = weights_BB.diagonal()[:, None]
        return images, torch.lerp(labels_B.roll(1, 0), labels_B, own_weight_B1)
    if config.has_color_ops:
        if config.shift or config.flip:
            geometric = replace(config, cutmix=0.0, policy=AutoAugmentPolicy(), jitter=0.0)
            identity_CN = identity_table(len(table_CN), images_BCHW.device)
            images_BCHW, _ = fused_augment(geometric, identity_CN, num_classes, images_BCHW, labels_B, rng)
        images_BCHW = config.color_transform(images_BCHW, rng, fused_apply_ops)
        config = replace(config, shift=0, flip=False)
    B, C, H, W = images_BCHW.shape
    device, moves, uses_cutmix = images_BCHW.device, bool(config.shift or config.flip), config.cutmix > 0
    rand = partial(torch.rand, generator=rng, device=device)
    shifts = flips = coins = gammas = corners = None
    if moves:
        shifts = torch.randint(-config.shift, config.shift + 1, (2, B), generator=rng, device=device)
        flips = rand(B, 1) if config.flip else None
    if uses_cutmix:
        coins = rand(2, B)
        gammas, corners = sample_gammas(config.cutmix, B, rng, device), rand(2, B)
    out = torch.empty(B, C, H, W, device=device, dtype=table_CN.dtype)
    targets = torch.empty(B, num_classes, device=device)
    launch(augment_kernel, (B, triton.cdiv(H * W, BLOCK_PIXELS)))(
        images_BCHW.contiguous(), labels_B, table_CN, shifts, flips, coins, gammas, corners, mix_enabled, out, targets,
        H, W, config.mix_prob, C=C, NUM_CLASSES=num_classes, SHIFT=moves, FLIP=flips is not None, CUTMIX=uses_cutmix,
        HAS_MIX_FLAG=mix_enabled is not None, BLACK_BORDER=config.border == "black", BLOCK_PIXELS=BLOCK_PIXELS,
        BLOCK_CLASSES=triton.next_power_of_2(num_classes),
    )  # fmt: skip
    return out, targets


def fused_apply_ops(images_BCHW: Tensor, ops_B: Tensor, args_B: Tensor, centers_2B: Tensor | None = None) -> Tensor:
    """`data.image_ops.apply_ops` in one launch: one operation per image, uint8 to uint8."""
    B, C, H, W = images_BCHW.shape
    images, out = images_BCHW.contiguous(), torch.empty_like(images_BCHW, memory_format=torch.contiguous_format)
    tables = torch.empty(B, C, 256, dtype=torch.uint8, device=images.device)
    launch(apply_ops_kernel, (B,))(
        images, ops_B, args_B.contiguous(), centers_2B, tables, out, H, W,
        C=C, HAS_CENTERS=centers_2B is not None, BLOCK_PIXELS=BLOCK_PIXELS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def normalization_table(preprocessing: Preprocessing, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(C, 256): the normalised value of each byte."""
    levels = torch.arange(256, dtype=torch.uint8, device=device).expand(1, preprocessing.channels, 1, -1)
    return preprocessing.normalise(levels)[0, :, 0].contiguous().to(dtype)


@cache
def identity_table(channels: int, device: torch.device) -> Tensor:
    """(C, 256) uint8: every byte maps to itself. Cached because a captured CUDA graph keeps its address."""
    return torch.arange(256, dtype=torch.uint8, device=device).expand(channels, -1).contiguous()
