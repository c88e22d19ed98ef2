"""Preprocessing: from an image to model input. Saved with the weights, so that inference repeats what training did.

16-bit images are torch.uint16 in memory, half the size of int32. Few torch operations support it, so batches become
fp32 after they are gathered, which holds 16-bit integers exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, get_args, overload

import numpy as np
import torch
from torch import Tensor

from vitral.data.decode import decode_pixels
from vitral.data.geometry import Geometry, Resize, Size, input_geometry, mean_color
from vitral.data.lazy_images import Images, LazyImages, MappedImages, iter_sample
from vitral.data.pixels import PIXEL_SCALES, ArrayLayout, PixelFormat, PixelSource, PixelType, check_pixel_fields
from vitral.data.resize_crop import resize_and_crop
from vitral.data.variable_images import PaddedImages, VariableSizeImages, map_batches, resize_pixels
from vitral.errors import VitralError

MAX_IMAGE_SIDE = 2**14  # pixels: an image of this size has 800 MB
MAX_PADDED_BYTES_IN_MEMORY = 2**30  # larger sets are padded on access
MAX_STATS_BYTES = 2**30  # channel statistics of larger sets are computed from evenly spaced images
TORCH_DTYPES: dict[PixelType, torch.dtype] = {
    "uint8": torch.uint8, "uint16": torch.uint16, "float32": torch.float32
}  # fmt: skip
Interpolation = Literal["bilinear", "bicubic"]


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Resize (geometry.py), scale to [0, 1], subtract the mean, divide by the std."""

    image_size: tuple[int, int]  # height, width
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 1.0  # fraction of the resized image's shorter side that the crop keeps
    interpolation: Interpolation = "bilinear"
    # Not in the repr, which is part of the fingerprint of sequences: those of older runs stay the same.
    dtype: PixelType = field(default="uint8", repr=False)  # integers are scaled to [0, 1], floats are not
    layout: ArrayLayout = field(default="auto", repr=False)  # of arrays whose shape does not tell
    channel_names: tuple[str, ...] = field(default=(), repr=False)  # in order, if known
    resize: Resize = field(default="crop", repr=False)
    patch_size: int = field(default=1, repr=False)  # native inputs are whole patches, at most those of `image_size`

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
        check_pixel_fields("preprocessing", self.dtype, self.layout)
        if self.channel_names and len(self.channel_names) != self.channels:
            names = ", ".join(self.channel_names)
            raise ValueError(f"preprocessing.channel_names must be {self.channels} names, got {names}")
        if self.resize not in get_args(Resize):
            choices = ", ".join(get_args(Resize))
            raise ValueError(f"preprocessing.resize must be one of {choices}, got {self.resize!r}")
        if not 1 <= self.patch_size <= min(self.image_size):
            raise ValueError(f"preprocessing.patch_size must fit image_size {self.image_size}, got {self.patch_size}")

    @property
    def pixel_format(self) -> PixelFormat:
        """Channels and type of the pixels."""
        return PixelFormat(self.channels, self.dtype, self.layout, self.channel_names)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of images in memory. Normalised images are fp32 in any case."""
        return TORCH_DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of one image before normalisation."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def pixel_scale(self) -> float:
        """The value that is 1 after scaling: 255 for 8-bit images."""
        return PIXEL_SCALES[self.dtype]

    @property
    def pad_color(self) -> tuple[float, ...]:
        """The colour of padding: the mean, in the units of the pixels."""
        return mean_color(self.mean, self.dtype)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the model input."""
        return self.channels, *self.image_size

    @property
    def resize_description(self) -> str:
        """The resizing in a few words, for reports."""
        height, width = self.image_size
        patches = (height // self.patch_size) * (width // self.patch_size)
        return {
            "crop": f"crop: the central {self.crop:.1%} of the shorter side" if self.crop < 1 else "crop: the centre",
            "pad": "pad: the whole image, padded with the mean colour",
            "stretch": "stretch: the whole image, without its aspect ratio",
            "native": f"native: the whole image with its aspect ratio, at most {patches} patches",
        }[self.resize]

    @property
    def has_variable_sizes(self) -> bool:
        """Whether resized images differ in size before they are padded."""
        return self.resize in ("pad", "native")

    def geometry(self, height: int, width: int) -> Geometry:
        """How an image of this size is resized and cropped or padded."""
        return input_geometry(height, width, self.image_size, self.resize, crop=self.crop, patch_size=self.patch_size)

    def load(self, source: object, name: str | None = None) -> Tensor:
        """Decode and resize one image (see `decode_image`): pixels (C, H, W), not normalised."""
        return self.resize_and_crop(decode_pixels(source, self.pixel_format, name=name))

    def resize_and_crop(self, image: PixelSource) -> Tensor:
        """Resize and crop or pad to (C, H, W), of type uint8 for photographs; does not normalise."""
        geometry = self.geometry(image.height, image.width)
        array = resize_and_crop(image, geometry, self.channels, self.interpolation, pad_color=self.pad_color)
        return torch.from_numpy(np.array(array, order="C"))

    def resize_to(self, image: PixelSource, size: Size) -> Tensor:
        """Resize to (C, H, W) of exactly this size, for images that are cropped or padded later."""
        array = resize_and_crop(image, Geometry(size, 0, 0, size), self.channels, self.interpolation)
        return torch.from_numpy(np.array(array, order="C"))

    def pad_for_roundtrip(self, image_CHW: Tensor) -> Tensor:
        """Pad by reflection so that `resize_and_crop` of the padded image returns exactly these pixels.

        For saving model inputs as image files. Without a crop it is the image itself; native sizes may be resized by
        one patch.
        """
        if self.resize != "crop":
            return image_CHW
        H, W = image_CHW.shape[1:]
        height, width = math.floor(H / self.crop), math.floor(W / self.crop)
        _, top, left, _ = self.geometry(height, width)
        padding = ((0, 0), (top, height - H - top), (left, width - W - left))
        return torch.from_numpy(np.pad(image_CHW.cpu().numpy(), padding, mode="symmetric"))

    def normalise(self, images_BCHW: Tensor) -> Tensor:
        """Pixels (uint8 in [0, 255]) → fp32 with mean 0 and std 1 over the training set."""
        mean, std = self.mean_and_std(images_BCHW.device)
        return (images_BCHW.float() - mean) / std

    def normalise_(self, images_BCHW: Tensor) -> Tensor:
        """`normalise`, but fp32 images are overwritten: a batch in new memory costs as much as the arithmetic."""
        mean, std = self.mean_and_std(images_BCHW.device)
        return images_BCHW.float().sub_(mean).div_(std)

    def mean_and_std(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(1, C, 1, 1) each, in units of the pixels: the constants of `normalise`."""
        mean, std = (_channel_constants(values, self.pixel_scale, device) for values in (self.mean, self.std))
        return mean, std


@cache
def _channel_constants(values: tuple[float, ...], scale: float, device: torch.device) -> Tensor:
    """(1, C, 1, 1), in units of the pixels. Cached, because a CUDA graph capture must not copy from the host."""
    return torch.tensor(values, device=device).view(1, -1, 1, 1) * scale


@overload
def to_model_input(images_NCHW: Tensor, preprocessing: Preprocessing) -> Tensor: ...
@overload
def to_model_input(images_NCHW: Images, preprocessing: Preprocessing) -> Images: ...
def to_model_input(images_NCHW: Images, preprocessing: Preprocessing) -> Images:
    """Convert images to the size and channels of the model, as `Preprocessing.resize_and_crop` does."""
    check_image_type(images_NCHW, preprocessing)
    if isinstance(images_NCHW, VariableSizeImages):  # resized already
        if preprocessing.resize == "native":
            return images_NCHW
        padded = PaddedImages(images_NCHW, preprocessing.image_size, preprocessing.pad_color)
        num_bytes = len(padded) * preprocessing.num_bytes
        return padded[:] if num_bytes <= MAX_PADDED_BYTES_IN_MEMORY else padded
    if isinstance(images_NCHW, LazyImages):
        window = preprocessing.geometry(*images_NCHW.shape[2:]).window
        shape = (preprocessing.channels, *window)
        return MappedImages(images_NCHW, lambda images: to_model_input(images, preprocessing), shape)
    C = preprocessing.channels
    if images_NCHW.shape[1] != C:
        if {images_NCHW.shape[1], C} != {1, 3} or preprocessing.dtype != "uint8":
            raise VitralError(
                f"images with {images_NCHW.shape[1]} channels cannot be converted for a model with {C}",
                "Only 8-bit grey (1 channel) and RGB (3 channels) images can be converted into each other",
            )
        luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)  # ITU-R 601, as in Pillow
        gray = images_NCHW if C == 3 else (images_NCHW * luma).sum(dim=1, keepdim=True).round().to(torch.uint8)
        images_NCHW = gray.expand(-1, C, -1, -1)
    geometry = preprocessing.geometry(*images_NCHW.shape[2:])
    if geometry.resized != tuple(images_NCHW.shape[2:]):
        images_NCHW = resize_pixels(images_NCHW, geometry.resized, preprocessing.interpolation)
    if geometry.is_padded:
        return pad_images(images_NCHW, geometry, preprocessing.pad_color)
    (H, W), top, left = geometry.window, geometry.top, geometry.left
    return images_NCHW[:, :, top : top + H, left : left + W]


def resize_on_access(images: Images, preprocessing: Preprocessing) -> Images:
    """`to_model_input` of each batch when it is read, because a set in memory may not fit at its new size.

    Images of variable sizes stay as they are. So does a tensor with the right shape; with other channels it is
    converted at once.
    """
    if isinstance(images, VariableSizeImages) or tuple(images.shape[1:]) == preprocessing.shape:
        return images
    if isinstance(images, Tensor) and tuple(images.shape[2:]) == preprocessing.image_size:
        return to_model_input(images, preprocessing)
    return MappedImages(images, lambda batch: to_model_input(batch, preprocessing), preprocessing.shape)


def to_model_channels(images: Images, preprocessing: Preprocessing) -> Images:
    """Convert images to the channels of the model and keep their size."""
    if isinstance(images, VariableSizeImages):  # read with these channels
        return images
    size = (images.shape[2], images.shape[3])
    return resize_on_access(images, replace(preprocessing, image_size=size, crop=1.0, resize="crop", patch_size=1))


def to_one_size(images: Images, preprocessing: Preprocessing) -> Tensor:
    """All images in memory at `image_size`; native inputs of other sizes are stretched.

    For tools that need images of one size, such as benchmarks.
    """
    if not isinstance(images, VariableSizeImages):
        return images[:]
    stretched = replace(preprocessing, resize="stretch")
    return map_batches(images, lambda batch: to_model_input(batch, stretched), batch_size=64)


def pad_images(images_NCHW: Tensor, geometry: Geometry, pad_color: tuple[float, ...]) -> Tensor:
    """Resized images in the middle of a canvas of `pad_color`."""
    top, left, bottom, right = geometry.content
    color = torch.tensor(pad_color, device=images_NCHW.device).to(images_NCHW.dtype).view(1, -1, 1, 1)
    canvas = color.expand(len(images_NCHW), -1, *geometry.window).clone()
    canvas[:, :, top:bottom, left:right] = images_NCHW
    return canvas


def check_image_type(images_NCHW: Images, preprocessing: Preprocessing) -> None:
    """Refuse images in memory of another type than the model's: their values would be scaled wrongly."""
    if images_NCHW.dtype != preprocessing.torch_dtype:
        raise VitralError(
            f"expected images of type {preprocessing.dtype}, got {str(images_NCHW.dtype).removeprefix('torch.')}",
            f"The model was trained on images with {preprocessing.pixel_format}",
        )


def channel_stats(images_NCHW: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel: for integers scaled to [0, 1], for floats as they are."""
    if images_NCHW.dtype == torch.float32:
        mean, std = _float_stats(images_NCHW)
        std = std.where(std > 0, 1.0)  # a constant channel stays zero after subtracting the mean
        return _round(mean, 6), _round(std, 6)
    scale = 255 if images_NCHW.dtype == torch.uint8 else 65535
    counts = torch.zeros(images_NCHW.shape[1], scale + 1, dtype=torch.float64)
    for batch in iter_sample(images_NCHW, MAX_STATS_BYTES):
        channels = (batch if scale == 255 else batch.int()).unbind(1)  # torch.bincount does not support uint16
        counts += torch.stack([torch.bincount(channel.flatten(), minlength=scale + 1) for channel in channels]).cpu()
    values = torch.arange(scale + 1, dtype=torch.float64) / scale
    frequency = counts / counts.sum(dim=1, keepdim=True)
    mean = (frequency * values).sum(dim=1)
    std = (frequency * (values - mean[:, None]) ** 2).sum(dim=1).sqrt()
    if scale == 255:
        std = std.clamp_min(1e-4)
        return tuple(round(x, 4) for x in mean.tolist()), tuple(round(x, 4) for x in std.tolist())
    return _round(mean, 6), _round(std.clamp_min(1 / scale), 6)  # sensors often use a small part of 16 bits


def _float_stats(images_NCHW: Images) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation in fp64, merged over batches (Chan et al. 1979)."""
    count, mean, squares = 0, torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for batch in iter_sample(images_NCHW, MAX_STATS_BYTES):
        values = batch.double().transpose(0, 1).flatten(1)
        batch_mean = values.mean(dim=1)
        difference, total = batch_mean - mean, count + values.shape[1]
        squares = squares + ((values - batch_mean[:, None]) ** 2).sum(dim=1)
        squares = squares + difference**2 * (count * values.shape[1] / total)
        mean, count = mean + difference * (values.shape[1] / total), total
    return mean.cpu(), (squares / count).sqrt().cpu()


def _round(values: Tensor, digits: int) -> tuple[float, ...]:
    """Round to significant digits."""
    return tuple(float(f"{value:.{digits}g}") for value in values.tolist())
