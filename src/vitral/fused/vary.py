"""Shift, mirror, normalise and CutMix in one pass over a batch: a Triton kernel in place of some sixty operations.

The draws are those of `data.augment.varied`, in its order: the same seed gives the same images.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import triton
from torch import Generator, Tensor

from vitral.data.augment import Augment, Examples, Vary, gammas, varied
from vitral.data.preprocess import Preprocessing
from vitral.fused import vary_kernels
from vitral.fused.ahead import launcher
from vitral.fused.trial import Say, largest, reason_against
from vitral.hardware import Hardware

PIXELS = 512  # that a program takes


def vary_of(
    augment: Augment, preprocessing: Preprocessing, classes: int, hardware: Hardware, say: Say = lambda sentence: None
) -> Vary | None:
    """The kernel, if it knows all that this augmentation asks for, and gives here what PyTorch gives."""
    if not known(augment):
        return None
    ours = partial(vary, augment, table(preprocessing, hardware), classes)
    plain = partial(varied, augment, preprocessing, classes)
    if reason := reason_against(partial(difference, ours, plain, classes, preprocessing, hardware), 1e-6):
        say(f"images are varied step by step: {reason}")
    return None if reason else ours


def difference(ours: Vary, plain: Vary, classes: int, preprocessing: Preprocessing, hardware: Hardware) -> float:
    """Between images and targets that two give, for the same draws: the larger of the shares."""
    device, draws = hardware.device, Generator(hardware.device).manual_seed(0)
    images = torch.randint(0, 256, (16, *preprocessing.shape), generator=draws, device=device, dtype=torch.uint8)
    labels, at = images[:, 0, 0, 0].long() % classes, draws.get_state()
    found = ours(images, labels, draws, None)
    wanted = plain(images, labels, draws.set_state(at), None)
    return largest(found, [one.to(same.dtype) for one, same in zip(wanted, found, strict=True)])


def table(preprocessing: Preprocessing, hardware: Hardware) -> Tensor:
    """C 256: what each byte stands for, in the numbers that the model will be computed in."""
    levels = torch.arange(256, dtype=torch.uint8, device=hardware.device).expand(1, preprocessing.channels, 1, -1)
    normalised = preprocessing.normalise(levels)[0, :, 0].contiguous()
    return normalised.bfloat16() if hardware.precision == "bf16" else normalised


def known(augment: Augment) -> bool:
    """Whether it asks for nothing but shift, mirror and CutMix, and for something of that."""
    other = replace(augment, shift=0, flip=False, border="edge", cutmix=0.0, mixed=1.0, unmixed=0.0, repeat=1)
    return other == replace(Augment(), switch=augment.switch) and bool(augment.shift or augment.flip or augment.cutmix)


def vary(
    augment: Augment,
    table_CN: Tensor,
    classes: int,
    images_BCHW: Tensor,
    labels_B: Tensor,
    generator: Generator,
    mixing: Tensor | None = None,
) -> Examples:
    B, C, H, W = images_BCHW.shape
    device, moved, mixed = images_BCHW.device, bool(augment.shift or augment.flip), augment.cutmix > 0
    draw = partial(torch.rand, generator=generator, device=device)
    shifts = flips = coins = pairs = corners = None
    if moved:
        shifts = torch.randint(-augment.shift, augment.shift + 1, (2, B), generator=generator, device=device)
        flips = draw(B, 1) if augment.flip else None
    if mixed:
        coins = draw(2, B)
        pairs, corners = gammas(augment.cutmix, B, generator, device), draw(2, B)
    images = torch.empty(B, C, H, W, device=device, dtype=table_CN.dtype)
    targets = torch.empty(B, classes, device=device)
    launcher(vary_kernels.vary, (B, triton.cdiv(H * W, PIXELS)))(
        images_BCHW.contiguous(), labels_B, table_CN, shifts, flips, coins, pairs, corners, mixing, images, targets,
        H, W, augment.mixed, C=C, K=classes, MOVE=moved, FLIP=flips is not None, MIX=mixed, ASK=mixing is not None,
        BLACK=augment.border == "black", PIXELS=PIXELS, CLASSES=triton.next_power_of_2(classes),
    )  # fmt: skip
    return images, targets
