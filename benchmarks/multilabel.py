"""Train multi-label models on two-digit composites and compare the losses.

    python benchmarks/multilabel.py --dataset mnist --epochs 10 --seeds 3
    python benchmarks/multilabel.py --dataset digits --images 2000 --epochs 2 --seeds 1      # a minute on a CPU

The images are constructed: two images of a built-in dataset side by side, either half empty with probability 0.2. The
labels of an image are the classes in it: none, one or two. Training, validation and test composites are made of the
training, validation and test images. Thresholds are fitted on the validation composites.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from _output import add_output_arguments, write_results
from vitral.data.datasets import Dataset, Split, load_builtin_dataset
from vitral.data.preprocess import Preprocessing, channel_stats
from vitral.device.select import Hardware, select_hardware
from vitral.evaluation.multilabel import build_multilabel_report, fit_multilabel_calibration
from vitral.inference.forward import compute_logits
from vitral.recipes.builtin import get_recipe
from vitral.recipes.options import SIGMOID_LOSSES
from vitral.recipes.schema import Recipe
from vitral.runs.model_io import load_model
from vitral.runs.run import Run
from vitral.training.trainer import Trainer

EMPTY = 0.2  # probability that a half of the image has no digit
METRICS = ("mAP", "micro F1", "macro F1", "exact match", "seconds", "GiB")


def composites(split: Split, num_classes: int, count: int, seed: int) -> Split:
    """`count` images of twice the width, with multi-hot labels."""
    rng = torch.Generator().manual_seed(seed)
    indices = torch.randint(len(split), (2, count), generator=rng)
    has_digit = torch.rand(2, count, generator=rng) >= EMPTY
    halves: list[Tensor] = []
    labels = torch.zeros(count, num_classes)
    for side in range(2):
        halves.append(split.images[indices[side]] * has_digit[side][:, None, None, None])
        one_hot = F.one_hot(split.labels[indices[side]], num_classes)
        labels = labels.maximum(one_hot * has_digit[side][:, None])
    return Split(images=torch.cat(halves, dim=3), labels=labels, is_model_input=True)


def make_dataset(name: str, num_train: int) -> Dataset:
    source = load_builtin_dataset(name)
    K, num_held_out = len(source.classes), max(num_train // 5, 100)
    test = composites(source.test, K, num_held_out, seed=2)
    return Dataset(
        name=f"{name} composites",
        classes=source.classes,
        train=composites(source.train, K, num_train, seed=0),
        validation=composites(source.validation, K, num_held_out, seed=1),
        source="constructed",
        fingerprint="",
        load_test=lambda: test,
        task="multilabel",
    )


def make_recipe(args: argparse.Namespace, dataset: Dataset) -> Recipe:
    recipe = get_recipe(args.dataset if args.dataset == "digits" else "mnist-quick")
    mean, std = channel_stats(dataset.train.images)
    C, H, W = dataset.train.images.shape[1:]
    model = replace(recipe.model, image_size=(H, W), channels=C, num_classes=len(dataset.classes))
    augment = replace(recipe.augment, flip=False, cutmix=0.0, mixup=0.0)
    data = replace(recipe.data, mean=mean, std=std)
    recipe = replace(recipe, model=model, augment=augment, data=data, epochs=args.epochs, checkpoint_epochs=0)
    return recipe.with_task("multilabel")


def run(recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, hardware: Hardware) -> dict[str, float]:
    """Train once and evaluate the test composites."""
    on_gpu = hardware.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        training = Run.create(Path(folder), "run", Path(folder) / "run")
        Trainer(recipe, dataset, preprocessing, training, hardware).fit()
        model, config = load_model(training.path)
    seconds = time.perf_counter() - started
    memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")
    fp32 = select_hardware(device=recipe.device, precision="fp32", compile="no")
    model = model.to(fp32.device)
    validation, test = (
        compute_logits(model, split.images, preprocessing, fp32).cpu() for split in (dataset.validation, dataset.test)
    )
    calibration = fit_multilabel_calibration(validation, dataset.validation.labels)
    thresholds = calibration.thresholds
    report = build_multilabel_report(test, dataset.test.labels, config.classes, calibration, thresholds)
    values = (
        report.mean_average_precision.value, report.micro_f1.value, report.macro_f1.value, report.exact_match.value,
        seconds, memory,
    )  # fmt: skip
    return dict(zip(METRICS, values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="mnist", help="built-in dataset of greyscale digits: mnist or digits")
    parser.add_argument("--images", type=int, default=50_000, help="training composites; a fifth as many for the test")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    add_output_arguments(parser)
    args = parser.parse_args()
    dataset = make_dataset(args.dataset, args.images)
    recipe = make_recipe(args, dataset)
    assert recipe.data.mean is not None
    assert recipe.data.std is not None
    model = recipe.model
    preprocessing = Preprocessing(
        image_size=model.image_size, channels=model.channels, mean=recipe.data.mean, std=recipe.data.std
    )
    hardware = select_hardware(
        device=recipe.device,
        precision=recipe.precision,
        compile=recipe.compile,
        width=model.width,
        steps=len(dataset.train) // recipe.batch_size * recipe.epochs,
    )
    print(f"{dataset.name}: {len(dataset.train):,} train, {len(dataset.test):,} test; {recipe.name}, {hardware.device}")
    print(f"mean ± standard deviation of {args.seeds} seeds")
    print(f"{'loss':<12}" + "".join(f"{name:>18}" for name in METRICS), flush=True)
    rows: list[dict[str, Any]] = []
    for loss in SIGMOID_LOSSES:
        results = [
            run(replace(recipe, loss=loss, seed=seed), dataset, preprocessing, hardware) for seed in range(args.seeds)
        ]
        rows += [{"loss": loss, "seed": seed, **result} for seed, result in enumerate(results)]
        cells = []
        for name in METRICS:
            values = [result[name] * (1 if name in ("seconds", "GiB") else 100) for result in results]
            spread = statistics.stdev(values) if args.seeds > 1 else 0.0
            cells.append(f"{statistics.mean(values):7.2f} ± {spread:5.2f}")
        print(f"{loss:<12}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
        write_results(args, rows, {"train": len(dataset.train), "epochs": args.epochs})


if __name__ == "__main__":
    main()
