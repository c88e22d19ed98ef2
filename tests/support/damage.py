"""Ways in which a file of the cache is damaged."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def make_empty(file: Path) -> None:
    file.write_bytes(b"")


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-len(content) // 4] ^= 1
    file.write_bytes(content)


def change_content(file: Path) -> None:
    """Replace a file by another valid one: images of another shape, or JSON that is not an object."""
    if file.suffix == ".npy":
        np.save(file, np.zeros((80, 3, 4, 4), dtype=np.uint8))
    else:
        file.write_text("[1, 2]")


DAMAGES = [truncate, make_empty, flip_bit, change_content]
