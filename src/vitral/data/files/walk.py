"""The directory walk: every command that takes folders of images finds the same files in the same order.

Hidden files and folders are skipped, and symbolic links to folders are not followed. Does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})


def walk_files(
    folder: Path, *, suffixes: Collection[str] | None = IMAGE_SUFFIXES, recursive: bool = True
) -> Iterator[Path]:
    """Yield the visible files in and below `folder`, sorted by name at each level.

    Lazy: one folder is listed at a time, so that folders with millions of files can be processed as they are found.
    `suffixes` are lower case and match any case; None yields every file. Unreadable folders are skipped.
    """
    try:
        with os.scandir(folder) as entries:
            visible = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda e: e.name)
    except OSError:
        return
    for entry in visible:
        if entry.is_dir(follow_symlinks=False):
            if recursive:
                yield from walk_files(folder / entry.name, suffixes=suffixes)
        elif entry.is_file() and (suffixes is None or Path(entry.name).suffix.lower() in suffixes):
            yield folder / entry.name


def iter_images(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield files as given, and for each folder the images in and below it."""
    for path in paths:
        if path.is_dir():
            yield from walk_files(path)
        else:
            yield path


def find_images(paths: Iterable[Path]) -> list[Path]:
    """List files as given, and for each folder the images in and below it.

    A folder without images is listed itself, so that decoding it reports the problem. The list is empty if there is
    nothing but such folders.
    """
    images: list[Path] = []
    only_empty_folders = True
    for path in paths:
        if path.is_dir():
            below = list(walk_files(path))
            images += below or [path]
            only_empty_folders &= not below
        else:
            images.append(path)
            only_empty_folders = False
    return [] if only_empty_folders else images


def subfolders(folder: Path) -> list[Path]:
    """Visible folders directly below `folder`, including symbolic links to folders, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
