"""Accuracy, time and memory of every --tune value, and the size of its adapter.

    python benchmarks/tuning.py --data hymenoptera --weights vit_tiny_patch16_224.timm.safetensors --seeds 3 --save
    python benchmarks/tuning.py --data hymenoptera --weights vit_tiny.safetensors --per-class 5 --skip-speed
    python benchmarks/tuning.py --skip-accuracy --model B/16 --batch-size 256

Accuracy: fine-tunes the weights on the data with each setting and several seeds. A setting is a --tune value, with
recipe fields after colons: lora:optim.layer_decay=1. Reported are the best validation accuracy of each run with mean
and 95% interval over the seeds (Student's t), the seconds of training, and the peak memory that PyTorch allocated.

Speed: training steps of a model with random weights, with fused kernels and with plain PyTorch (eager, autocast).
Memory is the peak allocation from building the model to the last step. On a GPU it also compares the two ways to the
gradients of LoRA's factors: through thin GEMMs, or from the gradient of the whole weight.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _output import add_output_arguments, write_results
from vitral.data.preprocess import Preprocessing
from vitral.device.memory import release_cached_memory
from vitral.device.select import Hardware, select_hardware
from vitral.models.lora import LoRAConfig, LoRALinear
from vitral.models.presets import preset
from vitral.recipes.schema import DataConfig, OptimConfig, Recipe
from vitral.runs.run import Run
from vitral.training.backend import make_backend
from vitral.training.hardware import parallel_plan, training_hardware
from vitral.training.setup import resolve_recipe, setup_training
from vitral.training.state import init_state
from vitral.training.step import StepContext, StepRunner
from vitral.training.trainer import Trainer
from vitral.training.tuning import count_trained
from vitral.weights.adapter import ADAPTER_FILE

SETTINGS = (
    "full", "lora", "lora:optim.layer_decay=1", "last-4", "last-1", "bias", "bias:optim.layer_decay=1", "head",
    "head:optim.lr=0.01",
)  # fmt: skip
SPEED_TUNES = ("full", "lora", "last-4", "last-1", "bias", "head")
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # by the number of seeds


def parse_setting(setting: str) -> dict[str, Any]:
    tune, *fields = setting.split(":")
    values = dict(field.split("=") for field in fields)
    return {"tune": tune} | {name: float(value) if value[0].isdigit() else value for name, value in values.items()}


def fine_tune(args: argparse.Namespace, setting: str, seed: int) -> dict[str, Any]:
    recipe = resolve_recipe(args.data, None, args.weights)
    overrides = parse_setting(setting) | {"seed": seed, "epochs": args.epochs}
    setup = setup_training(recipe.with_overrides(overrides))
    hardware = training_hardware(setup)
    reset_peak(hardware)
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder), "run", Path(folder) / "run")
        trainer = Trainer(
            setup.recipe, setup.dataset, setup.preprocessing, run, hardware,
            initial_weights=setup.initial_weights, base=setup.base,
        )  # fmt: skip
        trainer.fit()
        metrics = run.load_metrics()
        adapter = run.model_dir / ADAPTER_FILE
        megabytes = (adapter if adapter.exists() else run.model_dir / "weights.safetensors").stat().st_size / 1e6
    trained, _ = count_trained(setup.recipe)
    return {
        "part": "accuracy", "setting": setting, "seed": seed, "top1": max(row["validation_top1"] for row in metrics),
        "seconds": sum(row["training_seconds"] for row in metrics), "peak_mib": peak_mib(hardware),
        "trained_parameters": trained, "file_mb": megabytes,
    }  # fmt: skip


def few_per_class(data: str, per_class: int, folder: Path) -> str:
    """A folder with links to the first images of each class of the training split, and to all others."""
    for split in (path for path in Path(data).iterdir() if path.is_dir()):
        for images in (path for path in split.iterdir() if path.is_dir()):
            target = folder / split.name / images.name
            target.mkdir(parents=True)
            files = sorted(images.iterdir())
            for file in files[:per_class] if split.name == "train" else files:
                (target / file.name).symlink_to(file.resolve())
    return str(folder)


def measure_accuracy(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    print(f"{'setting':<26} {'top-1':>20} {'seconds':>8} {'MiB':>8} {'trained':>10} {'file':>9}")
    for setting in args.settings:
        runs = []
        for seed in range(args.seeds):
            runs.append(fine_tune(args, setting, seed))
            rows.append(runs[-1])
            write_results(args, rows)
        top1 = [100 * row["top1"] for row in runs]
        interval = T_95.get(len(top1), 1.96) * statistics.stdev(top1) / math.sqrt(len(top1)) if len(top1) > 1 else 0.0
        mean = {name: statistics.mean(row[name] for row in runs) for name in ("seconds", "peak_mib")}
        print(
            f"{setting:<26} {statistics.mean(top1):8.2f}% ± {interval:5.2f} n={len(top1)} {mean['seconds']:8.1f} "
            f"{mean['peak_mib']:8.0f} {runs[0]['trained_parameters']:>10,} {runs[0]['file_mb']:6.2f} MB",
            flush=True,
        )


def measure_step(args: argparse.Namespace, tune: str, hardware: Hardware, label: str) -> dict[str, Any]:
    """Seconds per step and peak memory, from random images and weights."""
    recipe = Recipe(
        name="speed", data=DataConfig(name="none"), model=preset(args.model, num_classes=100), tune=tune,
        optim=OptimConfig(lr=1e-4), batch_size=args.batch_size,
    )  # fmt: skip
    side = recipe.model.image_size
    preprocessing = Preprocessing(image_size=side, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    messages: list[str] = []
    reset_peak(hardware)
    state = init_state(recipe, hardware, 1000)
    parallel = parallel_plan(recipe, hardware)
    backend = make_backend(
        state.vit, recipe, preprocessing, hardware, parallel, micro_batch_size=args.batch_size, log=messages.append
    )
    runner = StepRunner(state, StepContext(recipe, backend), 1000)
    device = hardware.device
    images = torch.randint(0, 256, (args.batch_size, 3, *side), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 100, (args.batch_size,), device=device)

    def seconds_of(num_steps: int) -> float:
        hardware.synchronize()
        start = time.perf_counter()
        for _ in range(num_steps):
            runner.run(images, labels)
        hardware.synchronize()
        return (time.perf_counter() - start) / num_steps

    seconds_of(args.warmup)
    times = [seconds_of(args.steps) for _ in range(args.rounds)]
    return {
        "part": "speed", "model": args.model, "batch_size": args.batch_size, "backend": label, "setting": tune,
        "overrides": " ".join(sorted(getattr(backend, "overrides", ()))), "ms": 1000 * statistics.median(times),
        "ms_min": 1000 * min(times), "ms_max": 1000 * max(times), "peak_mib": peak_mib(hardware),
        "messages": "; ".join(messages),
    }  # fmt: skip


def measure_speed(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    fused = select_hardware(precision="auto", width=preset(args.model).width, steps=100_000)
    fused = replace(fused, compile=False)
    plain = replace(fused, use_triton=False, cuda_graphs=False)
    print(f"\n{args.model}, batch size {args.batch_size}, {fused.name}: per step and peak memory, and relative to full")
    for label, hardware in (("fused", fused), ("pytorch", plain)):
        if label == "fused" and not fused.use_triton:
            continue
        full: dict[str, Any] | None = None
        for tune in args.tunes:
            row = measure_step(args, tune, hardware, label)
            rows.append(row)
            full = full or row
            print(
                f"{label:<8} {tune:<8} {row['ms']:8.1f} ms ({row['ms_min']:.1f} to {row['ms_max']:.1f})  "
                f"{row['peak_mib']:8.0f} MiB   {row['ms'] / full['ms']:.2f}x time, "
                f"{row['peak_mib'] / max(full['peak_mib'], 1):.2f}x memory  {row['overrides']} {row['messages']}",
                flush=True,
            )
            write_results(args, rows)


def measure_lora_gradients(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Gradients of A and B for the layers of one block: thin GEMMs, or the whole weight gradient and its products."""
    from vitral.kernels.linear import lora_gradients, weight_gradient

    config = preset(args.model)
    D, M, device = config.width, config.hidden_width, torch.device("cuda")
    num_tokens = args.batch_size * (math.prod(config.grid) + config.num_prefix_tokens)
    for name, (inputs, outputs) in {"qkv": (D, 3 * D), "project": (D, D), "expand": (D, M), "contract": (M, D)}.items():
        layer = LoRALinear(nn.Linear(inputs, outputs, device=device), LoRAConfig())
        x = torch.randn(num_tokens, inputs, device=device, dtype=torch.bfloat16)
        grad = torch.randn(num_tokens, outputs, device=device, dtype=torch.bfloat16)
        A, B = layer.lora_A.weight.detach(), layer.lora_B.weight.detach()

        def whole(x: Any = x, grad: Any = grad, A: Any = A, B: Any = B) -> None:
            gradient = weight_gradient(grad, x)
            _ = B.t() @ gradient, gradient @ A.t()

        def thin(layer: Any = layer, x: Any = x, grad: Any = grad) -> None:
            lora_gradients(layer, grad, x)

        with torch.no_grad():
            times = {way: gpu_ms(function) for way, function in (("thin", thin), ("whole", whole))}
        rows.append({"part": "lora gradients", "setting": name, **{f"{way}_ms": ms for way, ms in times.items()}})
        print(f"{name:<9} thin {times['thin']:.3f} ms, whole {times['whole']:.3f} ms")


