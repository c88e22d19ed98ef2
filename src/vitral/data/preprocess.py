"""From any picture to what a model was trained on. Travels with the weights, so that nobody has to remember it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args, overload

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitral.data import resize_crop as scale
from vitral.data.lazy_images import Adapted, Images, Pixels, some_of
from vitral.errors import VitralError

MOST_MEASURED = 2**30  # bytes that mean and deviation are taken from; of larger sets, evenly spaced images
Interpolation = Literal["bilinear", "bicubic"]


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Scale to cover the crop, cut out the middle, divide by 255, subtract the mean, divide by the deviation."""

    image_size: tuple[int, int]  # height, width
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 1.0  # share of the scaled picture's shorter side that is kept
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        if min(self.image_size) < 1:
            raise ValueError(f"preprocessing.image_size must be at least 1×1, not {self.image_size}")
        for name in ("mean", "std"):
            if len(getattr(self, name)) != self.channels:
                raise ValueError(
                    f"preprocessing.{name} needs {self.channels} values, one a channel, not {getattr(self, name)}"
                )
        if not min(self.std) > 0:
            raise ValueError(f"preprocessing.std must be above 0, not {self.std}")
        if not 0 < self.crop <= 1:
            raise ValueError(f"preprocessing.crop must be above 0 and at most 1, not {self.crop}")
        if self.interpolation not in get_args(Interpolation):
            known = ", ".join(get_args(Interpolation))
            raise ValueError(f"preprocessing.interpolation must be one of {known}, not {self.interpolation!r}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """C H W of what a model sees."""
        return self.channels, *self.image_size

    def placed(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Height and width that a picture is scaled to, then top and left of the crop in it."""
        return scale.placed(height, width, self.image_size, self.crop)

    def pixels(self, picture: Image.Image) -> Tensor:
        """uint8, C H W: scaled and cropped, not yet normalised."""
        array = scale.pixels(picture, self.image_size, self.channels, self.crop, self.interpolation)
        return torch.from_numpy(np.array(array, order="C"))

    def framed(self, image_CHW: Tensor) -> Tensor:
        """With a mirrored rim, of which scaling and cropping leave these very pixels: as a file for others to open."""
        H, W = image_CHW.shape[1:]
        height, width = math.floor(H / self.crop), math.floor(W / self.crop)
        top, left = self.placed(height, width)[2:]
        rim = ((0, 0), (top, height - H - top), (left, width - W - left))
        return torch.from_numpy(np.pad(image_CHW.cpu().numpy(), rim, mode="symmetric"))

    def normalise(self, images_BCHW: Tensor) -> Tensor:
        """uint8 in 0…255 → float with mean 0 and deviation 1 over the training set."""
        mean, std = _levels(self.mean, images_BCHW.device), _levels(self.std, images_BCHW.device)
        return (images_BCHW.float() - mean) / std


@cache
def _levels(shares: tuple[float, ...], device: torch.device) -> Tensor:
    """Made once: a recorded training step may not copy from the CPU."""
    return torch.tensor(shares, device=device).view(1, -1, 1, 1) * 255


@overload
def adapt(images_NCHW: Tensor, preprocessing: Preprocessing) -> Tensor: ...
@overload
def adapt(images_NCHW: Pixels, preprocessing: Preprocessing) -> Pixels: ...
def adapt(images_NCHW: Pixels, preprocessing: Preprocessing) -> Pixels:
    """A set of uint8 images in the size and the channels that a model wants: as `Preprocessing.pixels` makes them."""
    if isinstance(images_NCHW, Images):
        return Adapted(images_NCHW, lambda images: adapt(images, preprocessing), preprocessing.shape)
    C = preprocessing.channels
    if images_NCHW.shape[1] != C:
        if {images_NCHW.shape[1], C} != {1, 3}:
            raise VitralError(
                f"images with {images_NCHW.shape[1]} channels cannot be shown to a model with {C}",
                "gray and colour can be made from each other; no other channels",
            )
        luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)  # ITU-R 601, as Pillow does
        gray = images_NCHW if C == 3 else (images_NCHW * luma).sum(dim=1, keepdim=True).round().to(torch.uint8)
        images_NCHW = gray.expand(-1, C, -1, -1)
    *scaled, top, left = preprocessing.placed(*images_NCHW.shape[2:])
    if scaled != list(images_NCHW.shape[2:]):
        images_NCHW = F.interpolate(images_NCHW, size=scaled, mode=preprocessing.interpolation, antialias=True)
    H, W = preprocessing.image_size
    return images_NCHW[:, :, top : top + H, left : left + W]


def measure(images_NCHW: Pixels) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel, of pixels in [0, 1]."""
    counts = torch.zeros(images_NCHW.shape[1], 256, dtype=torch.float64)
    for part in some_of(images_NCHW, MOST_MEASURED):
        counts += torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in part.unbind(1)]).cpu()
    values = torch.arange(256, dtype=torch.float64) / 255
    share = counts / counts.sum(dim=1, keepdim=True)
    mean = (share * values).sum(dim=1)
    std = (share * (values - mean[:, None]) ** 2).sum(dim=1).sqrt().clamp_min(1e-4)
    return tuple(round(x, 4) for x in mean.tolist()), tuple(round(x, 4) for x in std.tolist())
