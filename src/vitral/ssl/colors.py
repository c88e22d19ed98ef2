"""Colour augmentation of whole batches, with one strength per view.

Hue is shifted in HSV as in torchvision. Brightness, contrast and saturation (with greyscale as saturation 0) are affine
in RGB, and they commute: saturation keeps the luma, whose mean contrast blends with, and brightness scales both. They
are therefore one computation, whose result is clipped once. torchvision clips after each of them, in a random order.

Shapes:  B images   V views per image   C channels   h, w pixels
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as in Pillow and torchvision


class ColorDraws(NamedTuple):
    """Strengths for each view, (B, V) each. Factors of 1 and a hue of 0 leave colours unchanged."""

    brightness: Tensor
    contrast: Tensor
    saturation: Tensor  # 0 is greyscale
    hue: Tensor  # fraction of a turn, red → green → blue


def adjust_colors(views_BVChw: Tensor, draws: ColorDraws) -> Tensor:
    """Brightness, contrast and saturation of RGB views, not clipped."""
    brightness, contrast, saturation, _ = _broadcast(draws)
    red, green, blue = views_BVChw.split(1, dim=2)
    luma = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    offset = brightness * (1 - contrast) * luma.mean(dim=(3, 4), keepdim=True)
    gray = offset + brightness * contrast * (1 - saturation) * luma
    return gray + brightness * contrast * saturation * views_BVChw


def adjust_brightness_and_contrast(views_BVChw: Tensor, draws: ColorDraws) -> Tensor:
    """Brightness and contrast of views with any number of channels, each around its own mean, not clipped."""
    brightness, contrast, _, _ = _broadcast(draws)
    mean = views_BVChw.mean(dim=(3, 4), keepdim=True)
    return brightness * (1 - contrast) * mean + brightness * contrast * views_BVChw


def shift_hue(views_BVChw: Tensor, hue_BV: Tensor) -> Tensor:
    """Shift the hue of RGB views in HSV by a fraction of a turn.

    With value v, chroma c and hue H in sixths of a turn, channel n of (red, green, blue) is
    v - c · clip(min(k, 4 - k), 0, 1) where k = (5 - 2n + H) mod 6 (Foley et al., Computer Graphics, chapter 13).
    """
    red, green, blue = views_BVChw.split(1, dim=2)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    is_red, is_green = red == value, green == value
    sector = torch.where(is_red, green - blue, torch.where(is_green, blue - red, red - green))
    sector = sector / chroma.clamp(min=torch.finfo(chroma.dtype).tiny)
    hue = sector + torch.where(is_red, 0.0, torch.where(is_green, 2.0, 4.0)) + 6 * hue_BV[..., None, None, None]
    k = (hue + (5 - 2 * torch.arange(3, device=hue.device).view(3, 1, 1))).remainder_(6)
    return value - torch.minimum(k, 4 - k).clamp_(0, 1).mul_(chroma)


def solarize(views_BVChw: Tensor, is_solarized_BV: Tensor, scale: float) -> Tensor:
    """Invert the values of at least half of `scale`, as Pillow's `solarize` with its default threshold of 128."""
    is_inverted = is_solarized_BV[..., None, None, None] & (views_BVChw >= scale / 2)
    return torch.where(is_inverted, scale - views_BVChw, views_BVChw)


def _broadcast(draws: ColorDraws) -> tuple[Tensor, ...]:
    """(B, V, 1, 1, 1) each."""
    return tuple(strength[..., None, None, None] for strength in draws)
