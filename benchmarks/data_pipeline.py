"""Image loading throughput: vitral compared with a torch DataLoader, on the same files and two CPU cores.

    python benchmarks/data_pipeline.py FOLDER [--scale 1] [--repeat 20] [--rounds 3] [--save]

dataloader   A DataLoader with two workers. Each image is opened with Pillow, cropped (RandomResizedCrop 224), flipped
             and normalised one at a time, with torchvision's operations on Pillow images written out.
first_epoch  vitral decodes with two workers into a packed file and yields every image once, as uint8.
packed       An epoch from the memory-mapped packed file.
augmented    The packed epoch including random crop, flip and normalisation of whole batches on the CPU.
streamed     An epoch without a packed file.

All yield shuffled batches of 64. The images of FOLDER are first written to a temporary folder as JPEGs (quality 90) at
`--scale` times their size, `--repeat` times. Each pipeline runs in its own process, alternating. Memory is the peak
over the process and its workers, without file caches (Pss_Anon + Pss_Shmem), sampled every 50 ms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from _output import add_output_arguments, environment, write_results

BATCH_SIZE, IMAGE_SIZE, NUM_WORKERS = 64, 224, 2
MEAN = STD = (0.5, 0.5, 0.5)


class PeakMemory:
    """Context manager that samples the memory of this process and its descendants; `peak` is in MiB."""

    def __enter__(self) -> PeakMemory:
        self.peak, self.stopped = 0.0, threading.Event()
        self.thread = threading.Thread(target=self._sample)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join()

    def _sample(self) -> None:
        while not self.stopped.wait(0.05):
            self.peak = max(self.peak, sum(map(memory_mib, process_tree(os.getpid()))))


def process_tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        threads = [entry.name for entry in Path(f"/proc/{pid}/task").iterdir() if entry.name != str(pid)]
        for thread in threads:  # children are listed under the thread that started them
            children += Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(process for child in children for process in process_tree(int(child)))]


def memory_mib(pid: int) -> float:
    try:
        rows = (row.split() for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        return sum(int(row[1]) for row in rows if row[0] in ("Pss_Anon:", "Pss_Shmem:")) / 1024
    except OSError:
        return 0.0


def time_epoch(make_batches: Callable[[], Iterable[Any]]) -> dict[str, float]:
    with PeakMemory() as memory:
        start, before = time.perf_counter(), os.times()
        images = sum(len(batch[1]) for batch in make_batches())
        seconds, after = time.perf_counter() - start, os.times()
    cpu_seconds = sum(after[:4]) - sum(before[:4])  # includes workers that have ended
    return {
        "images": images,
        "seconds": seconds,
        "images_per_second": images / seconds,
        "cpu_ms_per_image": 1000 * cpu_seconds / images,
        "peak_mib": memory.peak,
    }


def run_dataloader(folder: Path) -> dict[str, Any]:
    import numpy as np
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    files = sorted(folder.rglob("*.jpg"))
    classes = sorted({file.parent.name for file in files})
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)

    class Images(Dataset[tuple[torch.Tensor, int]]):
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            with Image.open(files[index]) as opened:
                image = opened.convert("RGB")
            image = random_resized_crop(image)
            if random.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
            return pixels.sub_(mean).div_(std), classes.index(files[index].parent.name)

    def random_resized_crop(image: Image.Image) -> Image.Image:
        for _ in range(10):
            area = image.width * image.height * random.uniform(0.08, 1)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < width <= image.width and 0 < height <= image.height:
                left, top = random.randint(0, image.width - width), random.randint(0, image.height - height)
                image = image.crop((left, top, left + width, top + height))
                break
        return image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR)

    loader = DataLoader(Images(), batch_size=BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS, drop_last=True)
    return {"dataloader": time_epoch(lambda: loader)}


def run_vitral(folder: Path) -> dict[str, Any]:
    import torch

    from vitral.data.augment import AugmentConfig
    from vitral.data.files.file_dataset import ReadOptions, load_file_dataset
    from vitral.data.loader import Loader
    from vitral.data.preprocess import Preprocessing

    torch.set_num_threads(NUM_WORKERS)
    preprocessing = Preprocessing(image_size=(IMAGE_SIZE, IMAGE_SIZE), channels=3, mean=MEAN, std=STD, crop=0.9)

    def loader(pack: float) -> Loader:
        train = load_file_dataset(folder, preprocessing, read_options=ReadOptions(pack=pack, workers=NUM_WORKERS)).train
        return Loader(images=train.images, labels=train.labels, batch_size=BATCH_SIZE, seed=0)

    results = {"first_epoch": time_epoch(lambda: loader(64.0).epoch(0))}  # includes writing the packed file
    packed = loader(64.0)
    results["packed"] = time_epoch(lambda: packed.epoch(1))
    rng, augment = torch.Generator().manual_seed(0), AugmentConfig(crop=0.4, flip=True)

    def augmented() -> Iterable[Any]:
        for images, labels in packed.epoch(2):
            yield preprocessing.normalise(augment.transform(images, rng, preprocessing.image_size)), labels

    results["augmented"] = time_epoch(augmented)
    streamed = loader(0.0)

    def streamed_epoch() -> Iterable[Any]:
        yield from streamed.epoch(0)
        images: Any = streamed.images
        images.close()

    results["streamed"] = time_epoch(streamed_epoch)
    return results


def write_images(source: Path, target: Path, scale: float, repeat: int) -> dict[str, Any]:
    """Class folders of JPEGs in train and val. The few in val are not timed."""
    from PIL import Image

    from vitral.data.decode import ImageDecodeError, decode_image
    from vitral.data.files.walk import find_images

    sizes = []
    for file in find_images([source]):
        try:
            image = decode_image(file).convert("RGB")
        except ImageDecodeError:
            continue
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
        sizes.append(image.size)
        for split, copies in (("train", repeat), ("val", 1 if len(sizes) % 20 < 2 else 0)):
            for copy in range(copies):
                path = target / split / file.parent.name / f"{file.stem}-{len(sizes)}-{copy}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                image.save(path, quality=90)
    width, height = (statistics.mean(side) for side in zip(*sizes, strict=True))
    return {"images": len(sizes) * repeat, "distinct_images": len(sizes), "mean_size": f"{width:.0f}x{height:.0f}"}


def run_process(pipeline: str, folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "VITRAL_HOME": home, "OMP_NUM_THREADS": str(NUM_WORKERS)}
        command = [sys.executable, __file__, str(folder), "--pipeline", pipeline]
        output = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
        results: dict[str, Any] = json.loads(output.splitlines()[-1])
        return results


def print_summary(rounds: list[dict[str, dict[str, float]]]) -> None:
    for name in rounds[0]:
        speeds = [results[name]["images_per_second"] for results in rounds]
        ratios = [
            speed / results["dataloader"]["images_per_second"] for speed, results in zip(speeds, rounds, strict=True)
        ]
        spread = statistics.stdev(speeds) if len(speeds) > 1 else 0.0
        print(
            f"{name:<12}{statistics.mean(speeds):8,.0f} ± {spread:4,.0f} images/s   "
            f"{statistics.mean(ratios):6.2f}x DataLoader ({min(ratios):.2f} - {max(ratios):.2f})   "
            f"{statistics.mean(results[name]['cpu_ms_per_image'] for results in rounds):5.2f} ms CPU per image   "
            f"peak {max(results[name]['peak_mib'] for results in rounds):,.0f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with one subfolder of images per class")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    add_output_arguments(parser)
    parser.add_argument("--pipeline", choices=["dataloader", "vitral"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pipeline:
        run = run_dataloader if args.pipeline == "dataloader" else run_vitral
        print(json.dumps(run(args.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        images = write_images(args.folder, Path(folder), args.scale, args.repeat)
        rounds = [
            run_process("dataloader", Path(folder) / "train") | run_process("vitral", Path(folder))
            for _ in range(args.rounds)
        ]
    packages = ("torch", "pillow")
    header = environment(packages)
    print(f"{images['images']} images ({images['distinct_images']} distinct, mean size {images['mean_size']})")
    print(f"{header['cpu']}, {NUM_WORKERS} workers, batch size {BATCH_SIZE}, {header['versions']}")
    print_summary(rounds)
    rows = [
        {"round": number, "pipeline": name, "mean_size": images["mean_size"], **figures}
        for number, results in enumerate(rounds, start=1)
        for name, figures in results.items()
    ]
    write_results(args, rows, {"data": images}, packages=packages)


if __name__ == "__main__":
    main()
