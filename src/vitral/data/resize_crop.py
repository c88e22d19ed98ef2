"""A picture scaled to cover a size, and its middle cut out. torch is imported only where it is needed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from PIL import Image

from vitral.errors import VitralError

MOST_SCALED = 8  # a picture scaled as a whole may have so many times the pixels of the crop
LARGE = 256 * 256  # pixels from which torch is worth importing
MODES = {1: "L", 3: "RGB", 4: "RGBA"}

Size = tuple[int, int]  # height, width


def placed(height: int, width: int, size: Size, crop: float) -> tuple[int, int, int, int]:
    """Height and width that a picture is scaled to, then top and left of the crop in it.

    As timm and torchvision do it: sides are rounded down, the crop's corner to the nearest, halves to even.
    """
    H, W = size
    least_H, least_W = math.floor(H / crop), math.floor(W / crop)
    if least_H * width >= least_W * height:
        scaled = least_H, least_H * width // height
    else:
        scaled = least_W * height // width, least_W
    return *scaled, round((scaled[0] - H) / 2), round((scaled[1] - W) / 2)


def pixels(
    picture: Image.Image, size: Size, channels: int, crop: float, interpolation: str, *, quick: bool = False
) -> np.ndarray[Any, Any]:
    """uint8, C H W: scaled and cropped, not yet normalised.

    `quick` lets torch scale large pictures, in a third of Pillow's time; one value in 400 then differs, by 1.
    """
    height, width = size
    mode = MODES.get(channels)
    if mode is None:
        raise VitralError(
            f"a picture has 1, 3 or 4 channels; this model wants {channels}",
            "give it images as arrays, in Python: Predictor.logits(images)",
        )
    if picture.mode != mode:
        picture = picture.convert(mode)
    scaled_H, scaled_W, top, left = placed(picture.height, picture.width, size, crop)
    filter = Image.Resampling[interpolation.upper()]
    if quick and picture.width * picture.height >= LARGE and scaled_H * scaled_W <= MOST_SCALED * height * width:
        return _scaled_by_torch(picture, (scaled_H, scaled_W), interpolation)[
            :, top : top + height, left : left + width
        ]
    if scaled_H * scaled_W <= MOST_SCALED * height * width:
        scaled = picture.resize((scaled_W, scaled_H), filter)
        array = np.asarray(scaled.crop((left, top, left + width, top + height)))
    else:
        # A strip of 9000×2 pixels, scaled as a whole, would fill the memory: only the crop is computed, which is the
        # same but for rounding.
        down, across = picture.height / scaled_H, picture.width / scaled_W
        box = (left * across, top * down, (left + width) * across, (top + height) * down)
        array = np.asarray(picture.resize((width, height), filter, box=box))
    return array.reshape(height, width, channels).transpose(2, 0, 1)


def _scaled_by_torch(picture: Image.Image, size: Size, interpolation: str) -> np.ndarray[Any, Any]:
    import torch
    import torch.nn.functional as F

    array = np.array(picture).reshape(picture.height, picture.width, -1)
    images = torch.from_numpy(array).permute(2, 0, 1)[None]
    return F.interpolate(images, size=size, mode=interpolation, antialias=True)[0].numpy()
