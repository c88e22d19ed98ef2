"""The same picture twice: equal bytes, or resized, recompressed, brightened or slightly cropped copies.

    files ─▶ thumbnails ─▶ signatures ─▶ close pairs ─▶ their thumbnails laid over each other ─▶ groups

A signature is how much brighter it gets to the right and downwards, in an 8×8 grid: 128 numbers of length 1, so that
one product of matrices compares everybody with everybody. Close pairs are then laid over each other, cropped and
shifted a little, and are copies where they correlate. Measured on the 397 JPEGs of hymenoptera (78,606 pairs of
different photographs): none is taken for a copy. Found: halved, enlarged, JPEG quality 20 and 50: all; 15 % brighter:
all; 5 % cropped off: all; 10 %: two thirds. Mirrored, rotated and black-and-white copies are not looked for.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitral.data.decode import NotAnImage, decode

SIDE = 32  # of a thumbnail
CLOSE = 0.72  # product of two signatures from which a pair is looked at; different photographs reached 0.73
COPIES = 0.95  # correlation from which it is the same picture; different photographs reached 0.89
LEAST_CONTRAST = 2.0  # gray levels; flatter pictures are alike without being copies
# Digits, icons and cells under a microscope are close by nature. Where an image has more close ones than this on
# average, only signatures as good as equal count.
MOST_CLOSE, EQUAL = 20, 0.99
BLOCK = 4096  # images compared with so many others at a time: 64 MiB of products

Array = np.ndarray[Any, Any]

# Scale, then where the crop lies: -1 at one edge, 0 in the middle, 1 at the other.
PLACES = [(1.0, 0, 0), *((scale, y, x) for scale in (0.95, 0.9) for y in (-1, 0, 1) for x in (-1, 0, 1))]


def exact_groups(files: Sequence[Path]) -> list[list[int]]:
    """Which files hold the same bytes; groups of two and more. Only files of equal size are read."""
    by_size: defaultdict[int, list[int]] = defaultdict(list)
    for index, file in enumerate(files):
        try:
            by_size[file.stat().st_size].append(index)
        except OSError:
            continue  # whoever decodes it will name it
    found: defaultdict[bytes, list[int]] = defaultdict(list)
    for alike in by_size.values():
        if len(alike) > 1:
            for index in alike:
                try:
                    with files[index].open("rb") as opened:
                        found[hashlib.file_digest(opened, "sha256").digest()].append(index)
                except OSError:
                    continue
    return sorted(group for group in found.values() if len(group) > 1)


def thumbnail(picture: Image.Image) -> Array:
    """The whole picture, squeezed: uint8, 32 32 3."""
    return np.asarray(picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0))


def thumbnails(
    files: Sequence[Any],
    read: Callable[[Any], Path | bytes] = lambda file: file,
    done: Callable[[int, int], None] = lambda done, total: None,
) -> Array:
    """Of each file, uint8, N 32 32 3; black, which is like nothing, where it cannot be read."""
    small = np.zeros((len(files), SIDE, SIDE, 3), dtype=np.uint8)

    def fill(index: int) -> None:
        try:
            small[index] = thumbnail(decode(read(files[index]), at_least=(SIDE, SIDE)))
        except NotAnImage:
            return

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for count, _ in enumerate(pool.map(fill, range(len(files))), start=1):
            done(count, len(files))
    return small


def signatures(small_N: Array) -> Tensor:
    """Differences of brightness in an 8×8 grid, of length 1: N 128. Zeros where there is next to no contrast."""
    found = [torch.zeros(0, 128)]
    for start in range(0, len(small_N), BLOCK):
        gray = torch.from_numpy(small_N[start : start + BLOCK]).float() @ torch.tensor([0.299, 0.587, 0.114])
        across = F.interpolate(gray[:, None], size=(8, 9), mode="area").diff(dim=3)
        down = F.interpolate(gray[:, None], size=(9, 8), mode="area").diff(dim=2)
        steps = torch.cat([across.flatten(1), down.flatten(1)], dim=1)
        flat = F.avg_pool2d(gray[:, None], 4).std(dim=(1, 2, 3)) < LEAST_CONTRAST
        found.append(F.normalize(steps, dim=1) * ~flat[:, None])
    return torch.cat(found)


def close_pairs(signatures_N: Tensor, least: float, most: float = torch.inf) -> Tensor | None:
    """Pairs (i < j) whose product is at least `least`: P 2; None as soon as they are more than `most`."""
    found, count = [torch.zeros(0, 2, dtype=torch.int64)], 0
    for top in range(0, len(signatures_N), BLOCK):
        for left in range(top, len(signatures_N), BLOCK):
            alike = signatures_N[top : top + BLOCK] @ signatures_N[left : left + BLOCK].T >= least
            pairs = (alike.triu(1) if top == left else alike).nonzero()
            count += len(pairs)
            if count > most:
                return None
            found.append(pairs + torch.tensor([top, left]))
    return torch.cat(found)


def near_pairs(small_N: Array) -> Array:
    """Pairs (i < j) of thumbnails that show the same picture: P 2."""
    signed = signatures(small_N)
    pairs = close_pairs(signed, CLOSE, most=MOST_CLOSE * max(len(small_N), 50) / 2)
    if pairs is None:
        pairs = close_pairs(signed, EQUAL)
        assert pairs is not None
    same = [torch.zeros(0, dtype=torch.bool)]
    for part in pairs.split(1024) if len(pairs) else ():
        one, other = (torch.from_numpy(small_N[side.numpy()]).permute(0, 3, 1, 2).float() for side in part.T)
        same.append(correlation(one, other) >= COPIES)
    chosen: Array = pairs[torch.cat(same)].numpy()
    return chosen


def correlation(one_PCHW: Tensor, other_PCHW: Tensor) -> Tensor:
    """How alike the pictures of each pair are where one is laid best over a part of the other: P, at most 1."""
    one, other = _placed(one_PCHW), _placed(other_PCHW)  # P places values
    either = torch.maximum((one * other[:, :1]).sum(2).amax(1), (other * one[:, :1]).sum(2).amax(1))
    return either.clamp(-1, 1)


def grouped(count: int, pairs: Array) -> Array:
    """The number of each image's group, the lowest index in it: whoever is joined by pairs, however indirectly."""
    group, pairs = np.arange(count), pairs.astype(np.int64)
    while len(pairs):
        lowest = np.minimum(group[pairs[:, 0]], group[pairs[:, 1]])
        before = group.copy()
        np.minimum.at(group, pairs[:, 0], lowest)
        np.minimum.at(group, pairs[:, 1], lowest)
        group = group[group]
        if np.array_equal(group, before):
            break
    return group


def copies(files: Sequence[Path], done: Callable[[int, int], None] = lambda done, total: None) -> Array:
    """The number of each file's group: the lowest index among its exact and near copies."""
    exact = [(group[0], other) for group in exact_groups(files) for other in group[1:]]
    return grouped(
        len(files), np.concatenate([near_pairs(thumbnails(files, done=done)), np.array(exact).reshape(-1, 2)])
    )


def _placed(images_PCHW: Tensor) -> Tensor:
    """The picture and its parts, each of mean 0 and length 1."""
    P, C = images_PCHW.shape[:2]
    parts = []
    for scale, y, x in PLACES:
        crop = torch.tensor([[scale, 0, x * (1 - scale)], [0, scale, y * (1 - scale)]]).expand(P, -1, -1)
        grid = F.affine_grid(crop, [P, C, SIDE // 2, SIDE // 2], align_corners=False)
        parts.append(F.grid_sample(images_PCHW, grid, padding_mode="border", align_corners=False).flatten(1))
    values = torch.stack(parts, dim=1)
    values = values - values.mean(dim=2, keepdim=True)
    return values / values.norm(dim=2, keepdim=True).clamp_min(1e-6)
