"""Test-time augmentation (TTA): average the logits over several views of an image."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from vitral.data.lazy_images import Images
from vitral.data.variable_images import map_batches
from vitral.recipes.options import TTA

TTA_DESCRIPTIONS: dict[TTA, str] = {
    "none": "",
    "flip": "logits averaged over the image and its mirror image",
    "three": "logits averaged over three views: shifted by one pixel along a diagonal",
    "six": "logits averaged over six views: mirrored, and shifted by one pixel along a diagonal",
    "ten": "logits averaged over ten views: mirrored, and shifted by one pixel along both diagonals",
}
BATCH_SIZE = 2048


def tta_logits(forward: Callable[[Images], Tensor], images_NCHW: Images, tta: TTA) -> Tensor:
    """Logits (N, K) of `forward`, averaged over the views of each image."""
    if tta == "none":
        return forward(images_NCHW)
    return map_batches(images_NCHW, lambda images: _average_views(forward, images, tta), BATCH_SIZE)


def _average_views(forward: Callable[[Images], Tensor], images_NCHW: Tensor, tta: TTA) -> Tensor:
    """The unshifted image has twice the weight of a shifted one."""

    def with_mirror(images: Tensor) -> Tensor:
        return forward(images) if tta == "three" else (forward(images) + forward(images.flip(-1))) / 2

    if tta == "flip":
        return with_mirror(images_NCHW)
    H, W = images_NCHW.shape[2:]
    padded = F.pad(images_NCHW.float(), (1, 1, 1, 1), mode="replicate").to(images_NCHW.dtype)
    corners = [(0, 0), (2, 2), *([(0, 2), (2, 0)] if tta == "ten" else [])]
    shifted = sum(with_mirror(padded[:, :, top : top + H, left : left + W]) for top, left in corners)
    return (2 * with_mirror(images_NCHW) + shifted) / (2 + len(corners))
