"""Effect of FP8's rounding on training, without a GPU: loss curves of bf16 and of emulated FP8 from the same seeds.

    python benchmarks/fp8_training.py --json scratch.json                          # S/16 from scratch
    python benchmarks/fp8_training.py --json tuned.json --init-from vit_tiny_patch16_224.safetensors --image-size 112

CIFAR-10 resized to --image-size, AdamW with warm-up and cosine decay. A seed determines weights, order and
augmentation. With --init-from, all weights but the head start from a checkpoint, with layer-wise learning rates (0.75)
and drop path 0.1.

autocast    bf16 autocast on the CPU, as `vitral train` does
fp8         FP8 GEMMs forwards and for input gradients, weight gradients in bf16: a GPU below width 512
fp8-wgrad   weight gradients in FP8 too: from width 512

`_fp8_training.py` says what is emulated. Noise, "within noise" and the columns are those of gpu_curve.py. Finished runs
in the JSON file are not repeated, so that the benchmark can be run in pieces (--max-seconds).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import _fp8_training
from _output import add_output_arguments, write_results
from gpu_curve import compare_settings, summary_lines
from peers import VitralTraining
from vitral import weights
from vitral.data.augment import AugmentConfig
from vitral.data.datasets import load_builtin_dataset
from vitral.data.loader import Loader
from vitral.data.preprocess import Preprocessing, channel_stats
from vitral.device.select import select_hardware
from vitral.inference.forward import compute_logits
from vitral.models.presets import preset
from vitral.recipes.schema import DataConfig, OptimConfig, Recipe
from vitral.weights.adapt import adapt_weights

SETTINGS = ("autocast", "fp8", "fp8-wgrad")
Result = dict[str, Any]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["autocast", "fp8"])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--preset", default="S/16", help="architecture without --init-from (default: S/16)")
    parser.add_argument("--depth", type=int, help="another number of blocks than the preset's")
    parser.add_argument("--init-from", type=Path, metavar="FILE")
    parser.add_argument("--image-size", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--images", type=int, default=20_000, help="training images (default: 20,000)")
    parser.add_argument("--test-images", type=int, default=2000)
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="start no run after this time")
    add_output_arguments(parser)
    return parser.parse_args()


def run_training(setting: str, seed: int, args: argparse.Namespace) -> Result:
    """Train once; return the loss of each step and the test results."""
    dataset = load_builtin_dataset(args.data, validation=0.0)
    mean, std = channel_stats(dataset.train.images)
    size, C = (args.image_size, args.image_size), dataset.train.images.shape[1]
    overrides: dict[str, Any] = {"image_size": size, "channels": C, "num_classes": len(dataset.classes)}
    initial_weights: dict[str, Tensor] | None = None
    if args.init_from is None:
        model = preset(args.preset, **overrides, **({} if args.depth is None else {"depth": args.depth}))
    else:
        checkpoint = weights.read(args.init_from)
        model = replace(checkpoint.config, **overrides, drop_path=0.1)
        initial_weights = adapt_weights(checkpoint, "plain", model, dataset.classes).state
    recipe = Recipe(
        name="curve",
        data=DataConfig(name=args.data, validation=0.0, mean=mean, std=std),
        model=model,
        augment=AugmentConfig(shift=args.image_size // 14, flip=C == 3),
        optim=OptimConfig(lr=args.lr, weight_decay=0.05, layer_decay=1.0 if initial_weights is None else 0.75),
        batch_size=args.batch_size,
        seed=seed,
    )
    preprocessing = Preprocessing(image_size=size, channels=C, mean=mean, std=std)
    hardware = select_hardware(device="cpu", precision="bf16", compile="no")
    training = VitralTraining(recipe, preprocessing, hardware, args.steps, initial_weights=initial_weights)
    if setting != "autocast":
        _fp8_training.emulate_fp8(training.state.vit, fp8_wgrad=setting == "fp8-wgrad")
    train = dataset.train
    loader = Loader(
        images=train.images[: args.images], labels=train.labels[: args.images], batch_size=args.batch_size, seed=seed
    )
    sums, start = [0.0], time.perf_counter()
    for epoch in range(-(-args.steps // loader.steps_per_epoch)):
        for images, labels in loader.epoch(epoch):
            if len(sums) > args.steps:
                break
            training.step(resize(images, size), labels)
            sums.append(float(training.state.epoch_sums[0]))
    test_images, test_labels = dataset.test.images[: args.test_images], dataset.test.labels[: args.test_images]
    fp32 = select_hardware(device="cpu", precision="fp32", compile="no")
    logits = compute_logits(training.state.model.eval(), resize(test_images, size), preprocessing, fp32)
    return {
        "setting": setting,
        "seed": seed,
        "seconds": time.perf_counter() - start,
        "losses": [(after - before) / args.batch_size for before, after in pairwise(sums)],
        "test_loss": F.cross_entropy(logits, test_labels).item(),
        "test_top1": (logits.argmax(dim=1) == test_labels).double().mean().item(),
    }


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    resized = F.interpolate(images.float(), size=size, mode="bicubic", align_corners=False)
    return resized.round().clamp(0, 255).to(torch.uint8)


def main() -> None:
    args = parse_args()
    runs: list[Result] = []
    if args.json is not None and args.json.is_file():
        runs = json.loads(args.json.read_text())["runs"]
    _fp8_training.round_to_fp8 = torch.compile(_fp8_training.round_to_fp8, dynamic=True)
    started = time.perf_counter()
    for seed in range(args.seeds):
        for setting in args.settings:
            is_done = any((run["setting"], run["seed"]) == (setting, seed) for run in runs)
            if is_done or time.perf_counter() - started > args.max_seconds:
                continue
            runs.append(run_training(setting, seed, args))
            print(
                f"{setting}, seed {seed}: test loss {runs[-1]['test_loss']:.4f}, {runs[-1]['seconds']:.0f} s",
                flush=True,
            )
            write(args, runs)
    print("\n".join(summary_lines(write(args, runs))))


def write(args: argparse.Namespace, runs: list[Result]) -> Result:
    comparison = compare_settings(runs)
    rows = [{name: value for name, value in run.items() if name != "losses"} for run in runs]
    names = ("steps", "preset", "depth", "image_size", "batch_size", "lr", "data", "images")
    settings = {name: getattr(args, name) for name in names} | {"fine_tuning": args.init_from is not None}
    write_results(args, rows, {"training": settings, **comparison, "runs": runs}, dtype="fp8")
    return comparison


if __name__ == "__main__":
    main()
