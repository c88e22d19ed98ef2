"""What attention rollout costs beside the traced forward pass that it needs anyway: at most twice as much is promised.

    python benchmarks/rollout.py --preset Ti/16 --repeats 30

Both are timed turn about in one process, one image at a time; the ratio is taken pair by pair.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

from vitral.device.hardware import choose
from vitral.explain import METHODS
from vitral.models.vit import ViT


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="Ti/16")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    hardware = choose(precision="fp32", compile="no")
    torch.manual_seed(0)
    model = ViT.from_preset(chosen.preset).to(hardware.device).eval()
    image = torch.randn(model.config.channels, *model.config.image_size, device=hardware.device)

    def traced() -> object:
        with torch.no_grad():
            return hardware_done(model.trace(image[None]).logits)

    def rolled() -> object:
        return hardware_done(METHODS["rollout"](model, image))

    for _ in range(3):
        traced()
        rolled()
    pairs = [(seconds(traced), seconds(rolled)) for _ in range(chosen.repeats)]
    ratios = sorted(after / before for before, after in pairs)
    trace, roll = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"{chosen.preset} on {hardware.name}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"traced forward pass   {1e3 * trace:7.1f} ms   median of {chosen.repeats}")
    print(f"rollout               {1e3 * roll:7.1f} ms")
    print(
        f"ratio                 {statistics.median(ratios):7.2f}      "
        f"(mean {statistics.mean(ratios):.2f} ± {statistics.stdev(ratios):.2f}, "
        f"from {ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    print("at most twice: " + ("yes" if statistics.median(ratios) <= 2 else "NO"))


def hardware_done(result: torch.Tensor) -> float:
    """Reading a number waits for the device."""
    return float(result.flatten()[0])


if __name__ == "__main__":
    main()
