"""The cost of attention rollout relative to the traced forward pass that it needs. The goal is at most 2x.

    python benchmarks/rollout.py --preset Ti/16 --repeats 30

Both are timed alternately in one process, one image at a time. The ratio is computed per pair.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from _output import add_output_arguments, write_results
from vitral.device.select import select_hardware
from vitral.explain import METHODS
from vitral.models.vit import ViT

GOAL = 2.0


def elapsed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def first_value(tensor: Tensor) -> float:
    """Copying a value to the host waits for the device."""
    return float(tensor.flatten()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="Ti/16")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    add_output_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hardware = select_hardware(precision="fp32", compile="no")
    torch.manual_seed(0)
    model = ViT.from_preset(args.preset).to(hardware.device).eval()
    image = torch.randn(model.config.channels, *model.config.image_size, device=hardware.device)

    @torch.no_grad()
    def trace() -> float:
        return first_value(model.trace(image[None]).logits)

    def rollout() -> float:
        return first_value(METHODS["rollout"](model, image))

    for _ in range(3):
        trace()
        rollout()
    pairs = [(elapsed(trace), elapsed(rollout)) for _ in range(args.repeats)]
    ratios = sorted(rollout_s / trace_s for trace_s, rollout_s in pairs)
    trace_median, rollout_median = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio, spread = statistics.median(ratios), statistics.stdev(ratios)
    print(f"{args.preset} on {hardware.name}, fp32, torch {torch.__version__}, median of {args.repeats}")
    print(f"traced forward pass   {1e3 * trace_median:7.1f} ms")
    print(f"rollout               {1e3 * rollout_median:7.1f} ms")
    print(
        f"ratio                 {ratio:7.2f}x   (mean {statistics.mean(ratios):.2f} ± {spread:.2f}, "
        f"{ratios[0]:.2f} - {ratios[-1]:.2f}; goal at most {GOAL:g}x: {'met' if ratio <= GOAL else 'NOT met'})"
    )
    rows = [{"preset": args.preset, "trace_ms": 1e3 * t, "rollout_ms": 1e3 * r, "ratio": r / t} for t, r in pairs]
    write_results(args, rows, dtype="fp32")


if __name__ == "__main__":
    main()
