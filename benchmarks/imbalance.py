"""Compare the options against class imbalance: none, balanced sampling, class weights and logit adjustment.

    python benchmarks/imbalance.py --long-tail mnist --recipe mnist-quick --factor 100 --seeds 3
    python benchmarks/imbalance.py --data hymenoptera --weights vit_tiny.safetensors --factor 10 --seeds 5

With --long-tail, the classes of a built-in dataset are thinned along an exponential from all images of the first class
to 1/factor of them for the last, as in CIFAR-10-LT. With --data, the first class of a folder with a train and a val
folder is thinned to 1/factor; 15% of the thinned training images select the epoch. All options see the same images;
seeds change the weights of a new head, the batch order and the augmentation. The test images are not thinned.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from _output import add_output_arguments, write_results
from vitral.data.datasets import VALIDATION_SEED, Split, stratified_holdout
from vitral.data.lazy_images import select_images
from vitral.device.select import select_hardware
from vitral.evaluation.metrics import compute_metrics
from vitral.inference.forward import compute_logits
from vitral.recipes.schema import Recipe
from vitral.runs.model_io import load_model
from vitral.runs.run import Run
from vitral.training.hardware import training_hardware
from vitral.training.setup import TrainingSetup, resolve_recipe, setup_training
from vitral.training.trainer import Trainer

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "balanced sampling": {"sampling": "balanced"},
    "class weights": {"class_weights": "balanced"},
    "logit adjustment": {"logit_adjustment": 1.0},
}


def thin(split: Split, counts: list[int], seed: int = 0) -> Split:
    """A split with at most `counts[k]` images of class k."""
    random, keep = np.random.RandomState(seed), torch.zeros(len(split), dtype=torch.bool)
    for label, count in enumerate(counts):
        members = np.flatnonzero(split.labels.numpy() == label)
        keep[torch.from_numpy(random.permutation(members)[: max(count, 1)])] = True
    return take(split, keep)


def take(split: Split, mask: Tensor) -> Split:
    return replace(split, images=select_images(split.images, mask), labels=split.labels[mask], locations=None)


def prepare(recipe: Recipe, factor: float, long_tail: bool) -> tuple[TrainingSetup, Split]:
    """The thinned training setup and the test images at the model's input size."""
    setup = setup_training(recipe)
    dataset, K = setup.dataset, len(setup.dataset.classes)
    sizes = torch.bincount(dataset.train.labels, minlength=K).tolist()
    if long_tail:
        counts = [int(max(sizes) * factor ** (-label / (K - 1))) for label in range(K)]
        test = dataset.test.to_model_input(setup.preprocessing)
        ratio = len(dataset.validation) / len(dataset.train)
        validation = thin(dataset.validation, [round(count * ratio) for count in counts])
        train = thin(dataset.train, counts)
    else:
        test = dataset.validation
        thinned = thin(dataset.train, [int(sizes[0] / factor), *sizes[1:]])
        held_out = torch.from_numpy(stratified_holdout(thinned.labels.numpy(), 0.15, seed=VALIDATION_SEED))
        train, validation = take(thinned, ~held_out), take(thinned, held_out).to_model_input(setup.preprocessing)
    return replace(setup, dataset=replace(dataset, train=train, validation=validation)), test


def run(setup: TrainingSetup, test: Split, seed: int, changes: dict[str, Any]) -> dict[str, float]:
    """Train once and evaluate the test images."""
    recipe = replace(setup.recipe, seed=seed, checkpoint_epochs=0, **changes)
    with tempfile.TemporaryDirectory() as folder:
        training = Run.create(Path(folder), "run", Path(folder) / "run")
        hardware = training_hardware(replace(setup, recipe=recipe))
        Trainer(
            recipe, setup.dataset, setup.preprocessing, training, hardware, initial_weights=setup.initial_weights
        ).fit()
        model, _ = load_model(training.path)
    fp32 = select_hardware(device=recipe.device, precision="fp32", compile="no")
    logits = compute_logits(model.to(fp32.device), test.images, setup.preprocessing, fp32)
    metrics = compute_metrics(logits.cpu(), test.labels, setup.dataset.classes)
    recalls = [each.recall for each in metrics.per_class]
    return {
        "accuracy": metrics.top1,
        "balanced_accuracy": statistics.mean(recalls),
        "worst_class": min(recalls),
        "rarest_class": recalls[-1] if len(recalls) > 2 else recalls[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--long-tail", metavar="DATASET", help="built-in dataset to thin along an exponential")
    source.add_argument("--data", help="folder with a train and a val folder, whose first class is thinned")
    parser.add_argument("--weights", help="checkpoint to fine-tune; default: train from scratch")
    parser.add_argument("--recipe", help="default: the recipe that suits the data")
    parser.add_argument("--factor", type=float, default=10.0, help="ratio of the largest class to the rarest")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int)
    add_output_arguments(parser)
    args = parser.parse_args()
    recipe = resolve_recipe(args.long_tail or args.data, args.recipe, args.weights)
    setup, test = prepare(replace(recipe, epochs=args.epochs or recipe.epochs), args.factor, bool(args.long_tail))
    counts = torch.bincount(setup.dataset.train.labels).tolist()
    print(f"{recipe.name} on {setup.dataset.name}, {setup.recipe.epochs} epochs; training images per class: {counts}")
    print(f"{len(test):,} test images, mean ± standard deviation of {args.seeds} seeds, in %")
    print(f"{'':<20}{'accuracy':>15}{'balanced':>15}{'worst class':>15}{'rarest class':>15}", flush=True)
    rows: list[dict[str, Any]] = []
    for option, changes in OPTIONS.items():
        results = [run(setup, test, seed, changes) for seed in range(args.seeds)]
        rows += [{"option": option, "seed": seed, **result} for seed, result in enumerate(results)]
        cells = []
        for name in results[0]:
            values = [100 * result[name] for result in results]
            cells.append(f"{statistics.mean(values):6.2f} ± {statistics.stdev(values) if args.seeds > 1 else 0:4.2f}")
        print(f"{option:<20}" + "".join(f"{cell:>15}" for cell in cells), flush=True)
        write_results(args, rows, {"training_images": counts, "factor": args.factor})


if __name__ == "__main__":
    main()
