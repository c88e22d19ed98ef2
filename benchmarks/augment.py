"""RandAugment as DeiT has it, on whole batches, against Pillow image by image (timm's), in CPU seconds of one thread.

    python benchmarks/augment.py [--images 128] [--times 5]

Both do two layers at magnitude 9 on the same noise; decoding, cropping and the copy to a tensor are in neither. On a
GPU vitral's is the same code, computed where the batch already is.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitral.data.policy import Policy

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from references import timm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--times", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(0)
    ours = Policy(name="randaugment", layers=2, magnitude=9.0, spread=0.0, increasing=True, probability=0.5)
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


if __name__ == "__main__":
    main()
