"""Effect of lower precision on training: loss curves of the same training on real images at several precisions.

    python benchmarks/gpu_curve.py --settings autocast autocast-eager bf16 fp8 [--seeds 2] [--json gpu_curve.json]
    python benchmarks/gpu_curve.py --settings autocast fp8 --seeds 4 --preset S/16
    python benchmarks/gpu_curve.py --settings autocast fp8 --seeds 4 --fine-tune 500 --steps 400 --lr 2e-4
    python benchmarks/gpu_curve.py --draw gpu_curve.json gpu_curve.png

A B/16 encoder (width 768, 12 blocks) at 112 px on CIFAR-10: 1,000 steps of 256 images with AdamW, warm-up and cosine
decay. The seed determines weights, order and augmentation, so that runs with the same seed differ in arithmetic only:

autocast        bf16 GEMMs, everything else and the weights in fp32, compiled: the common practice
autocast-eager  the same without the compiler, which rounds differently
bf16, fp8, ...  vitral's precisions, as in `vitral train --precision`

With --fine-tune STEPS, a model is first trained in bf16 on half of the classes for that many steps. All runs then
fine-tune it on the other classes, with a new head, drop path 0.1 and layer-wise learning rates (0.75).

Noise is the effect of changing the seed only. A setting is within noise if its curve, averaged over seeds and over
windows of 50 steps, is not farther from autocast's (root mean square) than autocast's seeds are from each other, and if
its loss on the 10,000 test images is not more than two standard errors above autocast's (the standard deviation between
seeds is pooled over all settings). The JSON file contains the loss of each step, smoothed differences and means.

All runs share the GPU, because nothing is timed. Without a GPU: a tiny run on scikit-learn's digits, as a smoke test.
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

from _output import add_output_arguments, write_results
from peers import NO_GPU_NOTICE, VitralTraining, error_summary, has_gpu

WINDOW = 50  # steps per average
REFERENCE = "autocast"
WORKER_ARGUMENTS = ("steps", "preset", "image_size", "batch_size", "lr", "data")
PRETRAIN_LR = 5e-4
PRETRAIN = "pretrain"  # the setting of the run that fine-tuning starts from

Result = dict[str, Any]


def run_training(setting: str, seed: int, args: argparse.Namespace) -> Result:
    """Train once; return the loss of each step and the test results."""
    import torch
    import torch.nn.functional as F

    from vitral.data.datasets import load_builtin_dataset
    from vitral.data.loader import Loader
    from vitral.data.preprocess import Preprocessing, channel_stats
    from vitral.device.select import select_hardware
    from vitral.inference.forward import compute_logits

    torch.set_float32_matmul_precision("high")
    hardware = hardware_for(setting)
    dataset = load_builtin_dataset(args.data, validation=0.0)
    if args.init is not None:
        dataset = half_of_the_classes(dataset, first=setting == PRETRAIN)
    mean, std = channel_stats(dataset.train.images)
    size, C = (args.image_size, args.image_size), dataset.train.images.shape[1]
    recipe = make_recipe(args, seed, C, len(dataset.classes), mean, std)
    preprocessing = Preprocessing(image_size=size, channels=C, mean=mean, std=std)

    def resize(images: Any) -> Any:
        batches = []
        for batch in images.to(hardware.device).split(1024):
            resized = F.interpolate(batch.float(), size=size, mode="bicubic", align_corners=False)
            batches.append(resized.round().clamp(0, 255).to(torch.uint8))
        return torch.cat(batches)

    labels = dataset.train.labels.to(hardware.device)
    loader = Loader(images=resize(dataset.train.images), labels=labels, batch_size=args.batch_size, seed=seed)
    training = VitralTraining(recipe, preprocessing, hardware, args.steps)
    if args.init is not None and setting != PRETRAIN:
        weights = torch.load(args.init, weights_only=True, map_location=hardware.device)
        weights |= {name: value for name, value in training.state.model.state_dict().items() if name.startswith("head")}
        training.state.model.load_state_dict(weights)
    loss_sums = torch.zeros(args.steps + 1, dtype=torch.float64, device=hardware.device)
    start, step, epoch = time.perf_counter(), 0, 0
    while step < args.steps:
        for images, batch_labels in loader.epoch(epoch):
            if step == args.steps:
                break
            training.step(images, batch_labels)
            step += 1
            loss_sums[step].copy_(training.state.epoch_sums[0])  # stays on the device until the end
        epoch += 1
    losses = (loss_sums.diff() / args.batch_size).tolist()
    if setting == PRETRAIN:
        torch.save(training.state.model.state_dict(), args.init)
    fp32 = select_hardware(precision="fp32", compile="no")
    logits = compute_logits(training.state.model.eval(), resize(dataset.test.images), preprocessing, fp32)
    test_labels = dataset.test.labels.to(logits.device)
    return {
        "setting": setting,
        "seed": seed,
        "hardware": str(hardware),
        "seconds": time.perf_counter() - start,
        "losses": losses,
        "test_loss": F.cross_entropy(logits, test_labels).item(),
        "test_top1": (logits.argmax(dim=1) == test_labels).double().mean().item(),
    }


def half_of_the_classes(dataset: Any, first: bool) -> Any:
    """The images of the first or of the other half of the classes, with labels from 0."""
    from dataclasses import replace

    num_classes = len(dataset.classes)
    start, stop = (0, num_classes // 2) if first else (num_classes // 2, num_classes)

    def select(split: Any) -> Any:
        chosen = (split.labels >= start) & (split.labels < stop)
        return replace(split, images=split.images[chosen], labels=split.labels[chosen] - start)

    test = select(dataset.test)
    return replace(dataset, train=select(dataset.train), load_test=lambda: test, classes=dataset.classes[start:stop])


def hardware_for(setting: str) -> Any:
    from dataclasses import replace

    from vitral.device.select import select_hardware

    if setting == PRETRAIN:
        return select_hardware(precision="bf16")
    if not setting.startswith(REFERENCE):
        return select_hardware(precision=setting)  # type: ignore[arg-type]
    hardware = select_hardware(precision="bf16", compile="no" if setting == "autocast-eager" else "auto")
    return replace(hardware, cuda_graphs=False, use_triton=False, fp8=False)


def make_recipe(args: argparse.Namespace, seed: int, channels: int, num_classes: int, mean: Any, std: Any) -> Any:
    from vitral.data.augment import AugmentConfig
    from vitral.models.presets import preset
    from vitral.recipes.schema import DataConfig, OptimConfig, Recipe

    side = args.image_size
    tiny = {"width": 32, "depth": 2, "heads": 2, "patch_size": side // 2}
    overrides = {"image_size": (side, side), "channels": channels, "num_classes": num_classes}
    is_fine_tuning = args.init is not None and args.worker[0] != PRETRAIN
    if is_fine_tuning:
        overrides["drop_path"] = 0.1
    model = preset("B/16", **overrides | tiny) if args.preset == "tiny" else preset(args.preset, **overrides)
    return Recipe(
        name="curve",
        data=DataConfig(name=args.data, validation=0.0, mean=mean, std=std),
        model=model,
        augment=AugmentConfig(shift=side // 14, flip=channels == 3),
        optim=OptimConfig(lr=args.lr, weight_decay=0.05, layer_decay=0.75 if is_fine_tuning else 1.0),
        batch_size=args.batch_size,
        seed=seed,
    )


def smooth(losses: Sequence[float]) -> list[float]:
    """Means of consecutive windows."""
    window = min(WINDOW, len(losses))
    return [statistics.mean(losses[i : i + window]) for i in range(0, len(losses) - window + 1, window)]


def rms(values: Sequence[float]) -> float:
    return math.sqrt(statistics.mean(value**2 for value in values))


def pooled_std(groups: list[list[float]]) -> float:
    """Standard deviation within groups, pooled over all groups."""
    groups = [group for group in groups if len(group) > 1]
    degrees_of_freedom = sum(len(group) - 1 for group in groups)
    squares = sum(statistics.variance(group) * (len(group) - 1) for group in groups)
    return math.sqrt(squares / degrees_of_freedom) if degrees_of_freedom else 0.0


def final_loss(run: Result) -> float:
    return statistics.mean(run["losses"][-2 * WINDOW :])


def mean_curve(runs: list[Result]) -> list[float]:
    return [statistics.mean(values) for values in zip(*(smooth(run["losses"]) for run in runs), strict=True)]


def compare_settings(runs: list[Result]) -> Result:
    """The distance of each setting's curve from the reference, and of the reference's seeds from each other."""
    by_setting: dict[str, list[Result]] = {}
    for run in runs:
        if "losses" in run:
            by_setting.setdefault(run["setting"], []).append(run)
    reference = by_setting.get(REFERENCE, [])
    pairs = [(a, b) for i, a in enumerate(reference) for b in reference[i + 1 :]]
    differences = [x - y for a, b in pairs for x, y in zip(smooth(a["losses"]), smooth(b["losses"]), strict=True)]
    noise = {
        "curve_rms": rms(differences) if pairs else None,
        "final_loss": max((abs(final_loss(a) - final_loss(b)) for a, b in pairs), default=None),
        "test_loss": pooled_std([[run["test_loss"] for run in group] for group in by_setting.values()]),
    }
    settings = {name: compare_with_reference(name, group, reference, noise) for name, group in by_setting.items()}
    return {"noise": noise, "settings": settings}


def compare_with_reference(setting: str, runs: list[Result], reference: list[Result], noise: Result) -> Result:
    row: Result = {
        "seeds": len(runs),
        "final_loss": statistics.mean(map(final_loss, runs)),
        "test_loss": statistics.mean(run["test_loss"] for run in runs),
        "test_top1": statistics.mean(run["test_top1"] for run in runs),
    }
    seeds = {run["seed"] for run in runs}
    same_seeds = [run for run in reference if run["seed"] in seeds]
    if setting == REFERENCE or not same_seeds:
        return row
    difference = [a - b for a, b in zip(mean_curve(runs), mean_curve(same_seeds), strict=True)]
    row |= {
        "difference": difference,
        "curve_rms": rms(difference),
        "final_difference": statistics.mean(difference[-2:]),
        "test_loss_difference": row["test_loss"] - statistics.mean(run["test_loss"] for run in same_seeds),
    }
    if noise["curve_rms"] is not None:
        standard_error = noise["test_loss"] * math.sqrt(1 / len(runs) + 1 / len(same_seeds))
        is_close = row["curve_rms"] <= noise["curve_rms"] and row["test_loss_difference"] <= 2 * standard_error
        row |= {"test_loss_standard_error": standard_error, "within_noise": is_close}
    return row


def summary_lines(comparison: Result) -> list[str]:
    noise = comparison["noise"]
    lines = []
    if noise["curve_rms"] is not None:
        lines.append(
            f"noise between seeds of {REFERENCE}: smoothed curves {noise['curve_rms']:.4f} (rms), final losses "
            f"{noise['final_loss']:.4f}; standard deviation of the test loss {noise['test_loss']:.4f}"
        )
    for name, row in comparison["settings"].items():
        line = f"{name:<16} last {2 * WINDOW} steps {row['final_loss']:.4f}   test loss {row['test_loss']:.4f}, "
        line += f"top-1 {row['test_top1']:.2%}"
        if "curve_rms" in row:
            line += f"   difference from {REFERENCE}: {row['curve_rms']:.4f} rms, final {row['final_difference']:+.4f}"
            line += f", test loss {row['test_loss_difference']:+.4f}"
        if "within_noise" in row:
            line += "   within noise" if row["within_noise"] else "   NOT within noise"
        lines.append(line)
    return lines


def plot(content: Result, path: Path) -> None:
    """Loss curves above, differences from the reference below; legible on light and dark pages."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    grey, palette = "#7f7f7f", ("#3b82c4", "#d9822b", "#3f9f5f", "#b5539b", "#8a6d3b")
    runs = [run for run in content["runs"] if "losses" in run]
    settings = list(dict.fromkeys(run["setting"] for run in runs))
    colours = dict(zip(settings, palette * len(settings), strict=False))
    style = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), grey)
    with pyplot.rc_context({"font.size": 9, **style}):
        figure, (upper, lower) = pyplot.subplots(
            2, 1, figsize=(7, 5), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        reference = {run["seed"]: smooth(run["losses"]) for run in runs if run["setting"] == REFERENCE}
        for run in runs:
            curve = smooth(run["losses"])
            window = min(WINDOW, len(run["losses"]))
            steps = [window * (i + 0.5) for i in range(len(curve))]
            line = {"color": colours[run["setting"]], "linewidth": 1.3, "linestyle": ("-", "--", ":")[run["seed"] % 3]}
            upper.plot(steps, curve, label=f"{run['setting']}, seed {run['seed']}", **line)
            reference_curve = reference.get(run["seed"])
            if run["setting"] != REFERENCE and reference_curve:
                lower.plot(steps, [a - b for a, b in zip(curve, reference_curve, strict=True)], **line)
        if noise := content["noise"]["curve_rms"]:
            label = f"between seeds of {REFERENCE} (rms)"
            lower.axhspan(-noise, noise, color=grey, alpha=0.2, linewidth=0, label=label)
            lower.legend(frameon=False, labelcolor=grey, loc="upper right")
        lower.axhline(0, color=grey, linewidth=0.6)
        lower.margins(y=0.3)
        upper.set_ylabel("training loss")
        lower.set_ylabel(f"difference from\n{REFERENCE}, same seed")
        lower.set_xlabel("step")
        upper.legend(frameon=False, labelcolor=grey, ncols=2)
        for axes in (upper, lower):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=150, transparent=True)
        pyplot.close(figure)


