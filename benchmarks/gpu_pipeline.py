"""Training from JPEG files: how much data loading slows down the GPU.

    python benchmarks/gpu_pipeline.py [--models B/16 S/16] [--images 24000] [--precision auto] [--save]

Synthetic photographs of about 500x375 pixels (smooth random fields whose JPEGs are as large as real ones) are packed
by vitral and used for training at 224 px with random crops and flips, with vitral's own training step. Two trainings of
the same model alternate: from the memory-mapped packed file, copied batch by batch as for a dataset larger than the
GPU's memory, and from the same pixels already in GPU memory. Reported is the ratio of their speeds; the goal is 0.95.
Each round starts with untimed steps, so that batches prefetched during the other training do not count.

Also reported: the throughput of reading the packed file alone, and the packing time. Without a GPU a toy version shows
that everything runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _output import add_output_arguments, environment, write_results
from peers import BATCH_SIZES, NO_GPU_NOTICE, VitralTraining, error_summary, has_gpu, model_config, synchronize

if TYPE_CHECKING:
    from torch import Tensor

    from vitral.data.loader import Loader
    from vitral.recipes.schema import Recipe

    Batches = Iterator[tuple[Tensor, Tensor]]

GOAL = 0.95
NUM_CLASSES = 10
WARMUP_STEPS = 8  # untimed steps of a round: more than are prefetched


def write_photograph(seed: int, folder: Path, scale: float) -> int:
    """A JPEG with structure at every scale; returns its size in bytes."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    width, height = (round(side * scale * rng.uniform(0.8, 1.2)) for side in (500, 375))
    if rng.random() < 0.3:
        width, height = height, width
    pixels = np.full((height, width, 3), rng.uniform(60, 190, 3))
    cells = 3.0
    while cells < min(width, height):
        noise = rng.normal(size=(round(cells * height / width) + 2, round(cells) + 2, 3))
        noise = 0.7 * noise[:, :, :1] + 0.3 * noise  # mostly luminance, some colour
        small = Image.fromarray(((noise + 4) * 32).clip(0, 255).astype(np.uint8))
        field = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC), float) / 32 - 4
        pixels += field * 60 / cells**0.2
        cells *= 2
    file = folder / f"class{seed % NUM_CLASSES}" / f"{seed:06}.jpg"
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, quality=90)
    return file.stat().st_size


def write_photographs(folder: Path, num_images: int, num_distinct: int, scale: float) -> dict[str, Any]:
    """Class folders in train and val. Images beyond `num_distinct` are hard links to earlier ones."""
    train = folder / "train"
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        arguments = range(num_distinct), [train] * num_distinct, [scale] * num_distinct
        sizes = list(pool.map(write_photograph, *arguments, chunksize=8))
    files = sorted(train.rglob("*.jpg"))
    for number in range(num_distinct, num_images):
        file = files[number % num_distinct]
        os.link(file, file.with_name(f"{number:06}-{file.name}"))
    for file in files[: 2 * NUM_CLASSES * 8 : 8]:
        link = folder / "val" / file.parent.name / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        os.link(file, link)
    return {"images": num_images, "distinct_images": num_distinct, "mean_kilobytes": statistics.mean(sizes) / 1e3}


def make_recipe(folder: Path, model: str) -> Recipe:
    from vitral.data.augment import AugmentConfig
    from vitral.recipes.schema import DataConfig, OptimConfig, Recipe

    return Recipe(
        name="pipeline",
        data=DataConfig(name=str(folder), crop=0.9, mean=(0.5,) * 3, std=(0.25,) * 3),
        model=replace(model_config(model), num_classes=NUM_CLASSES),
        augment=AugmentConfig(crop=0.35, flip=True),
        optim=OptimConfig(lr=1e-4),
        batch_size=BATCH_SIZES["train"][model],
        label_smoothing=0.1,
    )


def endless_batches(loader: Loader) -> Batches:
    epoch = 0
    while True:
        yield from loader.epoch(epoch)
        epoch += 1


def train_images_per_second(training: VitralTraining, batches: Batches, steps: int, batch_size: int) -> float:
    for images, labels in islice(batches, WARMUP_STEPS):
        training.step(images, labels)
    synchronize()
    start = time.perf_counter()
    for images, labels in islice(batches, steps):
        training.step(images, labels)
    synchronize()
    return steps * batch_size / (time.perf_counter() - start)


def read_images_per_second(batches: Batches, steps: int, batch_size: int) -> float:
    synchronize()
    start = time.perf_counter()
    for images, _ in islice(batches, steps):
        images.sum()  # touches every pixel
    synchronize()
    return steps * batch_size / (time.perf_counter() - start)


