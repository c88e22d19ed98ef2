"""Quality of self-supervised features after a given training time: `vitral pretrain` on several seeds and methods.

    python benchmarks/pretraining.py --variant "pretrain-small epochs=80" --seeds 3 --save
    python benchmarks/pretraining.py --variant "pretrain-small pretrain.method=moco" --variant pretrain-small --epochs 9
    python benchmarks/pretraining.py --goal --seeds 3 --processes 3 --save

--goal is the model and the length of the goal, a linear probe of 93% and k-NN of 90% within 20 minutes of training:
width 384, 260 epochs, which took 503 s of an H200 beside another job. Three seeds side by side on one GPU take less
time than one after the other, and each of them more than alone, so that its training_s is an upper bound.

A variant is a recipe (name or TOML file) with changes FIELD=VALUE, as in benchmarks/speed_records.py. Pretraining uses
the training images of the recipe's dataset without labels. Afterwards all labels train classifiers on the frozen
features, and the test images measure them:

knn, linear    k nearest neighbours (k = 20, cosine) and logistic regression on the features, fp32
linear_1pct    logistic regression on 1% of the labels (50 images per class of CIFAR-10), mean of three draws
linear_blocks  logistic regression on the pooled tokens of the last four blocks, as in DINO's evaluation of small ViTs
               (arXiv 2104.14294, section 4.1), fitted on the training images and their mirror images
training_s     time of the optimizer steps, as recorded in metrics.jsonl
wall_clock_s   everything, with compilation and the measures of collapse after each epoch

With --fine-tune EPOCHS, the model is also fine-tuned on all labels by the dataset's recipe. With --images N, the first
N training images are used, for pretraining and for the classifiers. --random adds a row for the same architecture with
random weights to each run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _output import add_output_arguments, write_results
from _seeds import add_seed_arguments, run_side_by_side, seeds_of
from vitral import api
from vitral.api import pretrain
from vitral.data.datasets import Dataset, Split, load_builtin_dataset
from vitral.data.preprocess import Preprocessing
from vitral.device.select import select_hardware
from vitral.evaluation.feature_classifiers import (
    LabelledFeatures,
    fit_logistic_regression,
    neighbours,
    sample_shots,
    standardise,
    vote,
)
from vitral.inference.forward import compute_logits
from vitral.models.vit import ViT
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import Recipe, read_recipe
from vitral.runs.model_io import load_model
from vitral.runs.run import Run
from vitral.utils.json_toml import parse_toml

NUM_NEIGHBOURS = 20
FEW_LABELS = 0.01
NUM_DRAWS = 3
NUM_BLOCKS = 4
GOAL = "pretrain-small model.width=384 model.heads=6 model.mlp_width=1152 epochs=260"
INVERSE_PENALTIES = (0.003, 0.03, 0.3)  # C of the linear probe


def parse_variant(text: str) -> Recipe:
    """The recipe "NAME FIELD=VALUE ..." or "FILE.toml ...", with values as in TOML; text needs no quotes."""
    name, *changes = text.split()
    overrides: dict[str, Any] = {}
    for change in changes:
        field, _, value = change.partition("=")
        try:
            overrides[field] = parse_toml(f"value = {value}")["value"]
        except ValueError:
            overrides[field] = value
    recipe = read_recipe(Path(name)) if name.endswith(".toml") else get_recipe(name)
    return recipe.with_overrides(overrides)


def features_of(
    model: ViT, preprocessing: Preprocessing, split: Split, *, num_blocks: int = 1, mirrored: bool = False
) -> Tensor:
    """Pooled features in fp32, (N, D), on the device; of several blocks side by side, (N, num_blocks·D)."""
    hardware = select_hardware(precision="fp32", compile="no")
    images = split.to_model_input(preprocessing).images
    model = model.to(hardware.device)

    def forward(images_BCHW: Tensor) -> Tensor:
        images_BCHW = images_BCHW.flip(-1) if mirrored else images_BCHW
        if num_blocks == 1:
            return model.features(images_BCHW)
        blocks = model.trace(images_BCHW).tokens[1:][-num_blocks:]
        return torch.cat([model.pool(model.encoder.norm(tokens)) for tokens in blocks], dim=1)

    return compute_logits(forward, images, preprocessing, hardware)


def linear_accuracy(train: LabelledFeatures, test: LabelledFeatures, K: int, views: int = 1) -> float:
    """Accuracy of logistic regression, whose C is selected on a tenth of the training images.

    `train` holds all images, or, with several views, one block of rows per view.
    """
    features, labels = train
    num_images = len(labels) // views
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(0)).to(labels.device)
    held_out = torch.zeros(num_images, dtype=torch.bool, device=labels.device)
    held_out[order[: max(num_images // 10, 1)]] = True
    held_out = held_out.repeat(views)
    selection = (features[~held_out], labels[~held_out]), (features[held_out], labels[held_out])
    C = max(INVERSE_PENALTIES, key=lambda C: regression_accuracy(*selection, K, C))
    return regression_accuracy(train, test, K, C)


def regression_accuracy(train: LabelledFeatures, test: LabelledFeatures, K: int, C: float) -> float:
    x_ND, x_MD = standardise(train[0], test[0])
    weights = fit_logistic_regression(x_ND, train[1], K, C)
    return ((x_MD @ weights[:-1] + weights[-1]).argmax(dim=1) == test[1]).float().mean().item()


def measure_features(model: ViT, preprocessing: Preprocessing, train: Split, test: Split, K: int) -> dict[str, float]:
    """Accuracies of classifiers on frozen features."""
    x_train, x_test = (features_of(model, preprocessing, split) for split in (train, test))
    y_train, y_test = train.labels.to(x_train.device), test.labels.to(x_train.device)
    similarity, index = neighbours(x_train, x_test, NUM_NEIGHBOURS)
    knn = (vote(similarity, y_train[index], K) == y_test).float().mean().item()
    few = []
    for seed in range(NUM_DRAWS):
        drawn = sample_shots(y_train, max(round(FEW_LABELS * len(y_train) / K), 1), seed)
        few.append(linear_accuracy((x_train[drawn], y_train[drawn]), (x_test, y_test), K))
    linear = linear_accuracy((x_train, y_train), (x_test, y_test), K)
    blocks = partial(features_of, model, preprocessing, num_blocks=NUM_BLOCKS)
    views = torch.cat([blocks(train), blocks(train, mirrored=True)]), torch.cat([y_train, y_train])
    linear_blocks = linear_accuracy(views, (blocks(test), y_test), K, views=2)
    return {"knn": knn, "linear": linear, "linear_1pct": statistics.fmean(few), "linear_blocks": linear_blocks}


def measure_random(run: Path, seed: int, train: Split, test: Split, K: int) -> dict[str, float]:
    """Accuracies of classifiers on the features of the run's architecture with random weights."""
    trained, config = load_model(run)
    torch.manual_seed(seed)
    return measure_features(type(trained)(config.architecture), config.preprocessing, train, test, K)


