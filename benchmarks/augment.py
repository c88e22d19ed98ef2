"""RandAugment on whole batches, against Pillow image by image (timm's), in CPU seconds of one thread.

    python benchmarks/augment.py [--images 128] [--times 5] [--gpu]

Both do DeiT's two layers at magnitude 9, without its spread, on the same noise; decoding, cropping and the copy to a
tensor are in neither. With --gpu, batches of 256 that lie there: as PyTorch's operations and as kernels of our own,
each recorded as one graph, as a training step is, in turns.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitral.data.autoaugment import Operate, Policy, apply
from vitral.device.hardware import choose

DEIT = Policy(name="randaugment", layers=2, magnitude=9.0, spread=0.0, increasing=True, probability=0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--gpu", action="store_true")
    asked = parser.parse_args()
    if asked.gpu:
        on_a_gpu(asked.times)
        return
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from support.references import timm

    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(0)
    ours = DEIT
    theirs = timm.data.auto_augment.rand_augment_transform(
        "rand-m9-n2-inc1", {"interpolation": Image.Resampling.BILINEAR}
    )
    print(f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}, one thread")
    for side in (32, 96, 224):
        images = torch.randint(0, 256, (asked.images, 3, side, side), generator=draws, dtype=torch.uint8)
        pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
        ours(images, draws)
        spent: dict[str, list[float]] = {"vitral": [], "Pillow": []}
        for _ in range(asked.times):
            began = time.process_time()
            ours(images, draws)
            between = time.process_time()
            for picture in pictures:
                np.asarray(theirs(picture))
            spent["vitral"].append((between - began) / asked.images * 1e6)
            spent["Pillow"].append((time.process_time() - between) / asked.images * 1e6)
        told = " · ".join(f"{who} {statistics.mean(s):,.0f} ± {statistics.stdev(s):,.0f}" for who, s in spent.items())
        ratio = statistics.mean(p / v for v, p in zip(spent["vitral"], spent["Pillow"], strict=True))
        print(f"{side:>4} px   µs an image: {told}   Pillow takes {ratio:.2f} times as long (n = {asked.times})")


def on_a_gpu(times: int) -> None:
    from vitral.kernels.augment.op import operate

    hardware = choose(device="gpu", steps=10)
    draws = torch.Generator(hardware.device).manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batches of 256")
    for name, policy in {"RandAugment, two layers": DEIT, "TrivialAugment": Policy(name="trivialaugment")}.items():
        for side in (32, 96, 224):
            shape = (256, 3, side, side)
            images = torch.randint(0, 256, shape, generator=draws, device=hardware.device, dtype=torch.uint8)

            def seconds(step: Callable[..., None], images: Tensor = images) -> float:
                for _ in range(5):
                    step(images)
                hardware.synchronize()
                began = time.perf_counter()
                for _ in range(100):
                    step(images)
                hardware.synchronize()
                return (time.perf_counter() - began) / 100

            def varied(by: Operate, images: Tensor, policy: Policy = policy) -> None:
                policy(images, draws, by)

            steps = {who: hardware.recorded(partial(varied, by), draws) for who, by in (("o", apply), ("k", operate))}
            spent = [{who: seconds(step) for who, step in steps.items()} for _ in range(times)]
            ratios = [row["o"] / row["k"] for row in spent]
            told = [f"{statistics.median(row[who] for row in spent) * 1e6:,.0f} µs" for who in ("o", "k")]
            told += [f"{statistics.median(ratios):.1f} × ({min(ratios):.1f} – {max(ratios):.1f}, n = {times})"]
            print(f"{name}, {side:>3} px: operations {told[0]}, kernels {told[1]}, {told[2]}")


if __name__ == "__main__":
    main()
