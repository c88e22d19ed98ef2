"""Token merging (ToMe): accuracy and speed for several numbers r of tokens that each block merges.

    python benchmarks/token_merging.py MODEL FOLDER [--labels ants=310 bees=309] [--r 0 4 8 13 16] [--engine bf16]

MODEL is a run or a checkpoint. FOLDER holds one folder per class; --labels maps their names to the model's classes
(default: equal names). Reported for each r: top-1 accuracy among all classes, the accuracy of choosing among the named
classes only, the share of images that keep the top-1 label of r = 0, tokens per block, and images per second, measured
in turns, with their ratio to r = 0.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _output import add_output_arguments, write_results
from vitral.data.decode import ImageDecodeError, decode_image
from vitral.data.files.walk import find_images
from vitral.inference.predictor import Predictor
from vitral.models.token_merging import tokens_per_block


def load_labelled(folder: Path, predictor: Predictor, labels: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W) at the model's size and their classes."""
    images, targets = [], []
    for name, index in labels.items():
        for file in find_images([folder / name]):
            try:
                images.append(predictor.model_config.preprocessing.resize_and_crop(decode_image(file)))
                targets.append(index)
            except ImageDecodeError as error:
                print(f"skipped: {error}")
    return torch.stack(images), torch.tensor(targets)


def accuracy_columns(logits: Tensor, targets: Tensor, plain: Tensor, labels: dict[str, int]) -> dict[str, float]:
    classes = torch.tensor(sorted(labels.values()))
    chosen = classes[logits[:, classes].argmax(1)]
    return {
        "top1": float((logits.argmax(1) == targets).double().mean()),
        "choice": float((chosen == targets).double().mean()),
        "same_label": float((logits.argmax(1) == plain.argmax(1)).double().mean()),
    }


def time_in_turns(engines: dict[int, Any], images: Tensor, batch_size: int, rounds: int) -> dict[int, float]:
    """Median images per second. Every round runs each engine on the same batch."""
    seconds: dict[int, list[float]] = {r: [] for r in engines}
    batch = images.repeat(-(-batch_size // len(images)), 1, 1, 1)[:batch_size]
    for round_index in range(rounds + 1):
        for r, engine in engines.items():
            start = time.perf_counter()
            engine(batch)
            if round_index:
                seconds[r].append(time.perf_counter() - start)
    return {r: batch_size / statistics.median(values) for r, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--labels", nargs="+", metavar="FOLDER=INDEX", help="class index of each folder")
    parser.add_argument("--r", type=int, nargs="+", default=[0, 4, 8, 13, 16])
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--batch-size", type=int, default=0, help="of the speed (default: 16, on a GPU 256)")
    parser.add_argument("--rounds", type=int, default=7)
    add_output_arguments(parser)
    args = parser.parse_args()
    predictors = {
        r: Predictor.load(args.model, engine=args.engine, tome_r=r, throughput=True) for r in sorted({0, *args.r})
    }
    plain = predictors[0]
    names = dict(label.split("=") for label in args.labels or ())
    labels = {name: int(index) for name, index in names.items()} or {n: i for i, n in enumerate(plain.classes)}
    images, targets = load_labelled(args.folder, plain, labels)
    batch_size = args.batch_size or (16 if plain.hardware.device.type == "cpu" else 256)
    print(f"{args.model}: {len(images)} images, {plain.hardware.name}, batches of {batch_size}")
    logits = {r: predictor.logits(images) for r, predictor in predictors.items()}
    on_device = images[: max(batch_size, 1)].to(plain.hardware.device)
    speeds = time_in_turns({r: p.engine.engine for r, p in predictors.items()}, on_device, batch_size, args.rounds)
    rows: list[dict[str, Any]] = []
    config = plain.model_config.architecture
    for r, predictor in predictors.items():
        tokens = tokens_per_block(config.grid, config.num_prefix_tokens, config.depth, r)
        row = {"r": r, "engine": predictor.engine.name, **accuracy_columns(logits[r], targets, logits[0], labels)}
        rows.append(row | {"last_block_tokens": tokens[-1], "batch_size": batch_size, "images_per_second": speeds[r],
                           "speedup": speeds[r] / speeds[0]})  # fmt: skip
        print(f"r = {r:2}  {predictor.engine.name:16} top-1 {row['top1']:.2%}  choice {row['choice']:.2%}  same label "
              f"{row['same_label']:.2%}  {speeds[r]:,.1f} images/s ({speeds[r] / speeds[0]:.2f}x)")  # fmt: skip
    write_results(args, rows, {"model": args.model, "images": len(images)}, packages=("torch",))


if __name__ == "__main__":
    main()
