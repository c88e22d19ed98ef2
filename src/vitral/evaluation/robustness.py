"""How much of the accuracy is left when pictures get worse: five damages at five severities.

The kinds and the idea of severities are those of arXiv 1903.12261; the strengths are relative to the image's size, so
that 28 pixels and 224 can both be asked.

Shapes:  N images   C channels   H, W pixels   S kinds × severities   R resamples
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Generator, Tensor

from vitral.evaluation.bootstrap import Interval, bootstrap, intervals

SEVERITIES: dict[str, tuple[float, ...]] = {
    "noise": (0.04, 0.08, 0.12, 0.18, 0.26),  # deviation of Gaussian noise, of pixels in 0 … 1
    "blur": (0.01, 0.015, 0.02, 0.03, 0.04),  # deviation of a Gaussian, of the shorter side
    "contrast": (0.7, 0.5, 0.35, 0.2, 0.1),  # what is left of each image's distance from its mean
    "jpeg": (50, 30, 20, 10, 5),  # quality
    "rotation": (5, 10, 15, 20, 30),  # degrees, left or right
}
WAYS = sum(map(len, SEVERITIES.values()))
TILES = 16  # a side of a mosaic of images that are compressed together


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One kind at its five severities, mildest first."""

    kind: str
    strengths: tuple[float, ...]
    accuracy: tuple[Interval, ...]
    relative: Interval  # mean accuracy over the severities, as a share of the clean accuracy


@dataclass(frozen=True, kw_only=True)
class Robustness:
    images: int
    clean: float  # accuracy on the same images, undamaged
    relative: Interval  # mean over all kinds
    damages: tuple[Damage, ...]


def robustness(images_NCHW: Tensor, labels_N: Tensor, answer: Callable[[Tensor], Tensor]) -> Robustness:
    """`answer` turns uint8 images into class numbers."""
    rights = [(answer(images_NCHW).cpu() == labels_N.cpu()).float()]
    for damaged in all_damaged(images_NCHW):
        rights.append((answer(damaged).cpu() == labels_N.cpu()).float())
    right_NS = torch.stack(rights, dim=1)
    kinds, N = len(SEVERITIES), len(right_NS)

    def figures(counts_RN: Tensor) -> Tensor:
        """Each accuracy, each kind's relative accuracy, the relative accuracy of all."""
        accuracy = (counts_RN @ right_NS).double() / N
        relative = accuracy[:, 1:].unflatten(1, (kinds, -1)).mean(dim=2) / accuracy[:, :1].clamp_min(1e-12)
        return torch.cat([accuracy[:, 1:], relative, relative.mean(dim=1, keepdim=True)], dim=1)

    found = intervals(figures(torch.ones(1, N))[0], bootstrap(figures, N))
    each = len(found) // kinds - 1
    return Robustness(
        images=N,
        clean=right_NS[:, 0].mean().item(),
        relative=found[-1],
        damages=tuple(
            Damage(
                kind=kind,
                strengths=strengths,
                accuracy=tuple(found[index * each : (index + 1) * each]),
                relative=found[kinds * each + index],
            )
            for index, (kind, strengths) in enumerate(SEVERITIES.items())
        ),
    )


def all_damaged(images_NCHW: Tensor) -> Iterator[Tensor]:
    for kind, strengths in SEVERITIES.items():
        for strength in strengths:
            yield damage(images_NCHW, kind, strength)


def damage(images_NCHW: Tensor, kind: str, strength: float, seed: int = 0) -> Tensor:
    """The same images, worse; the same ones each time."""
    draws = Generator(images_NCHW.device).manual_seed(seed)
    if kind == "jpeg":
        return compress(images_NCHW, int(strength))
    pieces = []
    for images in images_NCHW.split(2048):  # as floats they are four times as large
        x = images.float()
        if kind == "noise":
            x = x + 255 * strength * torch.randn(x.shape, generator=draws, device=x.device)
        elif kind == "blur":
            x = blur(x, strength * min(x.shape[2:]))
        elif kind == "contrast":
            mean = x.mean(dim=(1, 2, 3), keepdim=True)
            x = mean + strength * (x - mean)
        elif kind == "rotation":
            side = 2 * torch.randint(2, (len(x),), generator=draws, device=x.device) - 1
            x = rotate(x, side * math.radians(strength))
        else:
            raise ValueError(f"no damage is called {kind!r}")
        pieces.append(x.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(pieces)


def blur(images_NCHW: Tensor, deviation: float) -> Tensor:
    """A Gaussian down and across, each as one matrix; the border's pixels go on outside."""
    down, across = (gaussian(side, deviation).to(images_NCHW) for side in images_NCHW.shape[2:])
    return down @ images_NCHW @ across.T


def gaussian(side: int, deviation: float) -> Tensor:
    """side × side: what each pixel takes from each. What would lie outside is taken from the border."""
    radius = max(math.ceil(4 * deviation), 1)
    places = torch.arange(-radius, radius + 1)
    weights = torch.exp(-places.square() / (2 * deviation**2))
    taken = (torch.arange(side)[:, None] + places).clamp(0, side - 1)
    return torch.zeros(side, side).scatter_add_(1, taken, (weights / weights.sum()).expand(side, -1))


def rotate(images_NCHW: Tensor, angles_N: Tensor) -> Tensor:
    """About the middle, counter-clockwise, bilinear; the border's pixels go on outside."""
    _, _, H, W = images_NCHW.shape
    cos, sin, zero = angles_N.cos(), angles_N.sin(), torch.zeros_like(angles_N)
    across = torch.stack([cos, -sin * H / W, zero], dim=1)  # grid_sample counts each side from -1 to 1
    down = torch.stack([sin * W / H, cos, zero], dim=1)
    grid = F.affine_grid(torch.stack([across, down], dim=1), list(images_NCHW.shape), align_corners=False)
    return F.grid_sample(images_NCHW, grid, padding_mode="border", align_corners=False)


def compress(images_NCHW: Tensor, quality: int) -> Tensor:
    """Through JPEG and back, 4:4:4.

    JPEG works on blocks of 8×8 pixels and fills the last ones by repeating the border. Images filled up like that
    and laid side by side come out as each would by itself, without the cost of a file each.
    """
    N, C, H, W = images_NCHW.shape
    if C not in (1, 3):
        planes = compress(images_NCHW.reshape(N * C, 1, H, W), quality)
        return planes.reshape(N, C, H, W)
    down, across = -H % 8, -W % 8
    edge = F.pad(images_NCHW.cpu().float(), (0, across, 0, down), mode="replicate").to(torch.uint8)
    columns = TILES if H * W < 128**2 else 1

    def through(tiles: Tensor) -> Tensor:
        rows = -(-len(tiles) // columns)
        filled = F.pad(tiles, (0, 0, 0, 0, 0, 0, 0, rows * columns - len(tiles)))
        mosaic = filled.unflatten(0, (rows, columns)).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
        picture, file = Image.fromarray(mosaic.squeeze(2).contiguous().numpy()), io.BytesIO()
        picture.save(file, "JPEG", quality=quality, subsampling=0)
        read = torch.from_numpy(np.array(Image.open(file))).reshape(rows, H + down, columns, W + across, C)
        return read.permute(0, 2, 4, 1, 3).flatten(0, 1)[: len(tiles), :, :H, :W]

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # Pillow lets go of the interpreter meanwhile
        pieces = list(pool.map(through, edge.split(columns * columns)))
    return torch.cat(pieces).to(images_NCHW.device)
