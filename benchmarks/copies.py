"""Copies of training images: how many are recognised by their fingerprints, and how many other images by mistake.

    python benchmarks/copies.py FOLDER

FOLDER has train/CLASS and val/CLASS. Altered copies of the training images are compared with them, and the validation
images, which are different photographs. Fingerprints are computed twice, on their own and while the files are packed,
and differ only for JPEG files that are decoded at different sizes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from PIL import Image

from _output import add_output_arguments, write_results


def crop(image: Image.Image, keep: float, seed: int | None = None) -> Image.Image:
    """A part with this fraction of each side: the centre, or a random one."""
    width, height = int(image.width * keep), int(image.height * keep)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    if seed is not None:
        left, top = np.random.default_rng(seed).integers(0, [2 * left + 1, 2 * top + 1]).tolist()
    return image.crop((left, top, left + width, top + height))


ALTERED: dict[str, tuple[Callable[[Image.Image, int], Image.Image], str, int]] = {  # change, suffix, JPEG quality
    "PNG": (lambda image, _: image, ".png", 0),
    "half size": (lambda image, _: image.resize((image.width // 2, image.height // 2)), ".jpg", 90),
    "JPEG quality 20": (lambda image, _: image, ".jpg", 20),
    "JPEG quality 50": (lambda image, _: image, ".jpg", 50),
    "brighter by 15%": (lambda image, _: image.point(lambda value: min(int(value * 1.15), 255)), ".jpg", 90),
    "cropped by 5%, centre": (lambda image, _: crop(image, 0.95), ".jpg", 90),
    "cropped by 10%, centre": (lambda image, _: crop(image, 0.9), ".jpg", 90),
    "cropped by 5%, anywhere": (lambda image, seed: crop(image, 0.95, seed), ".jpg", 90),
    "cropped by 10%, anywhere": (lambda image, seed: crop(image, 0.9, seed), ".jpg", 90),
}


def write_copies(files: Sequence[Path], name: str, folder: Path) -> list[Path]:
    change, suffix, quality = ALTERED[name]
    copies = []
    for seed, file in enumerate(files):
        copies.append(folder / name.replace(" ", "-") / file.parent.name / f"{seed}{suffix}")
        copies[-1].parent.mkdir(parents=True, exist_ok=True)
        with Image.open(file) as image:
            options: dict[str, Any] = {"quality": quality} if quality else {}
            change(image.convert("RGB"), seed).save(copies[-1], **options)
    return copies


def fingerprint(files: Sequence[Path]) -> Any:
    from vitral.data.files.fingerprints import fingerprint_files
    from vitral.data.files.location import ImageLocation

    return fingerprint_files([ImageLocation(str(file)) for file in files])


def fingerprint_while_packing(folder: Path, files: Sequence[Path], home: Path) -> Any:
    """Fingerprints that were computed while the class folders were packed for a model of 224 pixels."""
    from vitral.data.files import fingerprints
    from vitral.data.files.file_dataset import ReadOptions, list_images, read_listing
    from vitral.data.preprocess import Preprocessing

    os.environ["VITRAL_HOME"] = str(home)
    half = (0.5, 0.5, 0.5)
    preprocessing = Preprocessing(image_size=(224, 224), channels=3, mean=half, std=half, crop=224 / 248)
    read_listing(list_images(folder, 0.0), preprocessing, ReadOptions(), fingerprints=True)
    with patch.object(fingerprints, "_read_fingerprint", lambda _: None):  # only those in the cache
        return fingerprint(files)


def num_different(first: Any, second: Any) -> int:
    is_equal = (first.file_hashes == second.file_hashes) & (first.pixel_hashes == second.pixel_hashes)
    return int((~(is_equal & (first.thumbnails == second.thumbnails).all(axis=(1, 2)))).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--alone", action="store_true", help="do not compute fingerprints while packing")
    add_output_arguments(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        os.environ["VITRAL_HOME"] = str(temporary / "home")
        from vitral.data.files.duplicates import find_copies

        train, validation = (sorted((args.folder / split).rglob("*.jpg")) for split in ("train", "val"))
        reference, rows = fingerprint(train), []
        compared = {"other photographs": (args.folder / "val", validation)}
        for kind in ALTERED:
            files = write_copies(train, kind, temporary)
            compared[kind] = files[0].parents[1], files
        for index, (kind, (folder, files)) in enumerate(compared.items()):
            os.environ["VITRAL_HOME"] = str(temporary / "home")
            images = fingerprint(files)
            matches = find_copies(images, reference)
            row = {"images": kind, "count": len(files), "reported": int(matches.any.sum())}
            row["exact"] = int(matches.exact.sum())
            if not args.alone:
                packed = fingerprint_while_packing(folder, files, temporary / f"home-{index}")
                row["different_while_packing"] = num_different(images, packed)
            rows.append(row)
            print(row, flush=True)
        write_results(args, rows, packages=("torch", "pillow"))


if __name__ == "__main__":
    main()
