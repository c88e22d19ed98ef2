"""Readers of the built-in datasets' files. Each returns images uint8 (N, C, H, W) and labels (N,)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from vitral.errors import VitralError

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # images, labels


def read_idx(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Read MNIST's idx format: two zero bytes, type 8 (unsigned byte), number of axes, their lengths, the values."""
    hint = "Delete the file; it will be downloaded again"
    raw = np.fromfile(path, dtype=np.uint8)
    if len(raw) < 4 or raw[:3].tolist() != [0, 0, 8]:
        raise VitralError(f"{path} is not an idx file of bytes", hint)
    axes = int(raw[3])
    shape = [int.from_bytes(raw[4 + 4 * axis : 8 + 4 * axis].tobytes(), "big") for axis in range(axes)]
    values = raw[4 + 4 * axes :]
    if len(raw) < 4 + 4 * axes or len(values) != math.prod(shape):
        raise VitralError(f"{path}: expected {'×'.join(map(str, shape))} bytes, got {len(values):,}", hint)
    return values.reshape(shape)


def read_idx_pair(paths: Sequence[Path]) -> Arrays:
    """Read an image file and a label file."""
    images, labels = (read_idx(path) for path in paths)
    return images[:, None], labels


def read_cifar(paths: Sequence[Path], *, label_bytes: int) -> Arrays:
    """Read CIFAR's binary format: per image `label_bytes` labels (the last is the class), then 3072 bytes (C, H, W)."""
    records = np.concatenate([np.fromfile(path, dtype=np.uint8).reshape(-1, label_bytes + 3072) for path in paths])
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1]


def load_digits() -> Arrays:
    """scikit-learn's digits, with their values 0 … 16 scaled to 0 … 255.

    Read from its file, because importing scikit-learn takes up to 2 s.
    """
    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise VitralError("scikit-learn, which contains digits, is not installed", "pip install scikit-learn")
    table = np.loadtxt(Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"), delimiter=",")
    images, labels = table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
    return np.rint(images * (255 / 16)).astype(np.uint8)[:, None], labels


READERS: dict[str, Callable[[Sequence[Path]], Arrays]] = {
    "mnist": read_idx_pair,
    "fashion-mnist": read_idx_pair,
    "cifar10": lambda paths: read_cifar(paths, label_bytes=1),
    "cifar100": lambda paths: read_cifar(paths, label_bytes=2),  # coarse, fine
}
