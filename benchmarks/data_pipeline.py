"""Image loading throughput: vitral compared with a torch DataLoader, on the same files and two CPU cores.

    python benchmarks/data_pipeline.py FOLDER [--megapixels 12 --grain 6] [--repeat 20] [--rounds 3] [--quick]
        [--pipelines dataloader fingerprints ...] [--trees BEFORE .]

dataloader   A DataLoader with two workers. Each image is opened with Pillow, cropped (RandomResizedCrop 224), flipped
             and normalised one at a time, with torchvision's operations on Pillow images written out.
draft        The same DataLoader with Pillow's draft mode: the JPEG decoder reduces the image by 2, 4 or 8, as long as
             the image still covers 248 pixels.
kept_memory  The first DataLoader with the settings of glibc that vitral's command line makes (`vitral.device.malloc`).
simplejpeg   A DataLoader tuned by hand, if simplejpeg is installed: decoded at the reduced size, the crop resized by
             torch and delivered as uint8, not normalised; with the same settings of glibc.
first_epoch  vitral decodes with two threads into a packed file, then yields every image once, as uint8.
fingerprints The same, and computes the fingerprints that recognise copies of training images, as `vitral train` does.
overlapped   first_epoch while it packs, as for sets of at least 2 GiB: batches are yielded as soon as they are decoded.
             Ends when the pack is complete.
packed       An epoch from the memory-mapped packed file.
validation   Reads the validation images, decoded in full, as `predict` decodes them.
augmented    The packed epoch including random crop, flip and normalisation of whole batches on the CPU.
streamed     An epoch without a packed file.

`first_batch_seconds` is the time to the first batch, without imports. All yield shuffled batches of 64. The images of
FOLDER are first written to a temporary folder (or to `--folder`, which is reused if it exists) as JPEGs (quality 90) at
`--scale` times their size, `--repeat` times. With `--megapixels` they are enlarged to that size at 4:3, and `--grain`
adds uniform noise of that amplitude, because enlarged photographs are smoother than those of a camera. Each pipeline
runs in its own process, alternating; those of vitral run from each of `--trees`, checkouts of it. Those of vitral keep
freed memory, as its command line does. Memory is the peak over the process and its workers, without file caches
(Pss_Anon + Pss_Shmem), sampled every 0.5 s.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from _output import add_output_arguments, environment, write_results

BATCH_SIZE, IMAGE_SIZE, NUM_WORKERS = 64, 224, 2
STORED_SIZE = 248  # shorter side of stored training images
PIPELINES = ("dataloader", "draft", "kept_memory", "simplejpeg", "vitral", "fingerprints", "overlapped")
OWN = ("vitral", "fingerprints", "overlapped")
SAMPLE_SECONDS = 0.5  # sampling every 50 ms slowed a process with mapped files by a third
MEAN = STD = (0.5, 0.5, 0.5)
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}


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
        while not self.stopped.wait(SAMPLE_SECONDS):
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
        images, first_batch = 0, 0.0
        for batch in make_batches():
            first_batch = first_batch or time.perf_counter() - start
            images += len(batch[1])
        seconds, after = time.perf_counter() - start, os.times()
    cpu_seconds = sum(after[:4]) - sum(before[:4])  # includes workers that have ended
    return {
        "images": images,
        "seconds": seconds,
        "images_per_second": images / seconds,
        "first_batch_seconds": first_batch,
        "cpu_ms_per_image": 1000 * cpu_seconds / images,
        "peak_mib": memory.peak,
    }


def run_dataloader(folder: Path, pipeline: str) -> dict[str, Any]:
    import numpy as np
    import torch
    import torch.nn.functional as F
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    files = sorted(folder.rglob("*.jpg"))
    classes = sorted({file.parent.name for file in files})
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)

    class Images(Dataset[tuple[torch.Tensor, int]]):
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            load = load_with_simplejpeg if pipeline == "simplejpeg" else load_with_pillow
            return load(files[index]), classes.index(files[index].parent.name)

    def load_with_pillow(file: Path) -> torch.Tensor:
        with Image.open(file) as opened:
            if pipeline == "draft":
                short = min(opened.size)
                opened.draft("RGB", (opened.width * STORED_SIZE // short, opened.height * STORED_SIZE // short))
            image = opened.convert("RGB")
        left, top, width, height = random_box(image.width, image.height)
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
        return pixels.sub_(mean).div_(std)

    def load_with_simplejpeg(file: Path) -> torch.Tensor:
        simplejpeg = importlib.import_module("simplejpeg")  # in no extra
        content = file.read_bytes()
        size = {"min_height": STORED_SIZE, "min_width": STORED_SIZE}
        array = simplejpeg.decode_jpeg(content, "RGB", fastdct=True, fastupsample=True, min_factor=1, **size)
        left, top, width, height = random_box(array.shape[1], array.shape[0])
        image = torch.from_numpy(array[top : top + height, left : left + width]).permute(2, 0, 1)[None]
        image = F.interpolate(image, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", antialias=True)[0]
        return image.flip(2) if random.random() < 0.5 else image.contiguous()

    def random_box(image_width: int, image_height: int) -> tuple[int, int, int, int]:
        """Left, top, width and height."""
        for _ in range(10):
            area = image_width * image_height * random.uniform(0.08, 1)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < width <= image_width and 0 < height <= image_height:
                return random.randint(0, image_width - width), random.randint(0, image_height - height), width, height
        return 0, 0, image_width, image_height

    loader = DataLoader(Images(), batch_size=BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS, drop_last=True)
    return {pipeline: time_epoch(lambda: loader)}


def load_training_images(folder: Path, *, pack: float = 64.0, fingerprints: bool = False) -> Any:
    """A loader of the training images: those of the DataLoader."""
    from vitral.data.files.file_dataset import ReadOptions, list_images, read_listing
    from vitral.data.loader import Loader

    listing, options = list_images(folder, 0.0), ReadOptions(pack=pack, workers=NUM_WORKERS)
    listing = replace(listing, splits={**listing.splits, "validation": []})
    train = read_listing(listing, make_preprocessing(), options, fingerprints=fingerprints).train
    return Loader(images=train.images, labels=train.labels, batch_size=BATCH_SIZE, seed=0)


def make_preprocessing() -> Any:
    import torch

    for name in ("files.file_dataset", "loader"):
        importlib.import_module(f"vitral.data.{name}")  # imports are not timed
    from vitral.data.preprocess import Preprocessing
    from vitral.device.malloc import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(NUM_WORKERS)
    crop = IMAGE_SIZE / STORED_SIZE
    return Preprocessing(image_size=(IMAGE_SIZE, IMAGE_SIZE), channels=3, mean=MEAN, std=STD, crop=crop)


def run_vitral(folder: Path, quick: bool) -> dict[str, Any]:
    import torch

    from vitral.data.augment import AugmentConfig, augment_batch
    from vitral.data.files.file_dataset import ReadOptions, list_images, read_listing

    preprocessing = make_preprocessing()
    results = {"first_epoch": time_epoch(lambda: load_training_images(folder).epoch(0))}  # writes the packed file
    packed = load_training_images(folder)
    results["packed"] = time_epoch(lambda: packed.epoch(1))

    def validation_images() -> Iterable[Any]:
        listing = list_images(folder, 0.0)
        listing = replace(listing, splits={**listing.splits, "train": []})
        validation = read_listing(listing, preprocessing, ReadOptions(workers=NUM_WORKERS)).validation
        yield validation.images, validation.labels

    results["validation"] = time_epoch(validation_images)
    if quick:
        return results
    rng, augment = torch.Generator().manual_seed(0), AugmentConfig(crop=0.4, flip=True)

    def augmented() -> Iterable[Any]:
        for images, labels in packed.epoch(2):
            yield augment_batch(augment, preprocessing, 2, images, labels, rng)

    results["augmented"] = time_epoch(augmented)
    streamed = load_training_images(folder, pack=0.0)

    def streamed_epoch() -> Iterable[Any]:
        yield from streamed.epoch(0)
        images: Any = streamed.images
        images.close()

    results["streamed"] = time_epoch(streamed_epoch)
    return results


def run_fingerprints(folder: Path) -> dict[str, Any]:
    make_preprocessing()
    return {"fingerprints": time_epoch(lambda: load_training_images(folder, fingerprints=True).epoch(0))}


def run_overlapped(folder: Path) -> dict[str, Any]:
    from vitral.data.files import file_dataset
    from vitral.data.files.packing_images import PackingImages

    make_preprocessing()
    file_dataset.MIN_BYTES_TO_DEFER = 0

    def epoch() -> Iterable[Any]:
        loader = load_training_images(folder)
        yield from loader.epoch(0)
        assert isinstance(loader.images, PackingImages)
        assert loader.images.packed is not None

    return {"overlapped": time_epoch(epoch)}


def enlarge(image: Any, megapixels: float, grain: int, seed: int) -> Any:
    """The image at this size, cropped to 4:3 or 3:4, with noise of amplitude `grain` in all channels alike."""
    import numpy as np
    from PIL import Image, ImageOps

    long, short = round(math.sqrt(megapixels * 1e6 * 4 / 3)), round(math.sqrt(megapixels * 1e6 * 3 / 4))
    size = (long, short) if image.width >= image.height else (short, long)
    image = ImageOps.fit(image, size, Image.Resampling.BICUBIC)
    if not grain:
        return image
    noise = np.random.default_rng(seed).integers(-grain, grain + 1, (image.height, image.width, 1), dtype=np.int16)
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def write_images(args: argparse.Namespace, target: Path) -> dict[str, Any]:
    """Class folders of JPEGs in train and val. The few in val are not timed."""
    from PIL import Image

    from vitral.data.decode import ImageDecodeError, decode_image
    from vitral.data.files.walk import find_images

    if (description := target / "images.json").is_file():
        images: dict[str, Any] = json.loads(description.read_text())
        return images
    sizes, num_bytes = list[tuple[int, int]](), list[int]()
    for file in sorted(find_images([args.images]))[:: args.every][: args.max_images]:
        try:
            image = decode_image(file).convert("RGB")
        except ImageDecodeError:
            continue
        if args.megapixels:
            image = enlarge(image, args.megapixels, args.grain, len(sizes))
        else:
            size = round(image.width * args.scale), round(image.height * args.scale)
            image = image.resize(size, Image.Resampling.BICUBIC)
        sizes.append(image.size)
        content = io.BytesIO()
        image.save(content, "JPEG", quality=90)
        num_bytes.append(len(content.getvalue()))
        for split, copies in (("train", args.repeat), ("val", 1 if len(sizes) % 20 < 2 else 0)):
            for copy in range(copies):
                path = target / split / file.parent.name / f"{file.stem}-{len(sizes)}-{copy}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.getvalue())
    width, height = (statistics.mean(side) for side in zip(*sizes, strict=True))
    images = {
        "images": len(sizes) * args.repeat,
        "distinct_images": len(sizes),
        "mean_size": f"{width:.0f}x{height:.0f}",
        "mean_kb": round(statistics.mean(num_bytes) / 1000),
    }
    description.write_text(json.dumps(images))
    return images


def run_process(pipeline: str, folder: Path, quick: bool, tree: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "VITRAL_HOME": home, "OMP_NUM_THREADS": str(NUM_WORKERS)}
        env |= {"PYTHONPATH": str(tree.resolve() / "src")} if tree else {}
        env |= KEEP_MEMORY if pipeline in ("kept_memory", "simplejpeg") else {}
        command = [sys.executable, __file__, str(folder), "--pipeline", pipeline, *["--quick"] * quick]
        output = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
        results: dict[str, Any] = json.loads(output.splitlines()[-1])
        return results


def print_summary(rounds: list[dict[str, dict[str, float]]]) -> None:
    if "dataloader" not in rounds[0]:
        return
    for name in rounds[0]:
        speeds = [results[name]["images_per_second"] for results in rounds]
        ratios = [
            speed / results["dataloader"]["images_per_second"] for speed, results in zip(speeds, rounds, strict=True)
        ]
        cpu_ms = [results[name]["cpu_ms_per_image"] for results in rounds]
        cpu_ratios = [
            results["dataloader"]["cpu_ms_per_image"] / ms for ms, results in zip(cpu_ms, rounds, strict=True)
        ]
        print(
            f"{name:<16}{statistics.median(speeds):8,.1f} ({min(speeds):,.1f} - {max(speeds):,.1f}) images/s   "
            f"{statistics.median(ratios):6.2f}x DataLoader ({min(ratios):.2f} - {max(ratios):.2f})   "
            f"{statistics.median(cpu_ms):5.2f} ms CPU per image, "
            f"{statistics.median(cpu_ratios):.2f}x ({min(cpu_ratios):.2f} - {max(cpu_ratios):.2f})   "
            f"peak {max(results[name]['peak_mib'] for results in rounds):,.0f} MiB   "
            f"first batch after {statistics.median(results[name]['first_batch_seconds'] for results in rounds):.2f} s"
        )


def run_pipeline(pipeline: str, folder: Path, quick: bool) -> dict[str, Any]:
    if pipeline in ("dataloader", "draft", "kept_memory", "simplejpeg"):
        return run_dataloader(folder / "train", pipeline)
    if pipeline == "vitral":
        return run_vitral(folder, quick)
    return run_fingerprints(folder) if pipeline == "fingerprints" else run_overlapped(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="folder with one subfolder of images per class")
    parser.add_argument("--folder", type=Path, help="folder for the JPEGs")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--megapixels", type=float)
    parser.add_argument("--grain", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="use every n-th image")
    parser.add_argument("--max-images", type=int, help="use at most this many distinct images")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="skip the augmented and the streamed epoch")
    parser.add_argument("--pipelines", nargs="+", choices=PIPELINES, default=PIPELINES)
    parser.add_argument("--trees", type=Path, nargs="+", help="checkouts to compare; by default the imported one")
    parser.add_argument("--write-only", action="store_true", help="write the JPEGs to --folder and measure nothing")
    add_output_arguments(parser)
    parser.add_argument("--pipeline", choices=PIPELINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pipeline:
        print(json.dumps(run_pipeline(args.pipeline, args.images, args.quick)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        images = write_images(args, folder)
        if args.write_only:
            return
        pipelines = [name for name in args.pipelines if name != "simplejpeg" or importlib.util.find_spec(name)]
        runs = [(name, tree) for name in pipelines for tree in (args.trees or [None] if name in OWN else [None])]
        packages = ("torch", "pillow", "simplejpeg")
        size = {"mean_size": images["mean_size"], "mean_kb": images["mean_kb"]}
        rounds, rows = list[dict[str, Any]](), list[dict[str, Any]]()
        for _ in range(args.rounds):
            rounds.append({})
            for pipeline, tree in runs:
                results = run_process(pipeline, folder, args.quick, tree)
                if args.trees and len(args.trees) > 1 and tree is not None:
                    results = {f"{name} {args.trees.index(tree)}": figures for name, figures in results.items()}
                rounds[-1] |= results
                for name, figures in results.items():
                    rows.append({"round": len(rounds), "pipeline": name, **size, **figures})
                    speed = f"{figures['images_per_second']:,.0f} images/s"
                    print(
                        f"round {len(rounds)}: {name} {speed}, {figures['seconds']:.1f} s", file=sys.stderr, flush=True
                    )
                write_results(args, rows, {"data": images}, packages=packages)
    header = environment(packages)
    distinct = f"{images['distinct_images']} distinct, mean size {images['mean_size']}, {images['mean_kb']} kB"
    print(f"{images['images']} images ({distinct})")
    print(f"{header['cpu']}, {NUM_WORKERS} workers, batch size {BATCH_SIZE}, {header['versions']}")
    print_summary(rounds)


if __name__ == "__main__":
    main()
