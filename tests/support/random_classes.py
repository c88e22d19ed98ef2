"""Class folders of smooth random images that are as different from each other as photographs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter


def save_random_image(
    path: Path, seed: int, size: tuple[int, int] = (120, 90), mode: str = "RGB", **options: Any
) -> Path:
    noise = np.random.RandomState(seed).randint(0, 256, (9, 12, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(1))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.convert(mode).save(path, **options)
    return path


def save_random_classes(root: Path, counts: dict[str, int], seed: int = 0) -> Path:
    """Write the given number of images per class; returns `root`."""
    for class_index, (name, count) in enumerate(counts.items()):
        for index in range(count):
            save_random_image(root / name / f"{index}.jpg", seed + 1000 * class_index + index)
    return root
