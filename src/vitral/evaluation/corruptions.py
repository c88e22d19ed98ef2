"""Image corruptions: noise, blur, low contrast, JPEG artefacts and rotation, at five severities each.

Corruptions and severities follow arXiv 1903.12261. Severities are relative to the image size, so that results for 28
and 224 pixels are comparable.

Shapes:  N images   B images of a batch   C channels   H, W pixels
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Generator, Tensor

from vitral.inference.parallel_batches import parallel_map

SEVERITIES: dict[str, tuple[float, ...]] = {
    "noise": (0.04, 0.08, 0.12, 0.18, 0.26),  # standard deviation of Gaussian noise, pixels in [0, 1]
    "blur": (0.01, 0.015, 0.02, 0.03, 0.04),  # standard deviation of a Gaussian, as a share of the shorter side
    "contrast": (0.7, 0.5, 0.35, 0.2, 0.1),  # factor on each pixel's distance from the image mean
    "jpeg": (50, 30, 20, 10, 5),  # quality
    "rotation": (5, 10, 15, 20, 30),  # degrees, in a random direction
}
CORRUPTIONS = tuple((kind, severity) for kind, severities in SEVERITIES.items() for severity in severities)
MOSAIC_SIDE = 16  # small images are compressed as mosaics of 16 × 16
MOSAIC_MAX_PIXELS = 128**2
CHUNK_VALUES = 2**19  # of the images that are corrupted at a time: 2 MiB, which a core's caches hold
BLUR_BLOCK = 56  # rows of a matrix
LARGE_IMAGE_BATCH = 16  # that the caches hold; a multiple of 16, because torch draws normal numbers in groups of 16
SEED = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class CorruptionInput:
    """uint8 images, and the random numbers that all severities of a corruption share."""

    images: Tensor  # (B, C, H, W)
    noise: Tensor  # (B, C, H, W), standard normal
    direction: Tensor  # (B,) of the rotation, 1 or -1

    def corrupt(self, kind: str, severity: float) -> Tensor:
        """The images (B, C, H, W) under a corruption, uint8."""
        if kind == "jpeg":
            return jpeg_roundtrip(self.images, int(severity))
        size = max(CHUNK_VALUES // self.images[0].numel(), 1)
        chunks = zip(*(tensor.split(size) for tensor in (self.images, self.noise, self.direction)), strict=True)
        return torch.cat([_corrupt(kind, severity, *chunk) for chunk in chunks])


def _corrupt(kind: str, severity: float, images: Tensor, noise: Tensor, direction: Tensor) -> Tensor:
    x = images.float()
    if kind == "noise":
        x += 255 * severity * noise
    elif kind == "blur":
        x = blur(x, severity * min(x.shape[2:]))
    elif kind == "contrast":
        mean = x.mean(dim=(1, 2, 3), keepdim=True)
        x = x.sub_(mean).mul_(severity).add_(mean)
    elif kind == "rotation":
        x = rotate(x, direction * math.radians(severity))
    else:
        raise ValueError(f"unknown corruption {kind!r}")
    return x.round_().clamp_(0, 255).to(torch.uint8)


def corruption_batch_size(height: int, width: int) -> int:
    """Images to corrupt at a time: a mosaic of small ones."""
    return MOSAIC_SIDE**2 if height * width < MOSAIC_MAX_PIXELS else LARGE_IMAGE_BATCH


def corruption_inputs(images_NCHW: Tensor, batch_size: int | None = None) -> Iterator[CorruptionInput]:
    """The images in batches with their random numbers, which do not depend on the batch size, a multiple of 16."""
    device = images_NCHW.device
    noise_generator, direction_generator = (Generator(device).manual_seed(SEED) for _ in range(2))
    for images in images_NCHW.split(batch_size or corruption_batch_size(*images_NCHW.shape[2:])):
        yield CorruptionInput(
            images=images,
            noise=torch.randn(images.shape, generator=noise_generator, device=device),
            direction=2 * torch.randint(2, (len(images),), generator=direction_generator, device=device) - 1,
        )


def corrupt(images_NCHW: Tensor, kind: str, severity: float) -> Tensor:
    """Corrupt uint8 images deterministically."""
    return torch.cat([inputs.corrupt(kind, severity) for inputs in corruption_inputs(images_NCHW)])


def blur(images_NCHW: Tensor, std: float) -> Tensor:
    """Gaussian blur with edge padding, along one axis after the other."""
    rows, columns = (blur_blocks(side, std) for side in images_NCHW.shape[2:])
    x = torch.cat([weights.to(images_NCHW) @ images_NCHW[:, :, sources] for sources, weights in rows], dim=2)
    return torch.cat([x[..., sources] @ weights.T.to(x) for sources, weights in columns], dim=3)


@lru_cache(maxsize=16)
def blur_blocks(side: int, std: float) -> tuple[tuple[slice, Tensor], ...]:
    """Rows of `blur_matrix`, a few at a time, with the input pixels that they depend on: the others have no weight."""
    matrix = blur_matrix(side, std)
    blocks = []
    for rows in matrix.split(BLUR_BLOCK):
        sources = rows.any(dim=0).nonzero()
        used = slice(int(sources[0]), int(sources[-1]) + 1)
        blocks.append((used, rows[:, used]))
    return tuple(blocks)


def blur_matrix(side: int, std: float) -> Tensor:
    """Weights (side, side) of each input pixel in each output pixel; pixels outside are those of the edge."""
    radius = max(math.ceil(4 * std), 1)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.exp(-offsets.square() / (2 * std**2))
    sources = (torch.arange(side)[:, None] + offsets).clamp(0, side - 1)
    return torch.zeros(side, side).scatter_add_(1, sources, (weights / weights.sum()).expand(side, -1))


def rotate(images_NCHW: Tensor, angles_N: Tensor) -> Tensor:
    """Rotate counter-clockwise about the centre, bilinear, with edge padding."""
    size = (*images_NCHW.shape[2:], images_NCHW.dtype)
    grid = torch.stack([rotation_grid(angle, *size) for angle in angles_N.tolist()]).to(images_NCHW.device)
    return F.grid_sample(images_NCHW, grid, padding_mode="border", align_corners=False)


@lru_cache(maxsize=16)
def rotation_grid(angle: float, height: int, width: int, dtype: torch.dtype) -> Tensor:
    """Coordinates (H, W, 2) from -1 to 1 of the source of each pixel."""
    cos, sin = (function(torch.tensor(angle, dtype=dtype)) for function in (torch.cos, torch.sin))
    zero = torch.zeros_like(cos)
    x_row, y_row = torch.stack([cos, -sin * height / width, zero]), torch.stack([sin * width / height, cos, zero])
    return F.affine_grid(torch.stack([x_row, y_row])[None], [1, 1, height, width], align_corners=False)[0]


def jpeg_roundtrip(images_NCHW: Tensor, quality: int) -> Tensor:
    """Compress with JPEG (4:4:4) and decode.

    JPEG works on blocks of 8×8 pixels and pads the last ones with edge pixels. Images padded like that and tiled into
    a mosaic give the same result as separate files, at a fraction of the cost.
    """
    N, C, H, W = images_NCHW.shape
    if C not in (1, 3):
        planes = jpeg_roundtrip(images_NCHW.reshape(N * C, 1, H, W), quality)
        return planes.reshape(N, C, H, W)
    pad_H, pad_W = -H % 8, -W % 8
    padded = images_NCHW.cpu()
    if pad_H or pad_W:
        padded = F.pad(padded.float(), (0, pad_W, 0, pad_H), mode="replicate").to(torch.uint8)
    columns = MOSAIC_SIDE if H * W < MOSAIC_MAX_PIXELS else 1

    def roundtrip(tiles: Tensor) -> Tensor:
        rows = -(-len(tiles) // columns)
        filled = F.pad(tiles, (0, 0, 0, 0, 0, 0, 0, rows * columns - len(tiles)))
        mosaic = filled.unflatten(0, (rows, columns)).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
        picture, file = Image.fromarray(mosaic.squeeze(2).contiguous().numpy()), io.BytesIO()
        picture.save(file, "JPEG", quality=quality, subsampling=0)
        decoded = torch.from_numpy(np.array(Image.open(file))).reshape(rows, H + pad_H, columns, W + pad_W, C)
        return decoded.permute(0, 2, 4, 1, 3).flatten(0, 1)[: len(tiles), :, :H, :W]

    batches = list(parallel_map(roundtrip, padded.split(columns * columns)))  # Pillow releases the GIL
    return torch.cat(batches).to(images_NCHW.device)
