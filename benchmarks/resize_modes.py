"""Fine-tune a checkpoint on photographs with each resize mode: accuracy with interval, and time.

    python benchmarks/resize_modes.py --data hymenoptera --weights vit_tiny.safetensors --seeds 5

The folder has a train and a val folder. 15% of the training images select the epoch; the images of val are tested once
per run, at the pixels that a prediction of the files sees. Seeds change the head, the batch order and the augmentation;
all modes have the same seeds, so that differences to crop are paired. `elongated` is the accuracy on the test images
whose longer side is at least 1.4 times the shorter one.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from _fine_tuning import fine_tune
from _output import add_output_arguments, write_results
from vitral.data.datasets import Split
from vitral.data.decode import read_upright_size
from vitral.data.geometry import Resize
from vitral.training.setup import TrainingSetup, resolve_recipe, setup_training

ELONGATED = 1.4  # longer side over shorter side
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # two-sided, n values


def link_splits(data: Path, root: Path) -> Path:
    """A folder with the training images of `data`, and its validation images as the test split."""
    root.mkdir()
    (root / "train").symlink_to((data / "train").resolve())
    (root / "test").symlink_to((data / "val").resolve())
    return root


def prepare(data: Path, weights: str, resize: Resize, epochs: int | None, batch_size: int | None) -> TrainingSetup:
    recipe = resolve_recipe(str(data), None, weights)
    overrides: dict[str, Any] = {"data.resize": resize, "data.validation": 0.15}
    overrides |= {} if epochs is None else {"epochs": epochs}
    overrides |= {} if batch_size is None else {"batch_size": batch_size}
    return setup_training(recipe.with_overrides(overrides))


def run(setup: TrainingSetup, test: Split, is_elongated: Tensor, seed: int) -> dict[str, float]:
    """Train once and evaluate the test images in fp32."""
    result = fine_tune(setup, test, seed)
    correct = (result.logits_NK.argmax(dim=1) == test.labels).float()
    return {
        "accuracy": correct.mean().item(),
        "elongated_accuracy": correct[is_elongated].mean().item(),
        "seconds": result.seconds,
        "steps_per_epoch": result.steps_per_epoch,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of photographs with a train and a val folder")
    parser.add_argument("--weights", required=True, help="checkpoint to fine-tune")
    parser.add_argument("--modes", nargs="+", default=list(get_args(Resize)), choices=get_args(Resize))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="default: the recipe's")
    parser.add_argument("--batch-size", type=int, help="default: the recipe's")
    add_output_arguments(parser)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VITRAL_HOME"] = str(Path(folder) / "cache")  # so that reading is measured, not a cache
        data = link_splits(args.data, Path(folder) / "photos")
        print(f"mean ± standard deviation of {args.seeds} seeds [95% interval of the mean]", flush=True)
        print(
            f"{'mode':<9}{'accuracy':>29}{'minus crop':>18}{'elongated':>18}{'training':>18}{'reading':>11}", flush=True
        )
        for mode in args.modes:
            start = time.perf_counter()
            setup = prepare(data, args.weights, mode, args.epochs, args.batch_size)
            test = setup.loaded_dataset.test.to_model_input(setup.preprocessing)
            reading = time.perf_counter() - start
            is_elongated = elongated_images(test, setup)
            results = [run(setup, test, is_elongated, seed) for seed in range(args.seeds)]
            rows += [
                {"mode": mode, "seed": seed, "reading_seconds": reading, "test_images": len(test),
                 "elongated_images": int(is_elongated.sum()), "epochs": setup.recipe.epochs,
                 "batch_size": setup.recipe.batch_size, **result}
                for seed, result in enumerate(results)
            ]  # fmt: skip
            print(describe(mode, results, rows, reading), flush=True)
            write_results(args, rows)


def elongated_images(test: Split, setup: TrainingSetup) -> Tensor:
    """(N,) booleans of the test images."""
    assert test.locations is not None
    sizes = [read_upright_size(location.path, setup.preprocessing.pixel_format) for location in test.locations]
    return torch.tensor([max(size) >= ELONGATED * min(size) for size in sizes])


def describe(mode: str, results: Sequence[dict[str, float]], rows: Sequence[dict[str, Any]], reading: float) -> str:
    accuracy = [100 * result["accuracy"] for result in results]
    crop = [100 * row["accuracy"] for row in rows if row["mode"] == "crop"]
    difference = ""
    if mode != "crop" and len(crop) == len(accuracy):
        difference = summary([mine - other for mine, other in zip(accuracy, crop, strict=True)])
    mean, half = statistics.mean(accuracy), half_interval(accuracy)
    interval = f" [{mean - half:.2f}, {mean + half:.2f}]" if math.isfinite(half) else ""
    elongated = summary([100 * result["elongated_accuracy"] for result in results])
    seconds = summary([result["seconds"] for result in results])
    return (
        f"{mode:<9}{summary(accuracy) + interval:>29}{difference:>18}{elongated:>18}{seconds + ' s':>18}"
        f"{reading:>9.1f} s"
    )


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95% t-interval of the mean."""
    n = len(values)
    return T_95.get(n, 1.96) * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.inf


def summary(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values) if len(values) > 1 else 0:.2f}"


if __name__ == "__main__":
    main()
