"""A regression dataset that a tiny model learns: the position of a bright bar."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDE = 16
TINY_REGRESSION: dict[str, Any] = {
    "model.image_size": (SIDE, SIDE),
    "model.patch_size": 4,
    "model.width": 32,
    "model.depth": 1,
    "model.heads": 2,
    "augment.crop": 0.0,
    "augment.flip": False,
    "augment.cutmix": 0.0,
    "batch_size": 32,
}


def write_bars(folder: Path, count: int = 260, seed: int = 0) -> Path:
    """Write images and list.csv with the columns path, x (left edge in mm), mass (in g) and split; returns the list."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    with (folder / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "x", "mass", "split"])
        for index in range(count):
            pixels = rng.integers(0, 40, (SIDE, SIDE)).astype(np.uint8)
            x = int(rng.integers(0, SIDE - 3))
            pixels[3:13, x : x + 4] = 230
            Image.fromarray(pixels).save(folder / "images" / f"{index:03}.png")
            split = ("train", "train", "train", "val", "test")[index % 5]
            writer.writerow([f"images/{index:03}.png", 10 * x + 3, round(1000 + 50 * x + rng.normal(0, 20), 3), split])
    return folder / "list.csv"
