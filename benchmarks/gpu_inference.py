"""Images a second on a GPU: vitral (bf16 weights, recorded, compiled) against timm, in one run of about two minutes.

    python benchmarks/gpu_inference.py [--sizes S/16 B/16] [--batches 1 8 64 256] [--out gpu_inference.json]

timm's model is given the same weights (random: speed does not depend on them), in bf16 and channels-last, as it is and
compiled; its images are already bf16 on the GPU, vitral's are uint8. All take turns; medians, and the ratio to the
quickest of timm's. Agreement: of vitral's bf16 logits with its fp32 ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TIMM = {"Ti/16": "vit_tiny_patch16_224", "S/16": "vit_small_patch16_224", "B/16": "vit_base_patch16_224"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["S/16", "B/16"], choices=list(TIMM))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    import timm

    from vitral.hardware import choose

    hardware = choose(device="gpu", precision="fp32", compile="no")
    print(f"{hardware.name} · torch {torch.__version__} · timm {timm.__version__} · {chosen.rounds} rounds", flush=True)
    results = {size: one_size(size, chosen) for size in chosen.sizes}
    if chosen.out:
        versions = {"torch": torch.__version__, "timm": timm.__version__, "gpu": hardware.name}
        chosen.out.write_text(json.dumps({"versions": versions, "results": results}, indent=1) + "\n")


def one_size(size: str, chosen: argparse.Namespace) -> dict[str, Any]:
    import timm

    from vitral import ViT
    from vitral.data.preprocess import Preprocessing
    from vitral.hardware import choose
    from vitral.inference.gpu import GpuEngine

    preprocessing = Preprocessing(image_size=(224, 224), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    torch.manual_seed(0)
    model = ViT.from_preset(size).eval()
    torch.nn.init.normal_(model.head.out.weight)
    theirs = timm.create_model(TIMM[size]).eval()
    fp32 = choose(device="gpu", precision="fp32", compile="no")
    theirs = theirs.to(fp32.device, torch.bfloat16, memory_format=torch.channels_last)
    compiled = torch.compile(theirs, mode="max-autotune")  # with CUDA graphs, its quickest way
    plain, quick = (
        GpuEngine(model, preprocessing, choose(device="gpu", precision="bf16", compile=compile))
        for compile in ("no", "yes")
    )
    exact = GpuEngine(model, preprocessing, fp32)
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (max(chosen.batches), 3, 224, 224), generator=draws, dtype=torch.uint8)
    wanted, found = exact(images), quick(images)
    same = float((wanted.argmax(1) == found.argmax(1)).double().mean())
    print(f"\n{size}: bf16 as fp32 on {same:.1%} of {len(images)} images (noise, random weights)", flush=True)
    results: dict[str, Any] = {"agreement": same}
    for batch in chosen.batches:
        here = images[:batch].to(fp32.device)
        floats = preprocessing.normalise(here).bfloat16().contiguous(memory_format=torch.channels_last)

        def ask(call: Callable[[Tensor], Tensor], given: Tensor) -> Callable[[], Tensor]:
            def once() -> Tensor:
                with torch.inference_mode():
                    return call(given).cpu()

            return once

        ways = {
            "timm bf16": ask(theirs, floats),
            "timm bf16, compiled": ask(compiled, floats),
            "vitral bf16, recorded": ask(plain, here),
            "vitral bf16, compiled, recorded": ask(quick, here),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            for _ in range(4):
                way()
        for _ in range(chosen.rounds):
            for name, way in ways.items():
                fp32.synchronize()
                start = time.perf_counter()
                way()
                times[name].append(time.perf_counter() - start)
        best = min(statistics.median(times[name]) for name in ways if name.startswith("timm"))
        results[str(batch)] = {name: statistics.median(each) for name, each in times.items()}
        for name, each in times.items():
            middle, cuts = statistics.median(each), statistics.quantiles(each, n=20)
            print(
                f"  batch {batch:>3}  {name:<32} {middle * 1e3:8.2f} ms (p95 {cuts[-1] * 1e3:.2f})   "
                f"{batch / middle:9,.0f} images/s   {best / middle:.2f} × timm",
                flush=True,
            )
    return results


if __name__ == "__main__":
    main()
