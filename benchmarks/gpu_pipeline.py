"""Training from JPEG photographs: is the GPU ever kept waiting?

    python benchmarks/gpu_pipeline.py [--sizes B/16 S/16] [--images 24000] [--precision auto] [--out gpu_pipeline.json]

Photographs of about 500×375 pixels are made (smooth random fields, as large as JPEGs as real ones), packed by the
product, and trained on at 224 px with random crops and mirroring, by the product's own step. Two trainings take turns
on the same model: from the packed file, mapped and sent batch by batch as it is for a set larger than the GPU's memory,
and from the same pixels already on the GPU. The ratio of their speeds is what is asked for; its goal is 0.95. Each turn
begins with steps that are not timed, so that nothing counts that was gathered while the other had its turn.

Beside it: how many images a second the packed file gives when nobody computes, and how long packing took. Without a
GPU there is no ratio to speak of: a toy version shows that everything runs.
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
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from contestants import BATCH, NEEDS_A_GPU, Training, configuration, on_gpu, wait, what_failed

GOAL = 0.95
CLASSES = 10
WARMING = 8  # steps of a turn that are not timed: more than are gathered ahead


def photograph(seed: int, into: Path, scale: float) -> int:
    """A picture with structure at every size, as a JPEG; returns its bytes."""
    import numpy as np
    from PIL import Image

    draws = np.random.default_rng(seed)
    width, height = (round(side * scale * draws.uniform(0.8, 1.2)) for side in (500, 375))
    if draws.random() < 0.3:
        width, height = height, width
    picture = np.full((height, width, 3), draws.uniform(60, 190, 3))
    cells = 3.0
    while cells < min(width, height):
        small = draws.normal(size=(round(cells * height / width) + 2, round(cells) + 2, 3))
        small = 0.7 * small[:, :, :1] + 0.3 * small  # mostly lightness, a little colour
        spread = Image.fromarray(((small + 4) * 32).clip(0, 255).astype(np.uint8))
        field = np.asarray(spread.resize((width, height), Image.Resampling.BICUBIC), float) / 32 - 4
        picture += field * 60 / cells**0.2
        cells *= 2
    file = into / f"kind{seed % CLASSES}" / f"{seed:06}.jpg"
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(file, quality=90)
    return file.stat().st_size


def write_photographs(folder: Path, images: int, different: int, scale: float) -> dict[str, Any]:
    """Class folders below train and val; beyond `different`, names of files that are there already."""
    train = folder / "train"
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        sizes = list(pool.map(photograph, range(different), [train] * different, [scale] * different, chunksize=8))
    files = sorted(train.rglob("*.jpg"))
    for number in range(different, images):
        file = files[number % different]
        os.link(file, file.with_name(f"{number:06}-{file.name}"))
    for file in files[: 2 * CLASSES * 8 : 8]:
        place = folder / "val" / file.parent.name / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        os.link(file, place)
    return {"images": images, "different": different, "kilobytes": statistics.mean(sizes) / 1e3}


def recipe_for(folder: Path, size: str) -> Any:
    from dataclasses import replace

    from vitral.data.augment import Augment
    from vitral.recipes.schema import Data, Optim, Recipe

    return Recipe(
        name="pipeline",
        data=Data(name=str(folder), crop=0.9, mean=(0.5,) * 3, std=(0.25,) * 3),
        model=replace(configuration(size), classes=CLASSES),
        augment=Augment(crop=0.35, flip=True),
        optim=Optim(lr=1e-4),
        batch=BATCH["train"][size],
        label_smoothing=0.1,
    )


def forever(loader: Any) -> Iterator[tuple[Any, Any]]:
    epoch = 0
    while True:
        yield from loader.epoch(epoch)
        epoch += 1


def play(folder: Path, size: str, asked: argparse.Namespace) -> dict[str, Any]:
    """One size: the two trainings, turn about."""
    import torch

    from vitral.data.loader import Loader, on_device
    from vitral.device.hardware import choose
    from vitral.training.setup import prepare

    prepared = prepare(recipe_for(folder, size))
    recipe, split, batch = prepared.recipe, prepared.dataset.train, prepared.recipe.batch
    hardware = choose(precision=asked.precision, width=recipe.model.width, scratch=True)
    training = Training(recipe, prepared.preprocessing, hardware, steps=100_000)
    labels = split.labels.to(hardware.device)
    packed = Loader(images=split.images, labels=labels, batch=batch, seed=0)
    there = Loader(images=on_device(split.images, hardware), labels=labels, batch=batch, seed=0)
    ways = {"on the GPU": forever(there), "packed": forever(packed)}
    found: dict[str, Any] = {
        "size": size, "batch": batch, "chosen": str(hardware), "pack_gib": split.images.nbytes / 2**30,
    }  # fmt: skip

    def turn(batches: Iterator[tuple[Any, Any]], steps: int) -> float:
        """Images a second."""
        for images, labels in islice(batches, WARMING):
            training.step(images, labels)
        wait()
        began = time.perf_counter()
        for images, labels in islice(batches, steps):
            training.step(images, labels)
        wait()
        return steps * batch / (time.perf_counter() - began)

    def read_only(steps: int) -> float:
        wait()
        began = time.perf_counter()
        for images, _ in islice(ways["packed"], steps):
            images.sum()  # somebody looks at it
        wait()
        return steps * batch / (time.perf_counter() - began)

    turn(ways["on the GPU"], 4)  # compile, record
    turn(ways["packed"], packed.steps)  # touch every page of the file
    found["read_only"] = statistics.median(read_only(asked.steps) for _ in range(3))
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(asked.rounds):
        for name, batches in ways.items():
            speeds[name].append(turn(batches, asked.steps))
    ratios = [mine / best for mine, best in zip(speeds["packed"], speeds["on the GPU"], strict=True)]
    found["images_per_second"], found["ratios"] = speeds, ratios
    found["ratio"], found["goal"] = statistics.median(ratios), GOAL
    if on_gpu():
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["B/16", "S/16"])
    parser.add_argument("--images", type=int, default=24_000)
    parser.add_argument("--different", type=int, default=2_000, help="of them; the others are further names of these")
    parser.add_argument("--steps", type=int, default=50, help="timed steps of a turn")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for a size")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--play", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.play:
        try:
            print(json.dumps(play(asked.folder, asked.play, asked)))
        except Exception as error:
            print(json.dumps({"size": asked.play, "failed": what_failed(error)}))
        return
    import torch

    scale = 1.0
    if not on_gpu():
        print(NEEDS_A_GPU)
        asked.sizes, asked.images, asked.different, asked.steps, asked.rounds, scale = ["toy"], 300, 40, 4, 2, 0.2
    with tempfile.TemporaryDirectory(prefix="pipeline-") as place:
        os.environ["VITRAL_HOME"] = str(Path(place) / "home")
        folder = Path(place) / "photos"
        began = time.perf_counter()
        about = write_photographs(folder, asked.images, min(asked.different, asked.images), scale)
        about["making_s"] = time.perf_counter() - began

        from vitral.training.setup import prepare

        began = time.perf_counter()
        prepare(recipe_for(folder, asked.sizes[0]))
        about["packing_s"] = time.perf_counter() - began
        about |= {
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if on_gpu() else None,
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(["python", *sys.argv]),
        }
        print(
            f"{about['gpu'] or 'no GPU'}, {about['cores']} cores, torch {about['torch']} · {asked.images:,} JPEGs of "
            f"{about['kilobytes']:.0f} kB, packed in {about['packing_s']:.1f} s "
            f"({asked.images / about['packing_s']:,.0f} images/s)",
            flush=True,
        )
        rows: list[dict[str, Any]] = []
        for size in asked.sizes:
            words = [sys.executable, __file__, "--play", size, "--folder", str(folder), "--precision", asked.precision]
            words += ["--steps", str(asked.steps), "--rounds", str(asked.rounds)]
            try:
                done = subprocess.run(words, capture_output=True, text=True, timeout=asked.timeout)
                last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1:]
                rows.append(json.loads(last[0]) if done.returncode == 0 else {"size": size, "failed": last})
            except subprocess.TimeoutExpired:
                rows.append({"size": size, "failed": f"no answer within {asked.timeout:.0f} s"})
            print(line(rows[-1]), flush=True)
            if asked.out:
                asked.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


def line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['size']}: {row['failed']}"
    packed, there = (statistics.median(row["images_per_second"][name]) for name in ("packed", "on the GPU"))
    return (
        f"{row['size']}, batch {row['batch']}: {packed:,.0f} images/s from the packed file, {there:,.0f} from the "
        f"GPU's memory, ratio {row['ratio']:.3f} ({min(row['ratios']):.3f} – {max(row['ratios']):.3f}, goal {GOAL}); "
        f"{row['read_only']:,.0f} images/s when nobody computes"
    )


if __name__ == "__main__":
    main()