def run_in_subprocess(setting: str, seed: int, args: argparse.Namespace, num_threads: int) -> Result:
    options = [word for name in WORKER_ARGUMENTS for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    options += [] if args.init is None else ["--init", str(args.init)]
    command = [sys.executable, "-W", "ignore", __file__, "--worker", setting, str(seed), *options]
    environment = {"OMP_NUM_THREADS": str(num_threads), **os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(num_threads)}
    failure: Result = {"setting": setting, "seed": seed}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, env=environment)
    except subprocess.TimeoutExpired:
        return failure | {"failed": f"not finished after {args.timeout:.0f} s"}
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["no error message"])[-1]
        return failure | {"failed": last_line[:300]}
    result: Result = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=[REFERENCE, "autocast-eager", "bf16"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--preset", default="B/16")
    parser.add_argument("--image-size", type=int, default=112)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument(
        "--fine-tune", type=int, metavar="STEPS", help="first train half of the classes for STEPS steps"
    )
    parser.add_argument("--init", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parallel", type=int, default=8, help="number of runs at a time")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds per run")
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "PNG"), help="plot an earlier result")
    parser.add_argument("--worker", nargs=2, metavar=("SETTING", "SEED"), help=argparse.SUPPRESS)
    add_output_arguments(parser)
    return parser.parse_args()


