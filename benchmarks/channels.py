"""Fine-tune an RGB checkpoint on images with more than three channels: accuracy and time against RGB.

    python benchmarks/channels.py --data hymenoptera --weights vit_tiny.safetensors --seeds 5

From a folder of photographs with a train and a val folder, four datasets of the same photographs are written, with
the shorter side resized to --side pixels:

    rgb-8        8-bit RGB, PNG: as usual
    rgb-16       the same values times 257 as 16-bit TIFF: measures the path of 16-bit images alone
    five-16      red, green, blue, saturation and gradient magnitude as five 16-bit pages of a TIFF
    two-16       saturation and gradient magnitude only: what the added channels contain without the colours

Each is fine-tuned from the checkpoint with the patch projection inflated from RGB, and five-16 and two-16 also with a
patch projection drawn at random. The added channels are functions of the colours, so no gain over RGB is expected;
the question is what inflation is worth, and what more channels and 16 bits cost. Accuracy is measured on the val
folder, 15% of the training images select the epoch. Seeds change the head, the batch order and the augmentation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from _fine_tuning import fine_tune
from _output import add_output_arguments, write_results
from vitral.data.datasets import VALIDATION_SEED, Split, stratified_holdout
from vitral.data.decode import ImageDecodeError, decode_image
from vitral.data.files.walk import find_images
from vitral.data.lazy_images import select_images
from vitral.evaluation.metrics import compute_metrics
from vitral.models.vit import ViT
from vitral.training.setup import TrainingSetup, resolve_recipe, setup_training

Array = np.ndarray[Any, Any]
PATCH_KERNELS = "patch_embedding.project.weight"


def to_16_bit(values: Array) -> Array:
    """Values from 0 to 1 as 16-bit integers."""
    scaled: Array = (values.clip(0, 1) * 65535).round().astype(np.uint16)
    return scaled


def added_channels(rgb_HWC: Array) -> Array:
    """Saturation and gradient magnitude, (2, H, W) from 0 to 1."""
    values = rgb_HWC.astype(np.float64) / 255
    highest, lowest = values.max(axis=2), values.min(axis=2)
    saturation = np.divide(highest - lowest, highest, out=np.zeros_like(highest), where=highest > 0)
    down, right = np.gradient(values.mean(axis=2))
    return np.stack([saturation, 4 * np.hypot(down, right)])


def write_pages(path: Path, pixels_CHW: Array) -> None:
    first, *others = (Image.fromarray(page) for page in pixels_CHW)
    first.save(path, save_all=True, append_images=others)


def write_rgb_8(path: Path, rgb_HWC: Array) -> None:
    Image.fromarray(rgb_HWC).save(path.with_suffix(".png"))


def write_rgb_16(path: Path, rgb_HWC: Array) -> None:
    write_pages(path, rgb_HWC.transpose(2, 0, 1).astype(np.uint16) * 257)


def write_five_16(path: Path, rgb_HWC: Array) -> None:
    colours = rgb_HWC.transpose(2, 0, 1).astype(np.uint16) * 257
    write_pages(path, np.concatenate([colours, to_16_bit(added_channels(rgb_HWC))]))


def write_two_16(path: Path, rgb_HWC: Array) -> None:
    write_pages(path, to_16_bit(added_channels(rgb_HWC)))


WRITERS: dict[str, Callable[[Path, Array], None]] = {
    "rgb-8": write_rgb_8, "rgb-16": write_rgb_16, "five-16": write_five_16, "two-16": write_two_16
}  # fmt: skip
RUNS = [(name, "inflated") for name in WRITERS] + [("five-16", "random"), ("two-16", "random")]


def write_datasets(source: Path, root: Path, side: int) -> int:
    """Write all datasets; returns the number of photographs."""
    count = 0
    for file in find_images([source]):
        try:
            photo = decode_image(file).convert("RGB")
        except ImageDecodeError:
            continue
        scale = side / min(photo.size)
        size = (max(round(photo.width * scale), side), max(round(photo.height * scale), side))
        pixels = np.asarray(photo.resize(size, Image.Resampling.BICUBIC))
        for name, write in WRITERS.items():
            path = root / name / file.relative_to(source).with_suffix(".tif")
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, pixels)
        count += 1
    return count


def prepare(data: Path, checkpoint: str, epochs: int | None, projection: str) -> tuple[TrainingSetup, Split]:
    """The setup with a validation split of the training images, and the val folder as the test split."""
    recipe = resolve_recipe(str(data), None, checkpoint)
    setup = setup_training(replace(recipe, epochs=epochs or recipe.epochs))
    train, dataset = setup.dataset.train, setup.dataset
    held_out = torch.from_numpy(stratified_holdout(train.labels.numpy(), 0.15, seed=VALIDATION_SEED))
    parts = [
        replace(train, images=select_images(train.images, mask), labels=train.labels[mask], locations=None)
        for mask in (~held_out, held_out)
    ]
    weights = dict(setup.initial_weights or {})
    if projection == "random":
        torch.manual_seed(0)
        weights[PATCH_KERNELS] = ViT(setup.recipe.model).state_dict()[PATCH_KERNELS]
    validation = parts[1].to_model_input(setup.preprocessing)
    split = replace(dataset, train=parts[0], validation=validation)
    return replace(setup, dataset=split, initial_weights=weights), dataset.validation


def run(setup: TrainingSetup, test: Split, seed: int) -> dict[str, float]:
    """Train once and evaluate the test images."""
    result = fine_tune(setup, test, seed)
    return {
        "accuracy": compute_metrics(result.logits_NK, test.labels, setup.dataset.classes).top1,
        "seconds": result.seconds,
        "ms_per_image": 1000 * result.seconds / (len(setup.dataset.train) * setup.recipe.epochs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of photographs with a train and a val folder")
    parser.add_argument("--weights", required=True, help="RGB checkpoint to fine-tune")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="default: the recipe's")
    parser.add_argument("--side", type=int, default=256, help="shorter side of the written images")
    add_output_arguments(parser)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VITRAL_HOME"] = str(Path(folder) / "cache")  # so that reading is measured, not a cache
        count = write_datasets(args.data, Path(folder), args.side)
        print(f"{count} photographs; mean ± standard deviation of {args.seeds} seeds", flush=True)
        print(f"{'images':<10}{'projection':<12}{'accuracy':>16}{'training':>16}{'reading':>12}", flush=True)
        for name, projection in RUNS:
            start = time.perf_counter()
            setup, test = prepare(Path(folder) / name, args.weights, args.epochs, projection)
            reading = time.perf_counter() - start
            results = [run(setup, test, seed) for seed in range(args.seeds)]
            rows += [
                {"images": name, "projection": projection, "channels": setup.preprocessing.channels,
                 "dtype": setup.preprocessing.dtype, "seed": seed, "reading_seconds": reading, **result}
                for seed, result in enumerate(results)
            ]  # fmt: skip
            accuracy, seconds = (_summary(results, key, scale) for key, scale in (("accuracy", 100), ("seconds", 1)))
            print(f"{name:<10}{projection:<12}{accuracy + ' %':>16}{seconds + ' s':>16}{reading:>10.1f} s", flush=True)
            write_results(args, rows, {"photographs": count, "epochs": setup.recipe.epochs})


def _summary(results: list[dict[str, float]], key: str, scale: float) -> str:
    values = [scale * result[key] for result in results]
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values) if len(values) > 1 else 0:.2f}"


if __name__ == "__main__":
    main()
