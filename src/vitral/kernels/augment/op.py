"""Shift, mirror, normalise and CutMix in one pass over a batch: a Triton kernel in place of some sixty operations.
RandAugment's operations, TrivialAugment's and colour jitter are another pass each, in place of some two hundred.

The draws are those of `data.augment.varied`, in its order: the same seed gives the same images.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch
import triton
from torch import Generator, Tensor

from vitral.data.augment import Augment, Examples, Vary, gammas, varied
from vitral.data.autoaugment import OPERATIONS, Policy, apply
from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.kernels.augment import autoaugment_kernel as policy_kernels
from vitral.kernels.augment import kernel as vary_kernels
from vitral.kernels.precompile import launcher
from vitral.kernels.self_check import Say, largest, reason_against

PIXELS = 512  # that a program takes at once
SELDOM = 3e-3  # by what share values may be off that were rounded up here and down there: some of them, by 1 of 255
TRIED = (  # an argument of each operation
    0, 0.317, -0.213, 2.37, -1.31, 20.0, 1.3, 0.6, 3, 100, 50, 0, 0, 0, 0.4, 1.7, 2,
)  # fmt: skip


def vary_of(
    augment: Augment, preprocessing: Preprocessing, classes: int, hardware: Hardware, say: Say = lambda sentence: None
) -> Vary | None:
    """The kernels, as far as they know what this augmentation asks for, and give here what PyTorch gives."""
    plain = partial(varied, augment, preprocessing, classes)
    if augment.coloured:
        if reason := reason_against_operate(preprocessing, hardware):
            say(f"images' colours are varied step by step: {reason}")
            return None
        plain = partial(plain, operate=operate)  # what is rounded the other way once may become much more later
    if not known(augment):
        return plain if augment.coloured else None
    ours = partial(vary, augment, table(preprocessing, hardware), classes)
    if reason := reason_against(partial(difference, ours, plain, classes, preprocessing, hardware), 1e-6):
        say(f"images are varied step by step: {reason}")
        return plain if augment.coloured else None
    return ours


def reason_against_operate(preprocessing: Preprocessing, hardware: Hardware) -> str:
    if preprocessing.channels not in (1, 3):
        return "its kernels know images of one or three channels"
    return reason_against(partial(apart, preprocessing, hardware), SELDOM)


def apart(preprocessing: Preprocessing, hardware: Hardware) -> float:
    """By how much the kernel's operations, each with an argument that changes something, differ from PyTorch's."""
    device, draws = hardware.device, Generator(hardware.device).manual_seed(0)
    pixels = (len(OPERATIONS), *preprocessing.shape)
    images = torch.randint(20, 200, pixels, generator=draws, device=device, dtype=torch.uint8)
    asked = torch.arange(len(OPERATIONS), device=device), torch.tensor(TRIED, device=device)
    place = torch.rand(2, len(images), generator=draws, device=device)
    places = (place, None)  # for jitter, which has none, another kernel is compiled
    found, wanted = ([how(images, *asked, place) for place in places] for how in (operate, apply))
    return largest(found, wanted)


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


@cache
def unchanged(channels: int, device: torch.device) -> Tensor:
    """C 256: each byte stands for itself. It stays: a recorded step reads it where it is."""
    return torch.arange(256, dtype=torch.uint8, device=device).expand(channels, -1).contiguous()


def known(augment: Augment) -> bool:
    """Whether it asks for nothing but shift, mirror, colours and CutMix; normalising alone is one pass, too."""
    gray = replace(augment, policy=Policy(), jitter=0.0)
    other = replace(gray, shift=0, flip=False, border="edge", cutmix=0.0, mixed=1.0, unmixed=0.0, repeat=1)
    return other == replace(Augment(), switch=augment.switch)


def vary(
    augment: Augment,
    table_CN: Tensor,
    classes: int,
    images_BCHW: Tensor,
    labels_B: Tensor,
    generator: Generator,
    mixing: Tensor | None = None,
) -> Examples:
    if augment.coloured:
        if augment.shift or augment.flip:
            still = replace(augment, cutmix=0.0, policy=Policy(), jitter=0.0)
            levels_CN = unchanged(len(table_CN), images_BCHW.device)
            images_BCHW, _ = vary(still, levels_CN, classes, images_BCHW, labels_B, generator)
        images_BCHW = augment.colour(images_BCHW, generator, operate)
        augment = replace(augment, shift=0, flip=False)
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


def operate(images_BCHW: Tensor, operation_B: Tensor, argument_B: Tensor, place_2B: Tensor | None = None) -> Tensor:
    """What `data.policy.apply` does, in one pass."""
    B, C, H, W = images_BCHW.shape
    images, result = images_BCHW.contiguous(), torch.empty_like(images_BCHW, memory_format=torch.contiguous_format)
    tables = torch.empty(B, C, 256, dtype=torch.uint8, device=images.device)
    launcher(policy_kernels.operate, (B,))(
        images, operation_B, argument_B.contiguous(), place_2B, tables, result, H, W,
        C=C, CUT=place_2B is not None, PIXELS=PIXELS, enable_fp_fusion=False,
    )  # fmt: skip
    return result
