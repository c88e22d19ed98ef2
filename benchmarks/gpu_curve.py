"""Do quicker numbers train worse? Loss curves of the same training on real images, in several kinds of numbers.

    python benchmarks/gpu_curve.py --settings autocast autocast-eager bf16 fp8 [--seeds 2] [--out gpu_curve.json]
    python benchmarks/gpu_curve.py --draw gpu_curve.json gpu_curve.png

B/16's width and depth (768, 12 blocks) at 112 px on CIFAR-10, 1,000 steps of 256 images with AdamW, warm-up and
cosine. A seed decides weights, order and augmentation, so trainings with the same seed differ by their numbers alone:

autocast        bf16 products, everything else and the weights in fp32, compiled: what other libraries do
autocast-eager  the same without the compiler: other roundings of the same numbers
bf16, fp8, …    vitral's precisions by name, as `vitral train --precision` takes them

Noise is what a change of nothing but the seed does. A setting stands within it where its curve, averaged over the seeds
and smoothed over 50 steps, is no farther from autocast's (root mean square) than autocast's seeds are from each other,
and where its loss on the 10,000 test images is not above autocast's by more than two standard errors, with the spread
between seeds pooled over all settings. Everything is in the JSON file: each step's loss, smoothed differences, means.

All trainings run side by side: nothing is timed. Without a GPU: a toy on scikit-learn's digits, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from contestants import NEEDS_A_GPU, Training, on_gpu, what_failed

WINDOW = 50  # steps that are averaged
REFERENCE = "autocast"


def play(setting: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """One training."""
    from dataclasses import replace

    import torch
    import torch.nn.functional as F

    from vitral.data.augment import Augment
    from vitral.data.datasets import load
    from vitral.data.loader import Loader
    from vitral.data.preprocess import Preprocessing, measure
    from vitral.device.hardware import choose
    from vitral.evaluation.metrics import logits_of
    from vitral.models.presets import preset
    from vitral.recipes.schema import Data, Optim, Recipe

    torch.set_float32_matmul_precision("high")
    plain = setting.startswith(REFERENCE)
    eager = "no" if setting == "autocast-eager" else "auto"
    hardware = choose(precision="bf16" if plain else setting, compile=eager)  # type: ignore[arg-type]
    if plain:
        hardware = replace(hardware, **{name: False for name in ("graph", "fused", "fp8") if hasattr(hardware, name)})
    dataset = load(asked.data, validation=0.0)
    mean, std = measure(dataset.train.images)
    side, C = asked.pixels, dataset.train.images.shape[1]
    size = {"width": 32, "depth": 2, "heads": 2, "patch_size": side // 2} if asked.size == "toy" else {}
    model = preset(
        "B/16" if size else asked.size, image_size=(side, side), channels=C, classes=len(dataset.classes), **size
    )
    recipe = Recipe(
        name="curve",
        data=Data(name=asked.data, validation=0.0, mean=mean, std=std),
        model=model,
        augment=Augment(shift=side // 14, flip=C == 3),
        optim=Optim(lr=asked.lr, weight_decay=0.05),
        batch=asked.batch,
        seed=seed,
    )
    seen = Preprocessing(image_size=(side, side), channels=C, mean=mean, std=std)

    def enlarged(images: Any) -> Any:
        parts = []
        for part in images.to(hardware.device).split(1024):
            larger = F.interpolate(part.float(), size=(side, side), mode="bicubic", align_corners=False)
            parts.append(larger.round().clamp(0, 255).to(torch.uint8))
        return torch.cat(parts)

    labels = dataset.train.labels.to(hardware.device)
    loader = Loader(images=enlarged(dataset.train.images), labels=labels, batch=asked.batch, seed=seed)
    training = Training(recipe, seen, hardware, asked.steps)
    totals = torch.zeros(asked.steps + 1, dtype=torch.float64, device=hardware.device)
    began, step, epoch = time.perf_counter(), 0, 0
    while step < asked.steps:
        for images, labels in loader.epoch(epoch):
            if step == asked.steps:
                break
            training.step(images, labels)
            step += 1
            totals[step].copy_(training.state.totals[0])  # nothing is read back before the end
        epoch += 1
    losses = (totals.diff() / asked.batch).tolist()
    model_now = training.state.model.eval()
    exact = choose(precision="fp32", compile="no")
    logits = logits_of(model_now, enlarged(dataset.test.images), seen, exact)
    right = dataset.test.labels.to(logits.device)
    return {
        "setting": setting,
        "seed": seed,
        "chosen": str(hardware),
        "seconds": time.perf_counter() - began,
        "losses": losses,
        "test_loss": F.cross_entropy(logits, right).item(),
        "test_top1": (logits.argmax(dim=1) == right).double().mean().item(),
    }


def smoothed(losses: Sequence[float]) -> list[float]:
    window = min(WINDOW, len(losses))
    return [statistics.mean(losses[at : at + window]) for at in range(0, len(losses) - window + 1, window)]


def rms(values: Sequence[float]) -> float:
    return math.sqrt(statistics.mean(value**2 for value in values))


def pooled(groups: list[list[float]]) -> float:
    """The standard deviation within groups, of all groups together."""
    several = [group for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in several)
    return math.sqrt(squares / freedom) if freedom else 0.0


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Each setting beside the reference: how far the curves are apart, and how far seeds drive them apart."""
    by: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if "losses" in run:
            by.setdefault(run["setting"], []).append(run)

    def mean_curve(some: list[dict[str, Any]]) -> list[float]:
        return [statistics.mean(values) for values in zip(*(smoothed(run["losses"]) for run in some), strict=True)]

    def last(run: dict[str, Any]) -> float:
        return statistics.mean(run["losses"][-2 * WINDOW :])

    found: dict[str, Any] = {}
    reference = by.get(REFERENCE, [])
    pairs = [(a, b) for i, a in enumerate(reference) for b in reference[i + 1 :]]
    apart = [[x - y for x, y in zip(*(smoothed(r["losses"]) for r in pair), strict=True)] for pair in pairs]
    noise = {
        "curve_rms": rms([value for curve in apart for value in curve]) if pairs else None,
        "last_loss": max((abs(last(a) - last(b)) for a, b in pairs), default=None),
        "test_loss": pooled([[run["test_loss"] for run in some] for some in by.values()]),
    }
    for setting, some in by.items():
        row: dict[str, Any] = {
            "seeds": len(some),
            "last_loss": statistics.mean(map(last, some)),
            "test_loss": statistics.mean(run["test_loss"] for run in some),
            "test_top1": statistics.mean(run["test_top1"] for run in some),
        }
        alike = [run for run in reference if run["seed"] in {one["seed"] for one in some}]
        if setting != REFERENCE and alike:
            difference = [a - b for a, b in zip(mean_curve(some), mean_curve(alike), strict=True)]
            row |= {
                "difference": difference,
                "curve_rms": rms(difference),
                "curve_last": statistics.mean(difference[-2:]),
                "test_loss_off": row["test_loss"] - statistics.mean(run["test_loss"] for run in alike),
            }
            if pairs:
                error = noise["test_loss"] * math.sqrt(1 / len(some) + 1 / len(alike))
                row["test_loss_error"] = error
                row["within_noise"] = row["curve_rms"] <= noise["curve_rms"] and row["test_loss_off"] <= 2 * error
        found[setting] = row
    return {"noise": noise, "settings": found}