def run_worker(folder: Path, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Both trainings of one model, alternating."""
    import torch

    from vitral.data.loader import Loader, to_device_if_fits
    from vitral.training.hardware import training_hardware
    from vitral.training.setup import setup_training

    setup = setup_training(make_recipe(folder, model))
    recipe, train, batch_size = setup.recipe, setup.dataset.train, setup.recipe.batch_size
    hardware = training_hardware(replace(setup, recipe=recipe.with_overrides({"precision": args.precision})))
    training = VitralTraining(recipe, setup.preprocessing, hardware, total_steps=100_000)
    labels = train.labels.to(hardware.device)
    packed_loader = Loader(images=train.images, labels=labels, batch_size=batch_size, seed=0)
    resident_images = to_device_if_fits(train.images, hardware)
    packed = endless_batches(packed_loader)
    resident = endless_batches(Loader(images=resident_images, labels=labels, batch_size=batch_size, seed=0))
    train_images_per_second(training, resident, 4, batch_size)  # compile and capture
    train_images_per_second(training, packed, packed_loader.steps_per_epoch, batch_size)  # read every page of the file
    read_speed = statistics.median(read_images_per_second(packed, args.steps, batch_size) for _ in range(3))
    rounds = []
    for _ in range(args.rounds):
        resident_speed = train_images_per_second(training, resident, args.steps, batch_size)
        packed_speed = train_images_per_second(training, packed, args.steps, batch_size)
        rounds.append({"packed": packed_speed, "resident": resident_speed, "ratio": packed_speed / resident_speed})
    images: Any = train.images
    return {
        "model": model,
        "batch_size": batch_size,
        "hardware": str(training.backend.hardware),
        "pack_gib": images.nbytes / 2**30,
        "read_images_per_second": read_speed,
        "rounds": rounds,
        "ratio": statistics.median(figures["ratio"] for figures in rounds),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if has_gpu() else None,
    }


def run_process(model: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", model, "--folder", str(folder), "--precision", args.precision]
    command += ["--steps", str(args.steps), "--rounds", str(args.rounds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"model": model, "failed": f"no result within {args.timeout:.0f} s"}
    last_line = ((done.stderr if done.returncode else done.stdout).strip().splitlines() or ["no output"])[-1]
    if done.returncode:
        return {"model": model, "failed": last_line}
    result: dict[str, Any] = json.loads(last_line)
    return result


def format_result(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"{result['model']}: {result['failed']}"
    packed, resident = (
        statistics.median(figures[name] for figures in result["rounds"]) for name in ("packed", "resident")
    )
    ratios = [figures["ratio"] for figures in result["rounds"]]
    return (
        f"{result['model']}, batch size {result['batch_size']}: {packed:,.0f} images/s from the packed file, "
        f"{resident:,.0f} from GPU memory, ratio {result['ratio']:.3f} ({min(ratios):.3f} - {max(ratios):.3f}, "
        f"goal {GOAL}); reading alone {result['read_images_per_second']:,.0f} images/s"
    )


def csv_rows(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per model and round."""
    rows = []
    for result in results:
        shared = {key: value for key, value in result.items() if key not in ("rounds", "ratio")}
        for number, figures in enumerate(result.get("rounds", [{}]), start=1):
            rows.append(shared | {"round": number, **figures})
    return rows


def measure(args: argparse.Namespace, scale: float) -> None:
    from vitral.training.setup import setup_training

    with tempfile.TemporaryDirectory(prefix="pipeline-") as temporary:
        os.environ["VITRAL_HOME"] = str(Path(temporary) / "home")
        folder = Path(temporary) / "photos"
        data = write_photographs(folder, args.images, min(args.distinct, args.images), scale)
        start = time.perf_counter()
        setup_training(make_recipe(folder, args.models[0]))
        data["packing_s"] = time.perf_counter() - start
        header = environment()
        print(
            f"{header['gpu'] or header['cpu']}, {header['cpus']} CPUs, torch {header['versions']['torch']}; "
            f"{args.images:,} JPEGs of {data['mean_kilobytes']:.0f} kB, packed in {data['packing_s']:.1f} s "
            f"({args.images / data['packing_s']:,.0f} images/s)",
            flush=True,
        )
        results: list[dict[str, Any]] = []
        for model in args.models:
            results.append(run_process(model, folder, args))
            print(format_result(results[-1]), flush=True)
            write_results(args, csv_rows(results), {"data": data, "results": results})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["B/16", "S/16"])
    parser.add_argument("--images", type=int, default=24_000)
    parser.add_argument("--distinct", type=int, default=2_000, help="distinct images; the others are links to them")
    parser.add_argument("--steps", type=int, default=50, help="timed steps per round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds per model")
    add_output_arguments(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        try:
            print(json.dumps(run_worker(args.folder, args.worker, args)))
        except Exception as error:
            print(json.dumps({"model": args.worker, "failed": error_summary(error)}))
        return
    scale = 1.0
    if not has_gpu():
        print(NO_GPU_NOTICE)
        args.models, args.images, args.distinct, args.steps, args.rounds, scale = ["toy"], 300, 40, 4, 2, 0.2
    measure(args, scale)


if __name__ == "__main__":
    main()
