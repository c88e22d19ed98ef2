"""Small synthetic photographs in class folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from vitral.data.preprocess import Preprocessing

COLOURS = {"ants": (200, 30, 30), "bees": (30, 200, 30), "wasps": (30, 30, 200)}  # by class
PREPROCESSING = Preprocessing(image_size=(16, 16), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, crop=0.8)


def noisy_image(colour: tuple[int, int, int], seed: int) -> Image.Image:
    """A 40×30 image of one colour with noise."""
    noise = np.random.default_rng(seed).integers(-25, 25, (30, 40, 3))
    return Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8))


def save_photo(path: Path, colour: tuple[int, int, int], seed: int) -> None:
    """Save a noisy image and create the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noisy_image(colour, seed).save(path)


def save_class_folders(root: Path, classes: list[str] | tuple[str, ...], count: int, first_seed: int = 0) -> Path:
    """Save `count` photographs per class as root/class/00.jpg, …; returns `root`."""
    for name in classes:
        for index in range(count):
            save_photo(root / name / f"{index:02}.jpg", COLOURS[name], first_seed + index)
    return root
