"""Several looks at one image, whose answers are averaged (test-time augmentation)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.lazy_images import Pixels

Views = Literal["one", "flip", "three", "six", "ten"]
VIEWS: dict[Views, str] = {
    "one": "",
    "flip": "answers averaged over the image and its mirror image",
    "three": "answers averaged over three views: moved by a pixel along the diagonal",
    "six": "answers averaged over six views: mirrored, and moved by a pixel along the diagonal",
    "ten": "answers averaged over ten views: mirrored, and moved by a pixel along both diagonals",
}


def answers(ask: Callable[[Pixels], Tensor], images_NCHW: Pixels, views: Views) -> Tensor:
    """What `ask` says, N K, averaged over the views of each image."""
    if views == "one":
        return ask(images_NCHW)
    return torch.cat([_averaged(ask, images, views) for images in images_NCHW.split(2048)])


def _averaged(ask: Callable[[Tensor], Tensor], images_NCHW: Tensor, views: Views) -> Tensor:
    """In place counts as much as two moves."""

    def seen(images: Tensor) -> Tensor:
        return ask(images) if views == "three" else (ask(images) + ask(images.flip(-1))) / 2

    if views == "flip":
        return seen(images_NCHW)
    H, W = images_NCHW.shape[2:]
    wide = F.pad(images_NCHW.float(), (1, 1, 1, 1), mode="replicate").to(images_NCHW.dtype)
    corners = [(0, 0), (2, 2), *([(0, 2), (2, 0)] if views == "ten" else [])]
    moved = sum(seen(wide[:, :, top : top + H, left : left + W]) for top, left in corners)
    return (2 * seen(images_NCHW) + moved) / (2 + len(corners))