def load_dataset(name: str, max_images: int | None) -> Dataset:
    """The built-in dataset without a validation split, with the first `max_images` training images."""
    dataset = load_builtin_dataset(name, validation=0.0)
    if max_images is None:
        return dataset
    images, labels = dataset.train.images[:max_images], dataset.train.labels[:max_images]
    return replace(dataset, train=replace(dataset.train, images=images, labels=labels))


def run_once(recipe: Recipe, seed: int, folder: Path, fine_tune_epochs: int, max_images: int | None) -> dict[str, Any]:
    """Pretrain once and measure the features."""
    dataset = load_dataset(recipe.data.name, max_images)
    images = None if max_images is None else list(dataset.train.images)
    started = time.perf_counter()
    pretrain(images, recipe=recipe, seed=seed, out=folder, checkpoint_epochs=0)
    row: dict[str, Any] = {"seed": seed, "wall_clock_s": round(time.perf_counter() - started, 1)}
    metrics = Run(folder).load_metrics()
    row["training_s"] = round(sum(line["training_seconds"] for line in metrics), 1)
    row["steps"] = metrics[-1]["step"]
    row["effective_rank"] = round(metrics[-1]["effective_rank"], 1)
    model, config = load_model(folder)
    row |= measure_features(model, config.preprocessing, dataset.train, dataset.test, len(dataset.classes))
    if fine_tune_epochs:
        started = time.perf_counter()
        changes: dict[str, Any] = {"epochs": fine_tune_epochs, "checkpoint_epochs": 0, "data.validation": 0.0}
        out = folder.parent / "fine-tuned"
        predictor = api.train(recipe.data.name, recipe=recipe.data.name, init_from=folder, out=out, **changes)
        row["fine_tuned"] = api.evaluate(predictor).top1
        row["fine_tuning_s"] = round(sum(line["training_seconds"] for line in Run(out).load_metrics()), 1)
    return row


def measure_variants(args: argparse.Namespace, variants: Sequence[str]) -> list[dict[str, Any]]:
    """One row per variant and seed, and with --random another one."""
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(row, flush=True)
        write_results(args, rows)

    for text in variants:
        recipe = parse_variant(text)
        if args.epochs:
            recipe = recipe.with_overrides({"epochs": args.epochs})
        for seed in seeds_of(args):
            with tempfile.TemporaryDirectory() as temporary:
                folder = (args.keep or Path(temporary)) / f"seed-{seed}-{len(rows)}" / "pretrained"
                add({"variant": text, **run_once(recipe, seed, folder, args.fine_tune, args.images)})
                if args.random:
                    dataset = load_dataset(recipe.data.name, args.images)
                    splits = dataset.train, dataset.test, len(dataset.classes)
                    add({"variant": "random", "seed": seed, **measure_random(folder, seed, *splits)})
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return rows


def print_summary(rows: Sequence[dict[str, Any]]) -> None:
    for text in dict.fromkeys(row["variant"] for row in rows):
        print(text)
        for name in ("knn", "linear", "linear_1pct", "linear_blocks", "fine_tuned", "training_s"):
            values = [row[name] for row in rows if row["variant"] == text and name in row]
            if values:
                spread = f" ± {statistics.stdev(values):.4f} (standard deviation)" if len(values) > 1 else ""
                print(f"  {name:<12} {statistics.fmean(values):.4f}{spread}, n = {len(values)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", action="append", help='"RECIPE FIELD=VALUE ...", once or several times')
    parser.add_argument("--goal", action="store_true", help=f"the variant {GOAL}")
    parser.add_argument("--epochs", type=int, help="of all variants")
    add_seed_arguments(parser)
    parser.add_argument("--fine-tune", type=int, default=0, metavar="EPOCHS", help="also fine-tune on all labels")
    parser.add_argument("--images", type=int, metavar="N", help="use the first N training images (default: all)")
    parser.add_argument("--random", action="store_true", help="also measure random weights")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run folders")
    add_output_arguments(parser)
    args = parser.parse_args()
    if args.processes > 1 and args.seeds > 1:
        rows = run_side_by_side(args)
        write_results(args, rows)
    else:
        rows = measure_variants(args, [*([GOAL] if args.goal else []), *(args.variant or [])] or ["pretrain-small"])
    print_summary(rows)


if __name__ == "__main__":
    main()
