"""Preprocessing: from an image to model input. Saved with the weights, so that inference repeats what training did."""

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

from vitral.data.lazy_images import Images, LazyImages, MappedImages, iter_sample
from vitral.data.resize_crop import resize_and_crop, resize_crop_geometry
from vitral.errors import VitralError

MAX_IMAGE_SIDE = 2**14  # pixels: an image of this size has 800 MB
MAX_STATS_BYTES = 2**30  # channel statistics of larger sets are computed from evenly spaced images
Interpolation = Literal["bilinear", "bicubic"]


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Resize to cover the crop, crop the centre, scale to [0, 1], subtract the mean, divide by the std."""

    image_size: tuple[int, int]  # height, width
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 1.0  # fraction of the resized image's shorter side that the crop keeps
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        if not 1 <= min(self.image_size) <= max(self.image_size) <= MAX_IMAGE_SIDE:
            raise ValueError(
                f"preprocessing.image_size must be from 1 to {MAX_IMAGE_SIDE:,} pixels, got {self.image_size}"
            )
        for name in ("mean", "std"):
            if len(getattr(self, name)) != self.channels:
                raise ValueError(
                    f"preprocessing.{name} needs {self.channels} values, one per channel, got {getattr(self, name)}"
                )
        if not all(map(math.isfinite, self.mean)):
            raise ValueError(f"preprocessing.mean must be finite, got {self.mean}")
        if not all(0 < value < math.inf for value in self.std):
            raise ValueError(f"preprocessing.std must be above 0 and finite, got {self.std}")
        if not 0 < self.crop <= 1:
            raise ValueError(f"preprocessing.crop must be above 0 and at most 1, got {self.crop}")
        if self.interpolation not in get_args(Interpolation):
            choices = ", ".join(get_args(Interpolation))
            raise ValueError(f"preprocessing.interpolation must be one of {choices}, got {self.interpolation!r}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the model input."""
        return self.channels, *self.image_size

    def resize_crop_geometry(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Height and width to resize an image to, then top and left of the crop in it."""
        return resize_crop_geometry(height, width, self.image_size, self.crop)

    def resize_and_crop(self, image: Image.Image) -> Tensor:
        """Resize and crop to uint8 (C, H, W); does not normalise."""
        array = resize_and_crop(image, self.image_size, self.channels, self.crop, self.interpolation)
        return torch.from_numpy(np.array(array, order="C"))

    def pad_for_roundtrip(self, image_CHW: Tensor) -> Tensor:
        """Pad by reflection so that `resize_and_crop` of the padded image returns exactly these pixels.

        For saving model inputs as image files.
        """
        H, W = image_CHW.shape[1:]
        height, width = math.floor(H / self.crop), math.floor(W / self.crop)
        top, left = self.resize_crop_geometry(height, width)[2:]
        padding = ((0, 0), (top, height - H - top), (left, width - W - left))
        return torch.from_numpy(np.pad(image_CHW.cpu().numpy(), padding, mode="symmetric"))

    def normalise(self, images_BCHW: Tensor) -> Tensor:
        """uint8 in [0, 255] → fp32 with mean 0 and std 1 over the training set."""
        mean, std = _channel_constants(self.mean, images_BCHW.device), _channel_constants(self.std, images_BCHW.device)
        return (images_BCHW.float() - mean) / std


@cache
def _channel_constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """(1, C, 1, 1), in units of 0…255. Cached, because a CUDA graph capture must not copy from the host."""
    return torch.tensor(values, device=device).view(1, -1, 1, 1) * 255


@overload
def to_model_input(images_NCHW: Tensor, preprocessing: Preprocessing) -> Tensor: ...
@overload
def to_model_input(images_NCHW: Images, preprocessing: Preprocessing) -> Images: ...
def to_model_input(images_NCHW: Images, preprocessing: Preprocessing) -> Images:
    """Convert uint8 images to the size and channels of the model, as `Preprocessing.resize_and_crop` does."""
    if isinstance(images_NCHW, LazyImages):
        return MappedImages(images_NCHW, lambda images: to_model_input(images, preprocessing), preprocessing.shape)
    C = preprocessing.channels
    if images_NCHW.shape[1] != C:
        if {images_NCHW.shape[1], C} != {1, 3}:
            raise VitralError(
                f"images with {images_NCHW.shape[1]} channels cannot be converted for a model with {C}",
                "Only grey (1 channel) and RGB (3 channels) images can be converted into each other",
            )
        luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)  # ITU-R 601, as in Pillow
        gray = images_NCHW if C == 3 else (images_NCHW * luma).sum(dim=1, keepdim=True).round().to(torch.uint8)
        images_NCHW = gray.expand(-1, C, -1, -1)
    *resized, top, left = preprocessing.resize_crop_geometry(*images_NCHW.shape[2:])
    if resized != list(images_NCHW.shape[2:]):
        images_NCHW = F.interpolate(images_NCHW, size=resized, mode=preprocessing.interpolation, antialias=True)
    H, W = preprocessing.image_size
    return images_NCHW[:, :, top : top + H, left : left + W]


def channel_stats(images_NCHW: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, for pixels scaled to [0, 1]."""
    counts = torch.zeros(images_NCHW.shape[1], 256, dtype=torch.float64)
    for batch in iter_sample(images_NCHW, MAX_STATS_BYTES):
        counts += torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in batch.unbind(1)]).cpu()
    values = torch.arange(256, dtype=torch.float64) / 255
    frequency = counts / counts.sum(dim=1, keepdim=True)
    mean = (frequency * values).sum(dim=1)
    std = (frequency * (values - mean[:, None]) ** 2).sum(dim=1).sqrt().clamp_min(1e-4)
    return tuple(round(x, 4) for x in mean.tolist()), tuple(round(x, 4) for x in std.tolist())
