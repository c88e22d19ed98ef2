"""Images as arrays for figures: RGB conversion, patches, heatmap overlays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from PIL import Image
from torch import Tensor

from vitral.data.lazy_images import Images
from vitral.data.pixels import display_pixels
from vitral.explain import METHODS, rescale_for_display
from vitral.inference.predictor import Predictor
from vitral.reporting.figures.style import Array
from vitral.utils.atomic import atomic_writer

if TYPE_CHECKING:
    from matplotlib.axes import Axes


ROLLOUT_BATCH = 64  # images
MIN_MOSAIC_SIDE = 420  # small images are enlarged to this, so that a gap can be thinner than an image pixel


def to_rgb(image_CHW: Tensor) -> Array:
    """An image as uint8 (H, W, 3): greyscale is repeated, of more channels than three the first ones are shown."""
    shown = display_pixels(image_CHW.cpu().numpy())
    return np.stack([shown] * 3, axis=-1) if shown.ndim == 2 else shown


def draw_image(axes: Axes, image_HW3: Array) -> None:
    axes.imshow(image_HW3, interpolation="nearest", extent=(0, 1, 0, image_HW3.shape[0] / image_HW3.shape[1]))


def save_image(image_CHW: Tensor, path: Path) -> Path:
    """Save a photograph in the format of the suffix, anything else as a .npy array (C, H, W)."""
    with atomic_writer(path) as file:
        if path.suffix == ".npy":
            np.save(file, image_CHW.cpu().numpy())
            return path
        pixels = image_CHW.permute(1, 2, 0).squeeze(-1).cpu().numpy()
        Image.fromarray(pixels).save(file, format=path.suffix.removeprefix("."))
    return path


def patch_mosaic(image_HW3: Array, patch_size: int, margin: int = 0) -> Array:
    """The image cut into its patches, with white gaps between them and without the margin that no patch covers."""
    H, W, _ = image_HW3.shape
    covered = image_HW3[margin : H - margin, margin : W - margin]
    H, W, _ = covered.shape
    scale = max(-(-MIN_MOSAIC_SIDE // min(H, W)), 1)
    P = patch_size * scale
    gap = max(P // 7, 2)
    rows, columns = H // patch_size, W // patch_size
    enlarged = covered.repeat(scale, axis=0).repeat(scale, axis=1)
    mosaic: Array = np.full((rows * (P + gap) - gap, columns * (P + gap) - gap, 3), 255, dtype=np.uint8)
    for row in range(rows):
        for column in range(columns):
            top, left = row * (P + gap), column * (P + gap)
            mosaic[top : top + P, left : left + P] = enlarged[row * P : (row + 1) * P, column * P : (column + 1) * P]
    return mosaic


def rollout_heatmaps(predictor: Predictor, images_NCHW: Images) -> list[Array]:
    """Attention rollout of each image, scaled to [0, 1]: (H, W)."""
    preprocessing, heatmaps = predictor.model_config.preprocessing, list[Array]()
    for batch in images_NCHW.split(ROLLOUT_BATCH):
        images = preprocessing.normalise(batch.to(predictor.hardware.device))
        heatmaps.extend(rescale_for_display(METHODS["rollout"](predictor.model, images)).cpu().numpy())
    return heatmaps


def overlay_heatmap(image_HW3: Array, heatmap_HW: Array) -> Array:
    """A heatmap in [0, 1] over a uint8 image, as uint8 (H, W, 3)."""
    blended = blend_light(image_HW3 / 255, colormaps["inferno"](0.85 * heatmap_HW), heatmap_HW)
    return (blended * 255).round().astype(np.uint8)


def blend_light(pixels_HW3: Array, colours_HW4: Array, strength_HW: Array) -> Array:
    """Darken the image and add colours as light, so that the image stays visible under them. All values in [0, 1]."""
    glow = colours_HW4[..., :3] * (1.5 * strength_HW[..., None]).clip(0, 1)
    blended: Array = 1 - (1 - 0.6 * pixels_HW3) * (1 - 0.9 * glow)
    return blended
