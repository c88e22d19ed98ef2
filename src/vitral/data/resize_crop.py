"""Resize an image to cover a size and take the central crop. Imports torch only where it is faster."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from PIL import Image

from vitral.data.pixels import ChannelImage, PixelFormat, PixelSource, fit_pixel_format

MAX_RESIZE_FACTOR = 8  # the resized image may have this many times the pixels of the crop
TORCH_MIN_PIXELS = 256 * 256  # smaller images are not worth importing torch for
PIL_MODES = {1: "L", 3: "RGB"}  # of photographs, by number of channels

Size = tuple[int, int]  # height, width


def resize_crop_geometry(height: int, width: int, size: Size, crop: float) -> tuple[int, int, int, int]:
    """Height and width to resize an image to, then top and left of the crop of `size` in it.

    Rounds as timm and torchvision do: sides down, the corner of the crop to the nearest integer, halves to even.
    """
    H, W = size
    min_H, min_W = math.floor(H / crop), math.floor(W / crop)
    is_wide = min_H * width >= min_W * height  # wider than the target
    resized_H = min_H if is_wide else min_W * height // width
    resized_W = min_H * width // height if is_wide else min_W
    return resized_H, resized_W, round((resized_H - H) / 2), round((resized_W - W) / 2)


def resize_and_crop(
    image: PixelSource, size: Size, channels: int, crop: float, interpolation: str, *, use_torch: bool = False
) -> np.ndarray[Any, Any]:
    """Resize and crop to (C, H, W), of the image's type; does not normalise. Converts photographs to grey or RGB.

    `use_torch` resizes large photographs with torch, in a third of Pillow's time; about one value in 400 then differs
    by 1.
    """
    height, width = size
    if isinstance(image, Image.Image) and channels not in PIL_MODES:
        image = fit_pixel_format(image, PixelFormat(channels), "the image")
    if isinstance(image, ChannelImage):
        return _resize_channels(image, size, crop, interpolation)
    if image.mode != PIL_MODES[channels]:
        image = image.convert(PIL_MODES[channels])
    resized_H, resized_W, top, left = resize_crop_geometry(image.height, image.width, size, crop)
    fits_memory = resized_H * resized_W <= MAX_RESIZE_FACTOR * height * width
    if use_torch and image.width * image.height >= TORCH_MIN_PIXELS and fits_memory:
        resized = _resize_with_torch(image, (resized_H, resized_W), interpolation)
        return resized[:, top : top + height, left : left + width]
    cropped = resize_with_pillow(image, size, crop, interpolation)
    return np.asarray(cropped).reshape(height, width, channels).transpose(2, 0, 1)


def to_array(image: PixelSource, channels: int) -> np.ndarray[Any, Any]:
    """All pixels of a decoded image as (C, H, W); photographs are converted to grey or RGB."""
    if isinstance(image, ChannelImage):
        return image.pixels
    pixels = np.asarray(image.convert(PIL_MODES[channels]))
    return pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1)


def resize_with_pillow(image: Image.Image, size: Size, crop: float, interpolation: str) -> Image.Image:
    """Resize an image of any mode to cover `size` and take the central crop."""
    height, width = size
    resized_H, resized_W, top, left = resize_crop_geometry(image.height, image.width, size, crop)
    resample = Image.Resampling[interpolation.upper()]
    if resized_H * resized_W <= MAX_RESIZE_FACTOR * height * width:
        return image.resize((resized_W, resized_H), resample).crop((left, top, left + width, top + height))
    # Resizing all of a 9000×2 strip would exhaust memory. Compute only the crop; it is equal up to rounding.
    scale_y, scale_x = image.height / resized_H, image.width / resized_W
    box = (left * scale_x, top * scale_y, (left + width) * scale_x, (top + height) * scale_y)
    return image.resize((width, height), resample, box=box)


def _resize_channels(image: ChannelImage, size: Size, crop: float, interpolation: str) -> np.ndarray[Any, Any]:
    """Resize each channel by itself: 8-bit values as Pillow resizes photographs, others as floats."""
    is_8_bit = image.dtype == "uint8"
    channels = [Image.fromarray(channel if is_8_bit else channel.astype(np.float32)) for channel in image.pixels]
    resized = np.stack([np.asarray(resize_with_pillow(channel, size, crop, interpolation)) for channel in channels])
    return resized.round().clip(0, 65535).astype(np.uint16) if image.dtype == "uint16" else resized


def _resize_with_torch(image: Image.Image, size: Size, interpolation: str) -> np.ndarray[Any, Any]:
    import torch
    import torch.nn.functional as F

    array = np.array(image).reshape(image.height, image.width, -1)
    images = torch.from_numpy(array).permute(2, 0, 1)[None]
    return F.interpolate(images, size=size, mode=interpolation, antialias=True)[0].numpy()
