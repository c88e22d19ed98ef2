"""Cross-validate a fine-tuning; compare the estimate with the refit and the ensemble on held-out images.

    python benchmarks/cross_validation.py --data hymenoptera --weights vit_tiny.safetensors --folds 5 --seeds 3

The folder has a train and a val folder. Folds are made of the training images; the val folder is the held-out split,
which no fold contains. A single run on the training images is measured too. Seeds change the new head, the batch order
and the augmentation, not the folds.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import vitral
from _output import add_output_arguments, write_results
from vitral.training.cross_validation import write_ensemble


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with a train and a val folder")
    parser.add_argument("--weights", help="checkpoint to fine-tune; default: train from scratch")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--image-size", type=int, help="of a model that is trained from scratch")
    add_output_arguments(parser)
    args = parser.parse_args()
    overrides: dict[str, Any] = {"epochs": args.epochs} if args.epochs else {}
    if args.image_size:
        overrides["model.image_size"] = (args.image_size, args.image_size)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "photos"
        shutil.copytree(args.data / "train", data / "train")
        shutil.copytree(args.data / "val", data / "test")
        for seed in range(args.seeds):
            start = {"init_from": args.weights, "seed": seed, **overrides}
            rows.append(measure(data, Path(folder) / f"seed-{seed}", args.folds, start))
            print_row(rows[-1])
            write_results(args, rows)
    print(f"\nmean ± standard deviation of {args.seeds} seeds, in %")
    for name in ("mean_of_folds", "single", "refit", "ensemble"):
        values = [100 * row[name] for row in rows]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"  {name.replace('_', ' '):<16}{statistics.mean(values):6.2f} ± {spread:.2f}")


def measure(data: Path, out: Path, folds: int, start: dict[str, Any]) -> dict[str, Any]:
    single = vitral.train(data, out=out / "single", **start)
    result = vitral.cross_validate(data, folds=folds, out=out / "folds", **start)
    assert result.test is not None
    write_ensemble(out / "ensemble", [Path(fold.folder) for fold in result.folds], result.refit_epochs)
    ensemble = vitral.evaluate(out / "ensemble" / "model", data=str(data), split="test")
    return {
        "seed": start["seed"],
        "mean_of_folds": result.accuracy.value,
        "student_low": result.accuracy.low,
        "student_high": result.accuracy.high,
        "pooled": result.pooled.top1,
        "wilson_low": result.pooled.top1_low,
        "wilson_high": result.pooled.top1_high,
        "refit_epochs": result.refit_epochs,
        "held_out_images": result.test.images,
        "single": vitral.evaluate(single, split="test").top1,
        "refit": result.test.top1,
        "ensemble": ensemble.top1,
        **{f"fold_{fold.number}": fold.accuracy for fold in result.folds},
    }


def print_row(row: dict[str, Any]) -> None:
    print(
        f"seed {row['seed']}: folds {100 * row['mean_of_folds']:.2f}% "
        f"(t {100 * row['student_low']:.2f}-{100 * row['student_high']:.2f}, "
        f"Wilson {100 * row['wilson_low']:.2f}-{100 * row['wilson_high']:.2f}); "
        f"{row['held_out_images']} held-out images: "
        f"single run {100 * row['single']:.2f}%, refit {100 * row['refit']:.2f}%, "
        f"ensemble {100 * row['ensemble']:.2f}%",
        flush=True,
    )


if __name__ == "__main__":
    main()
