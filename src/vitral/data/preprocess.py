"""From any picture to what a model was trained on. Travels with the weights, so that nobody has to remember it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitral.errors import VitralError

MODES = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Scale to cover the crop, cut out the middle, divide by 255, subtract the mean, divide by the deviation."""

    image_size: tuple[int, int]  # height, width
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float = 1.0  # share of the scaled picture's shorter side that is kept
    interpolation: str = "bilinear"

    def pixels(self, picture: Image.Image) -> Tensor:
        """uint8, C H W: scaled and cropped, not yet normalised."""
        height, width = self.image_size
        mode = MODES.get(self.channels)
        if mode is None:
            raise VitralError(f"a picture has 1, 3 or 4 channels; this model wants {self.channels}")
        picture = picture.convert(mode)
        factor = max(height / picture.height, width / picture.width) / self.crop
        size = max(round(picture.width * factor), width), max(round(picture.height * factor), height)
        if picture.size != size:
            picture = picture.resize(size, Image.Resampling[self.interpolation.upper()])
        left, top = (size[0] - width) // 2, (size[1] - height) // 2
        array = np.array(picture.crop((left, top, left + width, top + height)))
        return torch.from_numpy(array.reshape(height, width, self.channels)).permute(2, 0, 1).contiguous()

    def normalise(self, images_BCHW: Tensor) -> Tensor:
        """uint8 in 0…255 → float with mean 0 and deviation 1 over the training set."""
        mean = torch.tensor(self.mean, device=images_BCHW.device).view(1, -1, 1, 1) * 255
        std = torch.tensor(self.std, device=images_BCHW.device).view(1, -1, 1, 1) * 255
        return (images_BCHW.float() - mean) / std


def adapt(images_NCHW: Tensor, preprocessing: Preprocessing) -> Tensor:
    """A set of uint8 images in the size and the channels that a model wants."""
    C = preprocessing.channels
    if images_NCHW.shape[1] != C:
        if {images_NCHW.shape[1], C} != {1, 3}:
            raise VitralError(f"images with {images_NCHW.shape[1]} channels cannot be shown to a model with {C}")
        luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)  # ITU-R 601, as Pillow does
        gray = images_NCHW if C == 3 else (images_NCHW * luma).sum(dim=1, keepdim=True).round().to(torch.uint8)
        images_NCHW = gray.expand(-1, C, -1, -1)
    if tuple(images_NCHW.shape[2:]) == preprocessing.image_size:
        return images_NCHW
    return F.interpolate(images_NCHW, size=preprocessing.image_size, mode="bilinear", antialias=True)


def measure(images_NCHW: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel, of pixels in [0, 1]."""
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images_NCHW.unbind(1)])
    values = torch.arange(256, dtype=torch.float64) / 255
    share = counts.cpu().double() / counts.sum(dim=1, keepdim=True).cpu()
    mean = (share * values).sum(dim=1)
    std = (share * (values - mean[:, None]) ** 2).sum(dim=1).sqrt().clamp_min(1e-4)
    return tuple(round(x, 4) for x in mean.tolist()), tuple(round(x, 4) for x in std.tolist())
