"""Accuracy under image corruption: five corruptions at five severities.

Corruptions and severities follow arXiv 1903.12261. Severities are relative to the image size, so that results for 28
and 224 pixels are comparable.

Shapes:  N images   C channels   H, W pixels   S corruptions × severities   R resamples
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Generator, Tensor

from vitral.data.lazy_images import Images
from vitral.data.variable_images import VariableSizeImages
from vitral.device.cpu import available_cpus
from vitral.evaluation.bootstrap import Interval, bootstrap, intervals

SEVERITIES: dict[str, tuple[float, ...]] = {
    "noise": (0.04, 0.08, 0.12, 0.18, 0.26),  # standard deviation of Gaussian noise, pixels in [0, 1]
    "blur": (0.01, 0.015, 0.02, 0.03, 0.04),  # standard deviation of a Gaussian, as a share of the shorter side
    "contrast": (0.7, 0.5, 0.35, 0.2, 0.1),  # factor on each pixel's distance from the image mean
    "jpeg": (50, 30, 20, 10, 5),  # quality
    "rotation": (5, 10, 15, 20, 30),  # degrees, in a random direction
}
NUM_CORRUPTIONS = sum(map(len, SEVERITIES.values()))
BATCH_SIZE = 2048  # images converted to float at a time
MOSAIC_SIDE = 16  # small images are compressed as mosaics of 16 × 16
MOSAIC_MAX_PIXELS = 128**2


@dataclass(frozen=True, kw_only=True)
class CorruptionResult:
    """Accuracy under one corruption at its five severities, mildest first."""

    corruption: str
    severities: tuple[float, ...]
    accuracy: tuple[Interval, ...]
    relative_accuracy: Interval  # mean accuracy over the severities, divided by the clean accuracy


@dataclass(frozen=True, kw_only=True)
class Robustness:
    images: int
    clean_accuracy: float  # on the same images without corruption
    relative_accuracy: Interval  # mean over all corruptions
    corruptions: tuple[CorruptionResult, ...]


def measure_robustness(images_NCHW: Images, labels_N: Tensor, predict: Callable[[Images], Tensor]) -> Robustness:
    """Evaluate `predict`, which maps uint8 images to class indices, on clean and corrupted images."""
    correct = [(predict(images_NCHW).cpu() == labels_N.cpu()).float()]
    for corrupted in corrupted_images(images_NCHW):
        correct.append((predict(corrupted).cpu() == labels_N.cpu()).float())
    correct_NS = torch.stack(correct, dim=1)
    num_kinds, N = len(SEVERITIES), len(correct_NS)

    def statistics(counts_RN: Tensor) -> Tensor:
        """Accuracy per corruption and severity, relative accuracy per corruption, overall relative accuracy."""
        accuracy = (counts_RN @ correct_NS).double() / N
        relative = accuracy[:, 1:].unflatten(1, (num_kinds, -1)).mean(dim=2) / accuracy[:, :1].clamp_min(1e-12)
        return torch.cat([accuracy[:, 1:], relative, relative.mean(dim=1, keepdim=True)], dim=1)

    estimates = intervals(statistics(torch.ones(1, N))[0], bootstrap(statistics, N))
    num_severities = len(estimates) // num_kinds - 1
    return Robustness(
        images=N,
        clean_accuracy=correct_NS[:, 0].mean().item(),
        relative_accuracy=estimates[-1],
        corruptions=tuple(
            CorruptionResult(
                corruption=kind,
                severities=severities,
                accuracy=tuple(estimates[index * num_severities : (index + 1) * num_severities]),
                relative_accuracy=estimates[num_kinds * num_severities + index],
            )
            for index, (kind, severities) in enumerate(SEVERITIES.items())
        ),
    )


def corrupted_images(images_NCHW: Images) -> Iterator[Images]:
    """The images under every corruption at every severity."""
    for kind, severities in SEVERITIES.items():
        for severity in severities:
            if isinstance(images_NCHW, VariableSizeImages):
                groups = images_NCHW.group_rows(torch.arange(len(images_NCHW)))
                corrupted = [image for group in images_NCHW.batches(groups) for image in corrupt(group, kind, severity)]
                order = torch.cat(groups).argsort().tolist()
                yield VariableSizeImages.stack([corrupted[position] for position in order])
            else:
                yield corrupt(images_NCHW[:], kind, severity)


def corrupt(images_NCHW: Tensor, kind: str, severity: float, seed: int = 0) -> Tensor:
    """Corrupt uint8 images deterministically."""
    generator = Generator(images_NCHW.device).manual_seed(seed)
    if kind == "jpeg":
        return jpeg_roundtrip(images_NCHW, int(severity))
    batches = []
    for images in images_NCHW.split(BATCH_SIZE):
        x = images.float()
        if kind == "noise":
            x = x + 255 * severity * torch.randn(x.shape, generator=generator, device=x.device)
        elif kind == "blur":
            x = blur(x, severity * min(x.shape[2:]))
        elif kind == "contrast":
            mean = x.mean(dim=(1, 2, 3), keepdim=True)
            x = mean + severity * (x - mean)
        elif kind == "rotation":
            direction = 2 * torch.randint(2, (len(x),), generator=generator, device=x.device) - 1
            x = rotate(x, direction * math.radians(severity))
        else:
            raise ValueError(f"unknown corruption {kind!r}")
        batches.append(x.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(batches)


def blur(images_NCHW: Tensor, std: float) -> Tensor:
    """Gaussian blur with edge padding, as one matrix per axis."""
    rows, columns = (blur_matrix(side, std).to(images_NCHW) for side in images_NCHW.shape[2:])
    return rows @ images_NCHW @ columns.T


def blur_matrix(side: int, std: float) -> Tensor:
    """Weights (side, side) of each input pixel in each output pixel; pixels outside are those of the edge."""
    radius = max(math.ceil(4 * std), 1)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.exp(-offsets.square() / (2 * std**2))
    sources = (torch.arange(side)[:, None] + offsets).clamp(0, side - 1)
    return torch.zeros(side, side).scatter_add_(1, sources, (weights / weights.sum()).expand(side, -1))


def rotate(images_NCHW: Tensor, angles_N: Tensor) -> Tensor:
    """Rotate counter-clockwise about the centre, bilinear, with edge padding."""
    _, _, H, W = images_NCHW.shape
    cos, sin, zero = angles_N.cos(), angles_N.sin(), torch.zeros_like(angles_N)
    x_row = torch.stack([cos, -sin * H / W, zero], dim=1)  # grid_sample coordinates run from -1 to 1 on both axes
    y_row = torch.stack([sin * W / H, cos, zero], dim=1)
    grid = F.affine_grid(torch.stack([x_row, y_row], dim=1), list(images_NCHW.shape), align_corners=False)
    return F.grid_sample(images_NCHW, grid, padding_mode="border", align_corners=False)


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
    padded = F.pad(images_NCHW.cpu().float(), (0, pad_W, 0, pad_H), mode="replicate").to(torch.uint8)
    columns = MOSAIC_SIDE if H * W < MOSAIC_MAX_PIXELS else 1

    def roundtrip(tiles: Tensor) -> Tensor:
        rows = -(-len(tiles) // columns)
        filled = F.pad(tiles, (0, 0, 0, 0, 0, 0, 0, rows * columns - len(tiles)))
        mosaic = filled.unflatten(0, (rows, columns)).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
        picture, file = Image.fromarray(mosaic.squeeze(2).contiguous().numpy()), io.BytesIO()
        picture.save(file, "JPEG", quality=quality, subsampling=0)
        decoded = torch.from_numpy(np.array(Image.open(file))).reshape(rows, H + pad_H, columns, W + pad_W, C)
        return decoded.permute(0, 2, 4, 1, 3).flatten(0, 1)[: len(tiles), :, :H, :W]

    with ThreadPoolExecutor(max_workers=available_cpus()) as pool:  # Pillow releases the GIL
        batches = list(pool.map(roundtrip, padded.split(columns * columns)))
    return torch.cat(batches).to(images_NCHW.device)
