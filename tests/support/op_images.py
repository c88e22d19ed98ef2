"""Images for tests of image operations, and conversion to and from Pillow."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def smooth_images(B: int = 6, C: int = 3, H: int = 37, W: int = 52) -> Tensor:
    """uint8 (B, C, H, W): blurred noise with different value ranges and histogram gaps; the last one is flat."""
    random = np.random.default_rng(0)
    images = []
    for index in range(B):
        small = random.integers(0, 256, (H // 4, W // 4, C), dtype=np.uint8)
        large = [np.asarray(Image.fromarray(small[..., c]).resize((W, H), Image.Resampling.BICUBIC)) for c in range(C)]
        low, high = (0, 255) if index == 0 else sorted(random.integers(0, 256, 2))
        images.append(torch.from_numpy(np.stack(large) * ((high - low) / 255) + low).to(torch.uint8))
    images[-1].fill_(77)
    return torch.stack(images)


def to_pil(image_CHW: Tensor) -> Image.Image:
    array = image_CHW.permute(1, 2, 0).numpy()
    return Image.fromarray(array if array.shape[2] == 3 else array[..., 0])


def from_pil(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).reshape(image.height, image.width, -1).permute(2, 0, 1)