def gpu_ms(function: Callable[[], None], repeats: int = 50) -> float:
    for _ in range(5):
        function()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def reset_peak(hardware: Hardware) -> None:
    gc.collect()
    release_cached_memory(hardware.device)
    if hardware.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_mib(hardware: Hardware) -> float:
    return torch.cuda.max_memory_allocated() / 2**20 if hardware.device.type == "cuda" else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", help="folder of images with train and validation folders")
    parser.add_argument("--weights", help="checkpoint to fine-tune")
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--per-class", type=int, help="train on this many images per class")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--skip-accuracy", action="store_true")
    parser.add_argument("--skip-speed", action="store_true")
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--tunes", nargs="+", default=SPEED_TUNES)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=5)
    add_output_arguments(parser)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if not args.skip_speed:
        measure_speed(args, rows)
        if torch.cuda.is_available():
            measure_lora_gradients(args, rows)
    if not args.skip_accuracy:
        if not (args.data and args.weights):
            parser.error("--data and --weights are needed, or --skip-accuracy")
        with tempfile.TemporaryDirectory() as folder:
            if args.per_class:
                args.data = few_per_class(args.data, args.per_class, Path(folder) / "images")
            measure_accuracy(args, rows)
    write_results(args, rows, packages=("torch", "triton"))


if __name__ == "__main__":
    main()