def told(result: dict[str, Any]) -> list[str]:
    noise = result["noise"]
    lines = []
    if noise["curve_rms"] is not None:
        lines.append(
            f"seeds of {REFERENCE} are {noise['curve_rms']:.4f} apart (rms of the smoothed curves), the last losses "
            f"{noise['last_loss']:.4f}; test losses spread by {noise['test_loss']:.4f}"
        )
    for name, row in result["settings"].items():
        said = (
            f"{name:<16} last {2 * WINDOW} steps {row['last_loss']:.4f}   test {row['test_loss']:.4f}, "
            f"{row['test_top1']:.2%}"
        )
        if "curve_rms" in row:
            said += f"   off {REFERENCE}: {row['curve_rms']:.4f} rms, at the end {row['curve_last']:+.4f}"
            said += f", test {row['test_loss_off']:+.4f}"
        if "within_noise" in row:
            said += "   within noise" if row["within_noise"] else "   NOT within noise"
        lines.append(said)
    return lines


def draw(content: dict[str, Any], place: Path) -> None:
    """Curves above, differences from the reference below; legible on light and on dark pages."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    ink, colours = "#7f7f7f", ("#3b82c4", "#d9822b", "#3f9f5f", "#b5539b", "#8a6d3b")
    runs = [run for run in content["runs"] if "losses" in run]
    settings = list(dict.fromkeys(run["setting"] for run in runs))
    colour = dict(zip(settings, colours * len(settings), strict=False))
    with pyplot.rc_context({"font.size": 9, "text.color": ink, "axes.edgecolor": ink, "axes.labelcolor": ink,
                            "xtick.color": ink, "ytick.color": ink}):  # fmt: skip
        figure, (above, below) = pyplot.subplots(
            2, 1, figsize=(7, 5), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        reference = {run["seed"]: smoothed(run["losses"]) for run in runs if run["setting"] == REFERENCE}
        for run in runs:
            curve = smoothed(run["losses"])
            window = min(WINDOW, len(run["losses"]))
            steps = [window * (at + 0.5) for at in range(len(curve))]
            look = {"color": colour[run["setting"]], "linewidth": 1.3, "linestyle": ("-", "--", ":")[run["seed"] % 3]}
            above.plot(steps, curve, label=f"{run['setting']}, seed {run['seed']}", **look)
            other = reference.get(run["seed"])
            if run["setting"] != REFERENCE and other:
                below.plot(steps, [a - b for a, b in zip(curve, other, strict=True)], **look)
        if noise := content["noise"]["curve_rms"]:
            said = f"{REFERENCE}'s seeds, from each other (rms)"
            below.axhspan(-noise, noise, color=ink, alpha=0.2, linewidth=0, label=said)
            below.legend(frameon=False, labelcolor=ink, loc="upper right")
        below.axhline(0, color=ink, linewidth=0.6)
        below.margins(y=0.3)
        above.set_ylabel("training loss")
        below.set_ylabel(f"off {REFERENCE},\nsame seed")
        below.set_xlabel("step")
        above.legend(frameon=False, labelcolor=ink, ncols=2)
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(place, dpi=150, transparent=True)
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=[REFERENCE, "autocast-eager", "bf16"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--size", default="B/16")
    parser.add_argument("--pixels", type=int, default=112)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--together", type=int, default=8, help="trainings at a time")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for a training")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "PNG"), help="the figure of an earlier run")
    parser.add_argument("--play", nargs=2, metavar=("SETTING", "SEED"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.draw:
        draw(json.loads(asked.draw[0].read_text()), asked.draw[1])
        return
    if asked.play:
        setting, seed = asked.play[0], int(asked.play[1])
        try:
            print(json.dumps(play(setting, seed, asked)))
        except Exception as error:
            print(json.dumps({"setting": setting, "seed": seed, "failed": what_failed(error)}))
        return
    import torch

    if not on_gpu():
        print(NEEDS_A_GPU)
        asked.size, asked.pixels, asked.data, asked.batch, asked.steps = "toy", 8, "digits", 32, min(asked.steps, 100)
        asked.together = 1
    cases = [(setting, seed) for seed in range(asked.seeds) for setting in asked.settings]
    common = [word for name in ("steps", "size", "pixels", "batch", "lr", "data")
              for word in (f"--{name}", str(getattr(asked, name)))]  # fmt: skip
    share = max(1, (os.cpu_count() or 2) // min(asked.together, len(cases)))

    def one(case: tuple[str, int]) -> dict[str, Any]:
        words = [sys.executable, "-W", "ignore", __file__, "--play", case[0], str(case[1]), *common]
        environment = {"OMP_NUM_THREADS": str(share), **os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(share)}
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=asked.timeout, env=environment)
        except subprocess.TimeoutExpired:
            return {"setting": case[0], "seed": case[1], "failed": f"not done within {asked.timeout:.0f} s"}
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
            return {"setting": case[0], "seed": case[1], "failed": last[:300]}
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    with ThreadPoolExecutor(asked.together) as pool, tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        runs = list(pool.map(one, cases))
    result = compared(runs)
    about = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if on_gpu() else None,
        **{name: getattr(asked, name) for name in ("steps", "size", "pixels", "batch", "lr", "data")},
    }
    for run in runs:
        if "failed" in run:
            print(f"{run['setting']}, seed {run['seed']}: {run['failed']}")
    print("\n".join(told(result)))
    if asked.out:
        asked.out.write_text(json.dumps({"about": about, **result, "runs": runs}) + "\n")


if __name__ == "__main__":
    main()