def run_worker(args: argparse.Namespace) -> None:
    """Print the result of one run, or its failure, as one line of JSON."""
    setting, seed = args.worker[0], int(args.worker[1])
    try:
        print(json.dumps(run_training(setting, seed, args)))
    except Exception as error:
        print(json.dumps({"setting": setting, "seed": seed, "failed": error_summary(error)}))


def main() -> None:
    args = parse_args()
    if args.draw:
        plot(json.loads(args.draw[0].read_text()), args.draw[1])
        return
    if args.worker:
        run_worker(args)
        return
    if not has_gpu():
        print(NO_GPU_NOTICE)
        args.preset, args.image_size, args.data, args.batch_size = "tiny", 8, "digits", 32
        args.steps, args.parallel = min(args.steps, 100), 1
        args.fine_tune = min(args.fine_tune, 100) if args.fine_tune else None
    cases: list[tuple[str, int]] = [(setting, seed) for seed in range(args.seeds) for setting in args.settings]
    num_threads = max(1, (os.cpu_count() or 2) // min(args.parallel, len(cases)))
    with ThreadPoolExecutor(args.parallel) as pool, tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        if args.fine_tune:
            args.init = Path(cache) / "pretrained.pt"
            steps, lr = args.steps, args.lr
            args.steps, args.lr = args.fine_tune, PRETRAIN_LR
            pretrained = run_in_subprocess(PRETRAIN, 0, args, os.cpu_count() or 2)
            args.steps, args.lr = steps, lr
            if "failed" in pretrained:
                raise SystemExit(f"{PRETRAIN}: {pretrained['failed']}")
            print(f"{PRETRAIN}: top-1 {pretrained['test_top1']:.2%} on its classes", flush=True)
        runs = list(pool.map(lambda case: run_in_subprocess(case[0], case[1], args, num_threads), cases))
    comparison = compare_settings(runs)
    for run in runs:
        if "failed" in run:
            print(f"{run['setting']}, seed {run['seed']}: {run['failed']}")
    print("\n".join(summary_lines(comparison)))
    rows = [{name: value for name, value in run.items() if name != "losses"} for run in runs]
    settings = {name: getattr(args, name) for name in WORKER_ARGUMENTS}
    write_results(args, rows, {"training": settings, **comparison, "runs": runs})


if __name__ == "__main__":
    main()
