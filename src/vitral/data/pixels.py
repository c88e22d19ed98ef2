"""Pixel formats: how many channels an image has and what type its values are. Does not import torch.

Photographs are 8-bit grey or RGB and stay Pillow images. Everything else (more channels, 16 bits, floats) is a
`ChannelImage`, an array (C, H, W):

    uint8      8-bit values; 0 to 255 are scaled to [0, 1]
    uint16     16-bit values, kept as they are; 0 to 65535 are scaled to [0, 1]
    float32    floats and signed integers, as they are; not scaled

Neither channels nor types are converted into each other, except 8-bit grey into RGB and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from PIL import Image

from vitral.errors import VitralError
from vitral.utils.text import count_text

PixelType = Literal["uint8", "uint16", "float32"]
PixelTypeOption = Literal["auto", "uint8", "uint16", "float32"]
ArrayLayout = Literal["auto", "chw", "hwc"]
PIXEL_TYPES: tuple[PixelType, ...] = get_args(PixelType)
ARRAY_LAYOUTS: tuple[ArrayLayout, ...] = get_args(ArrayLayout)
PIXEL_SCALES: dict[PixelType, float] = {"uint8": 255.0, "uint16": 65535.0, "float32": 1.0}  # divide pixels by
TYPE_NAMES: dict[PixelType, str] = {"uint8": "8-bit", "uint16": "16-bit", "float32": "float"}
SUPPORTED_FORMATS = "Supported formats: JPEG, PNG, WebP, BMP, GIF, TIFF and NumPy's .npy"
MAX_CHANNELS = 1024
MAX_PIXELS = 100_000_000  # larger images could exhaust memory when decoded
MAX_BYTES = 3 * MAX_PIXELS  # of all channels together, as many as the largest RGB image has
TOO_LARGE_HINT = f"Resize the image to at most {MAX_PIXELS // 10**6} megapixels and {MAX_BYTES // 10**6} MB"
LAYOUT_HINT = "Set --data.layout chw (channels, height, width) or hwc (height, width, channels)"

Array = np.ndarray[Any, Any]


class ImageDecodeError(VitralError):
    """The file or value is not an image, or it is corrupt, too large or of another pixel format."""

    def __init__(self, what: str, hint: str = SUPPORTED_FORMATS) -> None:
        super().__init__(what, hint)


class ImageTooLargeError(ImageDecodeError):
    """The image has more than `MAX_PIXELS` pixels or `MAX_BYTES` bytes."""

    def __init__(self, what: str) -> None:
        super().__init__(what, TOO_LARGE_HINT)


class PixelFormat(NamedTuple):
    """Channels and type of the pixels that a model expects."""

    channels: int
    dtype: PixelType = "uint8"
    layout: ArrayLayout = "auto"  # of arrays whose shape does not tell
    names: tuple[str, ...] = ()  # of the channels, in order, if known

    @property
    def is_photo(self) -> bool:
        """8-bit grey or RGB, which Pillow decodes."""
        return self.channels in (1, 3) and self.dtype == "uint8"

    def __str__(self) -> str:
        return describe_pixels(self.channels, self.dtype)


class ChannelImage:
    """An image (C, H, W) of type uint8, uint16 or float32. `names` are those of its channels, if known."""

    def __init__(self, pixels_CHW: Array, names: Sequence[str] = ()) -> None:
        self.pixels, self.names = pixels_CHW, tuple(names)

    @property
    def channels(self) -> int:
        return len(self.pixels)

    @property
    def dtype(self) -> PixelType:
        return self.pixels.dtype.name

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, in Pillow's order."""
        return self.width, self.height

    @property
    def height(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def width(self) -> int:
        return int(self.pixels.shape[2])

    def to_display(self) -> Image.Image:
        """An 8-bit image to look at: the first three channels as RGB, or the first channel."""
        return Image.fromarray(display_pixels(self.pixels))


def check_pixel_fields(group: str, dtype: str, layout: str) -> None:
    """Raise ValueError for values that are not among the choices."""
    for name, value, choices in (("dtype", dtype, PIXEL_TYPES), ("layout", layout, ARRAY_LAYOUTS)):
        if value not in choices:
            raise ValueError(f"{group}.{name} must be one of {', '.join(choices)}, got {value!r}")


PixelSource = Image.Image | ChannelImage  # a decoded image


def describe_pixels(channels: int, dtype: PixelType) -> str:
    """`5 channels, 16-bit`."""
    return f"{count_text(channels, 'channel')}, {TYPE_NAMES[dtype]}"


def to_display(image: PixelSource) -> Image.Image:
    return image.to_display() if isinstance(image, ChannelImage) else image


def display_pixels(pixels_CHW: Array) -> Array:
    """uint8 (H, W) or (H, W, 3): the first channel, or the first three if there are at least three.

    8-bit values are shown as they are, others stretched from their minimum to their maximum in the channels shown.
    """
    shown = pixels_CHW[:3] if len(pixels_CHW) >= 3 else pixels_CHW[:1]
    if shown.dtype != np.uint8:
        values = shown.astype(np.float64)
        low, high = values.min(), values.max()
        shown = ((values - low) * (255 / (high - low) if high > low else 0)).round().astype(np.uint8)
    return shown[0] if len(shown) == 1 else np.ascontiguousarray(shown.transpose(1, 2, 0))


def display_note(channels: int, dtype: PixelType) -> str | None:
    """What a picture of such an image shows, for captions; None for photographs."""
    if PixelFormat(channels, dtype).is_photo:
        return None
    shown = "channels 1, 2 and 3 as red, green and blue" if channels >= 3 else "channel 1"
    shown += f" of {channels}" if channels not in (1, 3) else ""
    return shown + ("" if dtype == "uint8" else ", stretched to the range of the image")


def to_pixel_type(pixels: Array, name: str) -> Array:
    """An array as uint8, uint16 or float32. Signed and 32-bit integers become floats of the same value."""
    if pixels.dtype.kind == "b":
        return pixels.astype(np.uint8) * np.uint8(255)
    if pixels.dtype.kind not in "uif":
        raise ImageDecodeError(f"{name}: values of type {pixels.dtype} are not pixels", "Save integers or floats")
    if pixels.dtype.name in ("uint8", "uint16"):
        return np.asarray(pixels, dtype=pixels.dtype.newbyteorder("="))
    with np.errstate(over="ignore"):
        values: Array = pixels.astype(np.float32)
    if not np.isfinite(values).all():
        raise ImageDecodeError(
            f"{name}: NaN, infinite or too large values for float32", "Replace them, for example by the channel's mean"
        )
    return values


def channel_axis(
    shape: tuple[int, ...], name: str, channels: int | None = None, layout: ArrayLayout = "auto"
) -> int | None:
    """Axis of the channels, 0 or 2; None for (H, W). Refuses shapes that can be read in both ways.

    If `channels` is given, the axis of that length. Otherwise an axis less than half as long as both others.
    """
    text = "×".join(map(str, shape))
    if len(shape) not in (2, 3) or 0 in shape:
        raise ImageDecodeError(
            f"{name}: an array of shape {text} is not an image", "Expected (C, H, W), (H, W, C) or (H, W)"
        )
    if len(shape) == 2:
        return None
    if layout != "auto":
        return 0 if layout == "chw" else 2
    if channels is not None and [axis for axis in (0, 2) if shape[axis] == channels] in ([0], [2]):
        return 0 if shape[0] == channels else 2
    others = {0: min(shape[1:]), 2: min(shape[:2])}
    short = [axis for axis in (0, 2) if 2 * shape[axis] <= others[axis]]
    if len(short) != 1 or (channels is not None and shape[0] == shape[2] == channels):
        raise ImageDecodeError(f"{name}: the channel axis of an array of shape {text} is ambiguous", LAYOUT_HINT)
    return short[0]


def to_channels_first(
    pixels: Array, name: str, channels: int | None = None, layout: ArrayLayout = "auto"
) -> ChannelImage:
    """A ChannelImage from an array (H, W), (C, H, W) or (H, W, C)."""
    axis = channel_axis(pixels.shape, name, channels, layout)
    pixels = pixels[None] if axis is None else np.moveaxis(pixels, axis, 0)
    if len(pixels) > MAX_CHANNELS:
        raise ImageDecodeError(
            f"{name}: {len(pixels):,} channels, more than the limit of {MAX_CHANNELS:,}", LAYOUT_HINT
        )
    return ChannelImage(np.ascontiguousarray(to_pixel_type(pixels, name)))


def fit_pixel_format(image: PixelSource, expected: PixelFormat, name: str) -> PixelSource:
    """The image in the expected format, or an error that names both formats. Converts only 8-bit grey and RGB."""
    if isinstance(image, Image.Image):
        if expected.is_photo:
            return image
        pixels = np.asarray(image)
        image = ChannelImage(pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    if image.dtype == expected.dtype == "uint8" and expected.is_photo and image.channels in (1, 3):
        pixels = image.pixels
        return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    if image.channels != expected.channels:
        raise ImageDecodeError(
            f"{name}: {_count(image.channels)}; the model expects {expected.channels}",
            "Pass images with the channels the model was trained on",
        )
    if image.dtype != expected.dtype:
        raise ImageDecodeError(
            f"{name}: {TYPE_NAMES[image.dtype]} values; the model expects {TYPE_NAMES[expected.dtype]} values",
            f"Pass images as the model was trained on, {expected}",
        )
    if image.names and expected.names and image.names != expected.names:
        raise ImageDecodeError(
            f"{name}: the channels are {', '.join(image.names)}; the model expects {', '.join(expected.names)}",
            "Write the channels in the order of the training images",
        )
    return image


def _count(channels: int) -> str:
    return count_text(channels, "channel")
