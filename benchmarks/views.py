"""Multi-crop views for self-supervised learning: vitral compared with torchvision and kornia, in one run.

    python benchmarks/views.py [--sides 32 224] [--images 64] [--rounds 5] [--save]

All produce DINO's views from the same uint8 images on the device at hand: random resized crops with antialiasing
(kornia has none), flips, colour jitter, greyscale, blur, solarisation and normalisation. The contenders:

    vitral                   batches, one draw per image and view
    vitral, compiled         the same with torch.compile
    torchvision              transforms v2, one image at a time, because on a batch they make one draw for all images
    torchvision, one draw    transforms v2 on batches: faster, but all images of a batch have the same crop and colours
    kornia                   batches, one draw per image and view, if kornia is installed

On a CPU the time is CPU time of one thread. On a GPU vitral is captured as a CUDA graph, and one image at a time is
limited by launches, so that torchvision also runs on one thread of the CPU ("torchvision, CPU thread").
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Generator, Tensor

from _output import add_output_arguments, write_results
from peers import register_torchvision_ops
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware, select_hardware
from vitral.ssl.crops import blur_radius
from vitral.ssl.views import RenderFn, ViewConfig, make_views, render_views

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PATCH_SIZES = {32: 4, 224: 16}
Contender = Callable[[], object]


def view_config(side: int) -> ViewConfig:
    """DINO's defaults; local views of small images need more of the image to show anything."""
    return ViewConfig() if side >= 96 else ViewConfig(local_size=0.5, local_min_area=0.1, local_max_area=0.4)


def kinds(config: ViewConfig, side: int) -> list[dict[str, Any]]:
    """The parameters of each view of an image."""
    small, _ = config.local_image_size((side, side), PATCH_SIZES[side])
    areas = (config.global_min_area, config.global_max_area)
    local = {
        "side": small,
        "area": (config.local_min_area, config.local_max_area),
        "blur": config.blur_local,
        "solarize": config.solarize_local,
    }
    return [
        {"side": side, "area": areas, "blur": config.blur_first, "solarize": config.solarize_first},
        {"side": side, "area": areas, "blur": config.blur_second, "solarize": config.solarize_second},
        *[local] * config.local_views,
    ]


def torchvision_transforms(config: ViewConfig, side: int) -> list[Any]:
    """One transform per view of an image."""
    register_torchvision_ops()
    from torchvision.transforms import v2

    jitter = v2.ColorJitter(config.brightness, config.contrast, config.saturation, config.hue)
    sigma = (config.blur_min_sigma, config.blur_max_sigma)
    return [
        v2.Compose([
            v2.RandomResizedCrop(kind["side"], kind["area"], antialias=True),
            v2.RandomHorizontalFlip(config.flip),
            v2.RandomApply([jitter], config.jitter_prob),
            v2.RandomGrayscale(config.grayscale),
            v2.RandomApply([v2.GaussianBlur(2 * blur_radius((kind["side"],) * 2) + 1, sigma)], kind["blur"]),
            v2.RandomSolarize(128, kind["solarize"]),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ])
        for kind in kinds(config, side)
    ]  # fmt: skip


def kornia_transforms(config: ViewConfig, side: int) -> list[Any]:
    """One transform of batches per view of an image."""
    register_torchvision_ops()
    import kornia.augmentation as K

    sigma = (config.blur_min_sigma, config.blur_max_sigma)
    return [
        torch.nn.Sequential(
            K.RandomResizedCrop((kind["side"],) * 2, kind["area"], cropping_mode="resample"),
            K.RandomHorizontalFlip(p=config.flip),
            K.ColorJitter(config.brightness, config.contrast, config.saturation, config.hue, p=config.jitter_prob),
            K.RandomGrayscale(p=config.grayscale),
            K.RandomGaussianBlur((2 * blur_radius((kind["side"],) * 2) + 1,) * 2, sigma, p=kind["blur"]),
            K.RandomSolarize((0.5, 0.5), (0.0, 0.0), p=kind["solarize"]),
            K.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
        )
        for kind in kinds(config, side)
    ]


def transform_batches(transforms: list[Any], images: Tensor) -> None:
    for transform in transforms:
        transform(images)


