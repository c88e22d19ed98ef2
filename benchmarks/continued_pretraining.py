"""Continue a pretraining on other images, with and without the moments of its optimizer.

    OMP_NUM_THREADS=1 python benchmarks/continued_pretraining.py --seeds 3 --save

A small ViT learns from one half of the images and then, with the same recipe, from the other half. k-NN accuracy is
leave-one-out over the first 2,000 test images. The run without moments changes the momentum of SGD, which the recipe
does not use, so that `vitral.pretrain` treats its optimizer as another one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import vitral
from _output import add_output_arguments, write_results
from vitral.data.datasets import load_builtin_dataset
from vitral.evaluation.feature_classifiers import leave_one_out_accuracy
from vitral.runs.run import Run

NUM_TEST_IMAGES = 2000
MODEL: dict[str, Any] = {
    "variant": "plain", "model.patch_size": 8, "model.width": 64, "model.depth": 3, "model.heads": 2,
    "model.mlp_width": 256, "batch_size": 128, "pretrain.views.local_views": 0,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "lejepa": {"pretrain.lejepa.hidden_width": 256},
    "dino": {"pretrain.dino.hidden_width": 256, "pretrain.dino.prototypes": 512},
}


def measure(method: str, seed: int, images: int, epochs: int, folder: Path) -> list[dict[str, Any]]:
    """The rows of a run that continues with its moments, and of one that starts with new ones."""
    dataset = load_builtin_dataset("cifar10", validation=0.0)
    halves = [list(dataset.train.images[start : start + images]) for start in (0, images)]
    start: dict[str, Any] = {"recipe": "pretrain-small", "method": method, "seed": seed, "epochs": epochs, "threads": 1}
    start |= {**MODEL, **METHODS[method]}
    vitral.pretrain(halves[0], out=folder / "first", **start)
    rows = []
    for carried in (False, True):
        changes: dict[str, Any] = {} if carried else {"optim.momentum": 0.5}
        out = folder / f"second-{carried}"
        model = vitral.pretrain(halves[1], init_from=folder / "first", out=out, **start, **changes).model
        features = model.features(dataset.test.images[:NUM_TEST_IMAGES])
        last = Run(out).load_metrics()[-1]
        knn = leave_one_out_accuracy(features, dataset.test.labels[:NUM_TEST_IMAGES], len(dataset.classes))
        row = {"method": method, "seed": seed, "carried": carried, "loss": last["train_loss"], "knn": knn}
        rows.append({**row, "effective_rank": last["effective_rank"]})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--method", action="append", choices=[*METHODS], help="default: all")
    parser.add_argument("--images", type=int, default=4000, help="of each half")
    parser.add_argument("--epochs", type=int, default=5, help="on each half")
    add_output_arguments(parser)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        for method in args.method or [*METHODS]:
            with tempfile.TemporaryDirectory() as folder:
                rows += measure(method, seed, args.images, args.epochs, Path(folder))
            write_results(args, rows)


if __name__ == "__main__":
    main()
