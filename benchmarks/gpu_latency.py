"""Latency of a few images on a GPU, B/16, from uint8 on the GPU to logits on the CPU, and the kernels it consists of.

    python benchmarks/gpu_latency.py [--batch-sizes 1 8] [--no-timm] [--save]

bf16, fp8  The CUDA engine as Predictor uses it: fused kernels, CUDA graphs.
timm       torch.compile with CUDA graphs (mode="reduce-overhead"), bf16 weights, normalised bf16 input.

Reported: median and minimum over the calls of the time until the logits are on the CPU, and the relative error of the
logits against fp32. For bf16 also the kernels of a call by name, with their number and time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from _output import add_output_arguments, write_results
from peers import Case, error_summary, has_gpu, make_peer_step, model_config
from vitral.data.preprocess import Preprocessing
from vitral.device.select import select_hardware
from vitral.inference.cuda_engine import CudaEngine
from vitral.models.vit import ViT

PROFILED_CALLS = 20
MAX_NAME = 80  # of a kernel

Call = Callable[[], Any]


def milliseconds(call: Call, seconds: float = 1.0) -> tuple[float, float]:
    """Median and minimum."""
    for _ in range(20):
        call()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), min(times)


def print_kernels(call: Call) -> None:
    """Number and time of the kernels of a call, and the time between the first and the last one."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_CALLS):
            call()
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    durations: dict[str, list[float]] = defaultdict(list)
    for event in events:
        durations[event.name[:MAX_NAME]].append(event.time_range.elapsed_us())
    for name, times in sorted(durations.items(), key=lambda item: -sum(item[1])):
        print(f"  {sum(times) / PROFILED_CALLS:8.1f} us  {len(times) / PROFILED_CALLS:5.1f} calls  {name}")
    total = sum(map(sum, durations.values())) / PROFILED_CALLS
    print(f"  {total:8.1f} us  {len(events) / PROFILED_CALLS:5.1f} calls", flush=True)


def measure(batch_size: int, with_timm: bool) -> list[dict[str, Any]]:
    """One row per contender."""
    torch.manual_seed(0)
    config = model_config("B/16")
    model = ViT(config).eval().cuda()
    torch.nn.init.normal_(model.get_parameter("head.out.weight"))
    preprocessing = Preprocessing(image_size=config.image_size, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    images = torch.randint(0, 256, (batch_size, 3, *config.image_size), dtype=torch.uint8, device="cuda")
    with torch.inference_mode():
        expected: Tensor = model(preprocessing.normalise(images)).cpu()

    def make_engine_call(precision: Any) -> Call:
        engine = CudaEngine(model, preprocessing, select_hardware(device="gpu", precision=precision))
        return lambda: engine(images)

    contenders: dict[str, Callable[[], Call]] = {name: partial(make_engine_call, name) for name in ("bf16", "fp8")}
    if with_timm:
        contenders["timm"] = lambda: make_peer_step(Case("timm", "B/16", f"latency-{batch_size}", "graphs"), {})
    rows = []
    for name, make in contenders.items():
        row: dict[str, Any] = {"batch_size": batch_size, "contender": name}
        try:
            call = make()
            row["median_ms"], row["min_ms"] = milliseconds(call)
            if name != "timm":
                row["relative_error"] = float((call() - expected).norm() / expected.norm())
        except Exception as error:
            row["failed"] = error_summary(error)
        print(
            " ".join(
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
            )
        )
        if name == "bf16" and "failed" not in row:
            print_kernels(call)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--no-timm", action="store_true")
    add_output_arguments(parser)
    args = parser.parse_args()
    if not has_gpu():
        print("This benchmark needs a GPU that PyTorch can use, and none was found.")
        return
    rows = [row for batch_size in args.batch_sizes for row in measure(batch_size, not args.no_timm)]
    write_results(args, rows, dtype="bf16", packages=("torch", "triton", "timm"))


if __name__ == "__main__":
    main()
