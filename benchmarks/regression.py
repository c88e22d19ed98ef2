"""Train a regression on a target that is known exactly: the angle by which an image was rotated.

    python benchmarks/regression.py --data photos/ --weights vit_tiny_patch16_224.safetensors --seeds 3
    python benchmarks/regression.py --data mnist --epochs 10

Every image is rotated by random angles from -45 to 45 degrees and cropped to its centre, so that no corner gives the
angle away. All rotations of an image are in one split. Reports the test error of each loss, that of always predicting
the mean, and the measured coverage of the prediction intervals.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import vitral
from _output import add_output_arguments, write_results
from vitral.data.datasets import load_builtin_dataset
from vitral.data.files.walk import find_images
from vitral.data.registry.sources import BUILTIN_DATASETS

MAX_ANGLE = 45.0
COVERAGE = 0.9
SPLIT_OF_TEN = ("train",) * 7 + ("val", "test", "test")


def load_sources(data: str, limit: int) -> list[Image.Image]:
    """Images of a folder or of a built-in dataset, square."""
    if data in BUILTIN_DATASETS:
        train = load_builtin_dataset(data).train
        arrays = [train.images[index : index + 1][0].permute(1, 2, 0).squeeze(-1).numpy() for index in range(limit)]
        return [Image.fromarray(array) for array in arrays]
    images = []
    for path in find_images([Path(data)])[:limit]:
        with Image.open(path) as image:
            rgb = image.convert("RGB")
        side = min(rgb.size)
        left, top = (rgb.width - side) // 2, (rgb.height - side) // 2
        images.append(rgb.crop((left, top, left + side, top + side)).resize((360, 360), Image.Resampling.BICUBIC))
    return images


def rotate(image: Image.Image, angle: float) -> Image.Image:
    """Rotate, and crop the largest centred square that has no empty corner at any angle up to MAX_ANGLE.

    Small images on a black background, such as digits, keep their size: their corners are black anyway.
    """
    rotated = image.rotate(angle, Image.Resampling.BICUBIC)
    if image.width < 64:
        return rotated
    side = int(image.width / np.sqrt(2))
    left = (image.width - side) // 2
    return rotated.crop((left, left, left + side, left + side))


def write_dataset(folder: Path, sources: Sequence[Image.Image], rotations: int, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir()
    with (folder / "list.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "angle", "split"])
        for index, image in enumerate(sources):
            for rotation in range(rotations):
                angle = float(rng.uniform(-MAX_ANGLE, MAX_ANGLE))
                name = f"images/{index:05}-{rotation}.png"
                rotate(image, angle).save(folder / name)
                writer.writerow([name, f"{angle:.3f}", SPLIT_OF_TEN[index % 10]])
    return folder / "list.csv"


def measure(listing: Path, out: Path, args: argparse.Namespace, loss: str, seed: int) -> dict[str, Any]:
    overrides: dict[str, Any] = {
        "data.targets": ("angle",), "loss": loss, "seed": seed, "epochs": args.epochs, "augment.crop": 0.0,
        "augment.flip": False, "augment.cutmix": 0.0, "augment.mixup": 0.0,
    }  # fmt: skip
    if args.weights is None:
        overrides |= {"model.image_size": (28, 28), "model.patch_size": 4, "model.width": 64, "model.depth": 4}
        overrides |= {"model.heads": 4}
    start = time.perf_counter()
    model = vitral.train(listing, init_from=args.weights, out=out, quiet=False, **overrides)
    seconds = time.perf_counter() - start
    report = vitral.evaluate(model, coverage=COVERAGE)
    (angle,) = report.targets
    return {
        "loss": loss, "seed": seed, "images": report.images, "mae": angle.mae.value, "mae_low": angle.mae.low,
        "mae_high": angle.mae.high, "rmse": angle.rmse.value, "r2": angle.r2.value,
        "mean_baseline_mae": float(angle.std * np.sqrt(3) / 2), "coverage": angle.interval.coverage.value,
        "coverage_low": angle.interval.coverage.low, "coverage_high": angle.interval.coverage.high,
        "half_width": angle.interval.half_width, "seconds": seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist", help="folder of photographs, or a built-in dataset")
    parser.add_argument("--weights", type=Path, help="checkpoint to fine-tune; default: a small model from scratch")
    parser.add_argument("--images", type=int, default=4000, help="maximum number of source images")
    parser.add_argument("--rotations", type=int, default=8, help="rotations of each source image")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--losses", nargs="+", default=["mse", "huber"], choices=["mse", "huber"])
    add_output_arguments(parser)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        listing = write_dataset(folder, load_sources(args.data, args.images), args.rotations)
        for loss in args.losses:
            for seed in range(args.seeds):
                rows.append(measure(listing, folder / f"{loss}-{seed}", args, loss, seed))
                print({name: round(v, 4) if isinstance(v, float) else v for name, v in rows[-1].items()}, flush=True)
                write_results(args, rows)
    for loss in args.losses:
        for name in ("mae", "rmse", "r2", "coverage"):
            values = [row[name] for row in rows if row["loss"] == loss]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(f"{loss:<6} {name:<9} {statistics.mean(values):.4f} ± {spread:.4f} (n = {len(values)})")


if __name__ == "__main__":
    main()
