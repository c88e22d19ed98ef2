"""Which augmentations the kernels support, and how closely they match `data.augment` on the current device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Generator

from vitral.data.augment import AugmentConfig, AugmentFn
from vitral.data.autoaugment import AutoAugmentPolicy
from vitral.data.image_ops import OPS, apply_ops
from vitral.data.preprocess import Preprocessing
from vitral.kernels.augment.op import fused_apply_ops
from vitral.kernels.self_check import max_relative_error

AUGMENT_TOLERANCE = 1e-6
COLOR_OPS_TOLERANCE = 3e-3  # interpolated values on a rounding boundary may differ by 1 of 255
OP_ARGS = (  # one argument per operation, chosen so that it changes the image
    0, 0.317, -0.213, 2.37, -1.31, 20.0, 1.3, 0.6, 3, 100, 50, 0, 0, 0, 0.4, 1.7, 2,
)  # fmt: skip


def supports(config: AugmentConfig) -> bool:
    """Whether the configuration uses only shift, flip, colour operations, CutMix and normalisation."""
    geometric = replace(config, policy=AutoAugmentPolicy(), jitter=0.0)
    unsupported = replace(
        geometric, shift=0, flip=False, border="edge", cutmix=0.0, mix_prob=1.0, mix_off_last=0.0, repeat=1
    )
    return unsupported == replace(AugmentConfig(), cutmix_prob=config.cutmix_prob)


def color_ops_error(preprocessing: Preprocessing, device: torch.device) -> float:
    """Largest relative error of the colour operations, with and without cutout centres (jitter has none)."""
    rng = Generator(device).manual_seed(0)
    shape = (len(OPS), *preprocessing.shape)
    images = torch.randint(20, 200, shape, generator=rng, device=device, dtype=torch.uint8)
    ops, args = torch.arange(len(OPS), device=device), torch.tensor(OP_ARGS, device=device)
    centers = torch.rand(2, len(images), generator=rng, device=device)
    return max_relative_error(
        [fused_apply_ops(images, ops, args, centers), fused_apply_ops(images, ops, args, None)],
        [apply_ops(images, ops, args, centers), apply_ops(images, ops, args, None)],
    )


def augment_error(
    augment: AugmentFn, reference: AugmentFn, num_classes: int, preprocessing: Preprocessing, device: torch.device
) -> float:
    """Largest relative error of images and targets on 16 random images, from the same random state."""
    rng = Generator(device).manual_seed(0)
    images = torch.randint(0, 256, (16, *preprocessing.shape), generator=rng, device=device, dtype=torch.uint8)
    labels, rng_state = images[:, 0, 0, 0].long() % num_classes, rng.get_state()
    outputs = augment(images, labels, rng, None)
    expected = reference(images, labels, rng.set_state(rng_state), None)
    return max_relative_error(outputs, [b.to(a.dtype) for a, b in zip(outputs, expected, strict=True)])
