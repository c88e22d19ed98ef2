"""Resize an image and take the model's window of it (geometry.py). Imports torch only where it is faster."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from vitral.data.geometry import Geometry, Size
from vitral.data.pixels import ChannelImage, PixelFormat, PixelSource, fit_pixel_format

MAX_RESIZE_FACTOR = 8  # the resized image may have this many times the pixels of the crop
TORCH_MIN_PIXELS = 256 * 256  # smaller images are not worth importing torch for
PIL_MODES = {1: "L", 3: "RGB"}  # of photographs, by number of channels


def resize_and_crop(
    image: PixelSource,
    geometry: Geometry,
    channels: int,
    interpolation: str,
    *,
    pad_color: Sequence[float] = (),
    use_torch: bool = False,
    array: np.ndarray[Any, Any] | None = None,
) -> np.ndarray[Any, Any]:
    """Resize, then crop or pad with `pad_color`, to (C, H, W) of the image's type; does not normalise.

    Converts photographs to grey or RGB.

    `use_torch` resizes large photographs with torch, in a third of Pillow's time; about one value in 400 then differs,
    by 1 or 2. `array` is `np.asarray(image)`, for a caller that needs it as well.
    """
    (resized_H, resized_W), top, left, (height, width) = geometry
    if geometry.is_padded:
        content = Geometry(geometry.resized, 0, 0, geometry.resized)
        pixels = resize_and_crop(image, content, channels, interpolation, use_torch=use_torch, array=array)
        return paste_on_canvas(pixels, geometry, pad_color)
    if isinstance(image, Image.Image) and channels not in PIL_MODES:
        image = fit_pixel_format(image, PixelFormat(channels), "the image")
    if isinstance(image, ChannelImage):
        return _resize_channels(image, geometry, interpolation)
    if image.mode != PIL_MODES[channels]:
        image, array = image.convert(PIL_MODES[channels]), None
    fits_memory = resized_H * resized_W <= MAX_RESIZE_FACTOR * height * width
    if use_torch and image.width * image.height >= TORCH_MIN_PIXELS and fits_memory:
        array = np.asarray(image) if array is None else array
        resized = _resize_with_torch(array, (resized_H, resized_W), interpolation)
        return resized[:, top : top + height, left : left + width]
    cropped = resize_with_pillow(image, geometry, interpolation)
    return np.asarray(cropped).reshape(height, width, channels).transpose(2, 0, 1)


def to_array(image: PixelSource, channels: int) -> np.ndarray[Any, Any]:
    """All pixels of a decoded image as (C, H, W); photographs are converted to grey or RGB."""
    if isinstance(image, ChannelImage):
        return image.pixels
    pixels = np.asarray(image.convert(PIL_MODES[channels]))
    return pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1)


def resize_with_pillow(image: Image.Image, geometry: Geometry, interpolation: str) -> Image.Image:
    """Resize an image of any mode and take the window of it."""
    (resized_H, resized_W), top, left, (height, width) = geometry
    resample = Image.Resampling[interpolation.upper()]
    if resized_H * resized_W <= MAX_RESIZE_FACTOR * height * width:
        return image.resize((resized_W, resized_H), resample).crop((left, top, left + width, top + height))
    # Resizing all of a 9000×2 strip would exhaust memory. Compute only the crop; it is equal up to rounding.
    scale_y, scale_x = image.height / resized_H, image.width / resized_W
    box = (left * scale_x, top * scale_y, (left + width) * scale_x, (top + height) * scale_y)
    return image.resize((width, height), resample, box=box)


def _resize_channels(image: ChannelImage, geometry: Geometry, interpolation: str) -> np.ndarray[Any, Any]:
    """Resize each channel by itself: 8-bit values as Pillow resizes photographs, others as floats."""
    is_8_bit = image.dtype == "uint8"
    channels = [Image.fromarray(channel if is_8_bit else channel.astype(np.float32)) for channel in image.pixels]
    resized = np.stack([np.asarray(resize_with_pillow(channel, geometry, interpolation)) for channel in channels])
    return resized.round().clip(0, 65535).astype(np.uint16) if image.dtype == "uint16" else resized


def paste_on_canvas(
    pixels_CHW: np.ndarray[Any, Any], geometry: Geometry, pad_color: Sequence[float]
) -> np.ndarray[Any, Any]:
    """The resized image in the middle of a canvas of `pad_color`, one value per channel."""
    top, left, bottom, right = geometry.content
    canvas = np.empty((len(pixels_CHW), *geometry.window), dtype=pixels_CHW.dtype)
    canvas[:] = np.array(pad_color, dtype=pixels_CHW.dtype)[:, None, None]
    canvas[:, top:bottom, left:right] = pixels_CHW
    return canvas


def write_row(row_CHW: np.ndarray[Any, Any], pixels_Chw: np.ndarray[Any, Any]) -> None:
    """Store an image of another size in the first pixels of each channel of a row (variable_images.py)."""
    channels, height, width = pixels_Chw.shape
    row_CHW.reshape(channels, -1)[:, : height * width] = pixels_Chw.reshape(channels, -1)


def _resize_with_torch(array_HWC: np.ndarray[Any, Any], size: Size, interpolation: str) -> np.ndarray[Any, Any]:
    import torch
    import torch.nn.functional as F

    array_HWC = array_HWC.reshape(*array_HWC.shape[:2], -1)  # grey images have no axis of channels
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the array being read-only
        images = torch.from_numpy(array_HWC).permute(2, 0, 1)[None]
    return F.interpolate(images, size=size, mode=interpolation, antialias=True)[0].numpy()