def transform_scaled_batches(transforms: list[Any], images: Tensor) -> None:
    transform_batches(transforms, images.float() / 255)


def transform_images(transforms: list[Any], images: Tensor) -> None:
    for image in images:
        for transform in transforms:
            transform(image)


def run_vitral(
    config: ViewConfig,
    preprocessing: Preprocessing,
    rng: Generator,
    render_fn: RenderFn,
    patch_size: int,
    images: Tensor,
) -> None:
    make_views(config, preprocessing, images, rng, patch_size=patch_size, render_fn=render_fn)


def contenders(side: int, num_images: int, hardware: Hardware, use_compile: bool) -> dict[str, tuple[Contender, int]]:
    """Functions that make all views once, and the number of images that each of them processes."""
    config, rng = view_config(side), Generator(hardware.device).manual_seed(0)
    preprocessing = Preprocessing(image_size=(side, side), channels=3, mean=MEAN, std=STD)
    shape = (num_images, 3, side, side)
    images = torch.randint(0, 256, shape, generator=rng, device=hardware.device, dtype=torch.uint8)
    few = images[: max(num_images // 8, 1)]
    torchvision = torchvision_transforms(config, side)
    on_gpu = hardware.device.type != "cpu"

    def vitral(render_fn: RenderFn) -> Contender:
        step = partial(run_vitral, config, preprocessing, rng, render_fn, PATCH_SIZES[side])
        return partial(hardware.capture_step(step, rng), images)

    functions: dict[str, tuple[Contender, int]] = {
        "vitral": (vitral(render_views), num_images),
        "torchvision": (partial(transform_images, torchvision, few), len(few)),
        "torchvision, one draw": (partial(transform_batches, torchvision, images), num_images),
    }
    if use_compile:
        functions["vitral, compiled"] = (vitral(torch.compile(render_views)), num_images)
    if on_gpu:
        functions["torchvision, CPU thread"] = (partial(transform_images, torchvision, few.cpu()), len(few))
    if find_spec("kornia") is not None:
        transforms = [transform.to(hardware.device) for transform in kornia_transforms(config, side)]
        functions["kornia"] = (partial(transform_scaled_batches, transforms, images), num_images)
    return functions


def seconds(function: Contender, hardware: Hardware) -> float:
    """CPU time on a CPU, elapsed time of several calls on a GPU."""
    if hardware.device.type == "cpu":
        start = time.process_time()
        function()
        return time.process_time() - start
    hardware.synchronize()
    start, calls = time.perf_counter(), 0
    while calls < 3 or time.perf_counter() - start < 0.3:
        function()
        hardware.synchronize()
        calls += 1
    return (time.perf_counter() - start) / calls


def benchmark(sides: list[int], num_images: int, rounds: int, use_compile: bool) -> list[dict[str, Any]]:
    hardware = select_hardware(steps=10)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for side in sides:
        functions = contenders(side, num_images, hardware, use_compile)
        for function, _ in functions.values():  # compile and capture
            function()
            function()
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(rounds):
            for name, (function, count) in functions.items():
                times[name].append(seconds(function, hardware) / count)
        for name, values in times.items():
            speedups = [other / own for own, other in zip(times["vitral"], values, strict=True)]
            print(
                f"{side:>4} px   {name:<24} {1 / statistics.mean(values):>10,.0f} images/s   vitral is "
                f"{statistics.mean(speedups):.2f}x as fast ({min(speedups):.2f} - {max(speedups):.2f}, n = {rounds})",
                flush=True,
            )
            rows += [
                {"pixels": side, "contender": name, "device": hardware.name, "batch_size": functions[name][1],
                 "round": number, "us_per_image": value * 1e6, "vitral_speedup": speedup}
                for number, (value, speedup) in enumerate(zip(values, speedups, strict=True))
            ]  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=int, nargs="+", choices=sorted(PATCH_SIZES), default=sorted(PATCH_SIZES))
    parser.add_argument("--images", type=int, default=64, help="images per batch; on a GPU 512 or more")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled version")
    add_output_arguments(parser)
    args = parser.parse_args()
    write_results(
        args,
        benchmark(args.sides, args.images, args.rounds, not args.no_compile),
        packages=("torch", "torchvision", "kornia"),
    )


if __name__ == "__main__":
    main()
