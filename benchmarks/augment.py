"""RandAugment on whole batches: vitral compared with timm (Pillow, one image at a time), in CPU time of one thread.

    python benchmarks/augment.py [--images 128] [--rounds 5] [--gpu] [--save]

Both apply DeiT's two operations at magnitude 9, without magnitude noise, to the same random images. Decoding, cropping
and the conversion to tensors are not included. With --gpu: PyTorch operations compared with the fused kernel on batches
of 256 images in GPU memory, each captured as a CUDA graph, timed alternately.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Generator, Tensor

from _output import add_output_arguments, write_results
from peers import register_torchvision_ops
from vitral.data.autoaugment import AutoAugmentPolicy
from vitral.data.image_ops import ApplyOpsFn, apply_ops
from vitral.device.select import Hardware, select_hardware

DEIT_POLICY = AutoAugmentPolicy(
    name="randaugment", num_ops=2, magnitude=9.0, magnitude_std=0.0, increasing=True, probability=0.5
)
POLICIES = {"RandAugment(2)": DEIT_POLICY, "TrivialAugment": AutoAugmentPolicy(name="trivialaugment")}
SIDES = (32, 96, 224)
GPU_BATCH_SIZE = 256
STEPS_PER_ROUND = 100


def benchmark_cpu(num_images: int, rounds: int) -> list[dict[str, Any]]:
    register_torchvision_ops()
    from timm.data.auto_augment import rand_augment_transform

    torch.set_num_threads(1)
    rng = Generator().manual_seed(0)
    pillow_transform = rand_augment_transform("rand-m9-n2-inc1", {"interpolation": Image.Resampling.BILINEAR})
    rows: list[dict[str, Any]] = []
    for side in SIDES:
        images = torch.randint(0, 256, (num_images, 3, side, side), generator=rng, dtype=torch.uint8)
        pillow_images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
        DEIT_POLICY(images, rng)
        vitral_us, pillow_us = [], []
        for _ in range(rounds):
            start = time.process_time()
            DEIT_POLICY(images, rng)
            middle = time.process_time()
            for image in pillow_images:
                np.asarray(pillow_transform(image))
            vitral_us.append((middle - start) / num_images * 1e6)
            pillow_us.append((time.process_time() - middle) / num_images * 1e6)
        speedup = statistics.mean(p / v for v, p in zip(vitral_us, pillow_us, strict=True))
        print(
            f"{side:>4} px   vitral {format_mean(vitral_us)}, Pillow {format_mean(pillow_us)} µs per image, "
            f"speed-up {speedup:.2f}x (n = {rounds})",
            flush=True,
        )
        rows += [
            {"pixels": side, "images": num_images, "vitral_us": v, "pillow_us": p, "speedup": p / v}
            for v, p in zip(vitral_us, pillow_us, strict=True)
        ]
    return rows


def format_mean(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):,.0f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):,.0f}{spread}"


def benchmark_gpu(rounds: int) -> list[dict[str, Any]]:
    from vitral.kernels.augment.op import fused_apply_ops

    hardware = select_hardware(device="gpu", steps=10)
    rng = Generator(hardware.device).manual_seed(0)
    rows: list[dict[str, Any]] = []
    for name, policy in POLICIES.items():
        for side in SIDES:
            shape = (GPU_BATCH_SIZE, 3, side, side)
            images = torch.randint(0, 256, shape, generator=rng, device=hardware.device, dtype=torch.uint8)
            pytorch, fused = (
                hardware.capture_step(partial(run_policy, policy, rng, apply_fn), rng)
                for apply_fn in (apply_ops, fused_apply_ops)
            )
            pairs = [
                (seconds_per_step(pytorch, images, hardware), seconds_per_step(fused, images, hardware))
                for _ in range(rounds)
            ]
            pytorch_s, fused_s = (statistics.median(times) for times in zip(*pairs, strict=True))
            speedups = [p / f for p, f in pairs]
            print(
                f"{name}, {side:>3} px: PyTorch {pytorch_s * 1e6:,.0f} µs, kernel {fused_s * 1e6:,.0f} µs per batch, "
                f"{statistics.median(speedups):.1f}x faster ({min(speedups):.1f} - {max(speedups):.1f}, n = {rounds})",
                flush=True,
            )
            rows += [
                {
                    "policy": name,
                    "pixels": side,
                    "batch_size": GPU_BATCH_SIZE,
                    "pytorch_us": p * 1e6,
                    "kernel_us": f * 1e6,
                    "speedup": p / f,
                }
                for p, f in pairs
            ]
    return rows


def run_policy(policy: AutoAugmentPolicy, rng: Generator, apply_fn: ApplyOpsFn, images: Tensor) -> None:
    policy(images, rng, apply_fn)


def seconds_per_step(step: Callable[..., None], images: Tensor, hardware: Hardware) -> float:
    for _ in range(5):
        step(images)
    hardware.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS_PER_ROUND):
        step(images)
    hardware.synchronize()
    return (time.perf_counter() - start) / STEPS_PER_ROUND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu", action="store_true", help="compare the fused kernel with PyTorch on a GPU")
    add_output_arguments(parser)
    args = parser.parse_args()
    if args.gpu:
        write_results(args, benchmark_gpu(args.rounds), packages=("torch", "triton"))
    else:
        write_results(args, benchmark_cpu(args.images, args.rounds), packages=("torch", "timm", "pillow"))


if __name__ == "__main__":
    main()
