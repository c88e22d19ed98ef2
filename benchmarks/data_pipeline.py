"""How fast photographs become batches: vitral beside a plain torch DataLoader, on the same files and two cores.

    python benchmarks/data_pipeline.py FOLDER [--scale 1] [--repeat 20] [--rounds 3] [--out data_pipeline.json]

The plain way: a DataLoader with two workers; each image opened with Pillow, RandomResizedCrop 224, mirrored, divided,
normalised, one by one (torchvision's operations on Pillow images, written out). vitral: the first pass decodes with
two workers into a pack and hands every image over once, as uint8; a packed epoch reads the mapped file; a streamed
epoch packs nothing. All hand over shuffled batches of 64. vitral's random crop, mirroring and normalising happen on
the device in whole batches; on a machine without a GPU the same two cores must do that too, so it is timed as well:
"moved" is the packed epoch including it.

The photographs of FOLDER are written out once as JPEGs (quality 90) at `--scale` times their size, `--repeat` times
over, to a temporary folder. Each contestant runs in a process of its own, turn about. Memory is the peak, over the
process and its workers, of what is not a mere cache of a file (Pss_Anon + Pss_Shmem), asked every 50 ms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
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

BATCH, SIZE, CORES = 64, 224, 2
MEAN = STD = (0.5, 0.5, 0.5)


class Memory:
    """The peak of this process and its children while inside, in MiB."""

    def __enter__(self) -> Memory:
        self.peak, self.ended = 0.0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def watch(self) -> None:
        while not self.ended.wait(0.05):
            self.peak = max(self.peak, sum(map(own_memory, family(os.getpid()))))


def family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        threads = [entry.name for entry in Path(f"/proc/{pid}/task").iterdir() if entry.name != str(pid)]
        for thread in threads:  # children belong to the thread that started them
            children += Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(member for child in children for member in family(int(child)))]


def own_memory(pid: int) -> float:
    try:
        rows = (row.split() for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        return sum(int(row[1]) for row in rows if row[0] in ("Pss_Anon:", "Pss_Shmem:")) / 1024
    except OSError:
        return 0.0


def timed(read: Callable[[], Iterable[Any]]) -> dict[str, float]:
    with Memory() as memory:
        start, before = time.perf_counter(), os.times()
        images = sum(len(batch[1]) for batch in read())
        seconds, after = time.perf_counter() - start, os.times()
    busy = sum(after[:4]) - sum(before[:4])  # workers count once they have ended
    return {
        "images": images,
        "seconds": seconds,
        "images_per_second": images / seconds,
        "cpu_ms": 1000 * busy / images,
        "peak_MiB": memory.peak,
    }


def plain(folder: Path) -> dict[str, Any]:
    import numpy as np
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    files = sorted(folder.rglob("*.jpg"))
    classes = sorted({file.parent.name for file in files})
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)

    class Photographs(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            with Image.open(files[index]) as opened:
                picture = opened.convert("RGB")
            picture = random_resized_crop(picture)
            if random.random() < 0.5:
                picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous().float().div(255)
            return pixels.sub_(mean).div_(std), classes.index(files[index].parent.name)

    def random_resized_crop(picture: Image.Image) -> Image.Image:
        for _ in range(10):
            area = picture.width * picture.height * random.uniform(0.08, 1)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < width <= picture.width and 0 < height <= picture.height:
                left, top = random.randint(0, picture.width - width), random.randint(0, picture.height - height)
                picture = picture.crop((left, top, left + width, top + height))
                break
        return picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR)

    loader = DataLoader(Photographs(), batch_size=BATCH, shuffle=True, num_workers=CORES, drop_last=True)
    return {"epoch": timed(lambda: loader)}


def vitral(folder: Path) -> dict[str, Any]:
    import torch

    from vitral.data.augment import Augment
    from vitral.data.files.file_dataset import Reading
    from vitral.data.files.listing import load_files
    from vitral.data.loader import Loader
    from vitral.data.preprocess import Preprocessing

    torch.set_num_threads(CORES)
    seen = Preprocessing(image_size=(SIZE, SIZE), channels=3, mean=MEAN, std=STD, crop=0.9)

    def loader(pack: float) -> Loader:
        train = load_files(folder, seen, how=Reading(pack=pack, workers=CORES)).train
        return Loader(images=train.images, labels=train.labels, batch=BATCH, seed=0)

    found = {"first": timed(lambda: loader(64.0).epoch(0))}  # the clock runs while the pack is written
    packed = loader(64.0)
    found["packed"] = timed(lambda: packed.epoch(1))
    draws, augment = torch.Generator().manual_seed(0), Augment(crop=0.4, flip=True)

    def moved() -> Iterable[Any]:
        for images, labels in packed.epoch(2):
            yield seen.normalise(augment.move(images, draws, seen.image_size)), labels

    found["moved"] = timed(moved)
    streamed = loader(0.0)

    def stream() -> Iterable[Any]:
        yield from streamed.epoch(0)
        streamed.images.close()

    found["streamed"] = timed(stream)
    return found


def write_photographs(source: Path, into: Path, scale: float, repeat: int) -> dict[str, Any]:
    """Class folders of JPEGs below train and val; the same few in val, which nobody times."""
    from PIL import Image

    from vitral.data.decode import NotAnImage, decode, image_files

    sizes = []
    for file in image_files([source]):
        try:
            picture = decode(file).convert("RGB")
        except NotAnImage:
            continue
        picture = picture.resize(
            (round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BICUBIC
        )
        sizes.append(picture.size)
        for split, copies in (("train", repeat), ("val", 1 if len(sizes) % 20 < 2 else 0)):
            for copy in range(copies):
                place = into / split / file.parent.name / f"{file.stem}-{len(sizes)}-{copy}.jpg"
                place.parent.mkdir(parents=True, exist_ok=True)
                picture.save(place, quality=90)
    width, height = (statistics.mean(side) for side in zip(*sizes, strict=True))
    return {"images": len(sizes) * repeat, "different": len(sizes), "mean_size": f"{width:.0f}×{height:.0f}"}


def run(contestant: str, folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "VITRAL_HOME": home, "OMP_NUM_THREADS": str(CORES)}
        words = [sys.executable, __file__, str(folder), "--contestant", contestant]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="class folders of photographs")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--contestant", choices=["plain", "vitral"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.contestant:
        print(json.dumps({"plain": plain, "vitral": vitral}[asked.contestant](asked.folder)))
        return
    import PIL
    import torch

    with tempfile.TemporaryDirectory() as place:
        about = write_photographs(asked.folder, Path(place), asked.scale, asked.repeat)
        rounds = []
        for _ in range(asked.rounds):
            plainly = run("plain", Path(place) / "train")
            ours = run("vitral", Path(place))
            rounds.append({"plain": plainly["epoch"], **ours})
    versions = f"torch {torch.__version__}, Pillow {PIL.__version__}, Python {platform.python_version()}"
    print(f"{about}, batch {BATCH}, {CORES} workers, {versions}, load {os.getloadavg()[0]:.1f}")
    for name in rounds[0]:
        speeds = [found[name]["images_per_second"] for found in rounds]
        ratios = [found[name]["images_per_second"] / found["plain"]["images_per_second"] for found in rounds]
        spread = statistics.stdev(speeds) if len(speeds) > 1 else 0.0
        print(
            f"{name:<10}{statistics.mean(speeds):8,.0f} ± {spread:4,.0f} images/s   "
            f"{statistics.mean(ratios):6.2f} × plain ({min(ratios):.2f} – {max(ratios):.2f})   "
            f"{statistics.mean(found[name]['cpu_ms'] for found in rounds):5.2f} ms of a core an image   "
            f"peak {max(found[name]['peak_MiB'] for found in rounds):,.0f} MiB"
        )
    if asked.out:
        asked.out.write_text(json.dumps({"about": about, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
