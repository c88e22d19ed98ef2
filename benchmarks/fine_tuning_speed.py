"""Speed of fine-tuning on a GPU: vitral compared with timm, and what each option of fine-tuning costs in vitral.

    python benchmarks/fine_tuning_speed.py [--budget 200] [--save]
    python benchmarks/fine_tuning_speed.py --part options --options "layer scale" "dropout 0.1"

Comparison: B/16 at 224 and 384 px, and a DINOv2-style B/14 (layer scale, 4 registers, 261 tokens). All train everything
with drop path 0.1, layer-wise learning rates (0.75), gradient clipping, AdamW and 1000 classes, at the same batch size.
vitral runs its own training step in bf16 and FP8, from uint8 pixels; timm runs torch.compile, bf16 autocast,
channels-last, fused AdamW, and gets normalised images on the GPU. Each case is a process of its own; all prepare in
parallel and are then timed one at a time, in several rounds.

Options: B/16 at 224 px in vitral, each option alone, in turns with the same training without it. The ratio is time per
image with the option over time per image without. Both parts report medians and ranges of the rounds.

Without a GPU: a toy version, which only shows that everything runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from _output import add_output_arguments, environment, write_results
from peers import NO_GPU_NOTICE, VitralTraining, error_summary, has_gpu, register_torchvision_ops, synchronize

PACKAGES = ("torch", "triton", "timm")
FINE_TUNING: dict[str, Any] = {"model.drop_path": 0.1, "optim.layer_decay": 0.75, "optim.grad_clip": 1.0}
DINOV2: dict[str, Any] = {"model.patch_size": 14, "model.layer_scale": 1e-5, "model.registers": 4}
WARMUP_STEPS = 6
PREPARE_SECONDS = 130.0  # for compiling in parallel
OPTION_ROUNDS = 3


@dataclass(frozen=True)
class Task:
    """A model and a batch size. `fields` are fields of the recipe."""

    batch_size: int
    fields: dict[str, Any] = field(default_factory=dict)


TASKS = {
    "B/16 224 px": Task(128),
    "B/16 384 px": Task(64, {"model.image_size": (384, 384)}),
    "DINOv2 B/14 224 px": Task(128, DINOV2),
}
LIBRARIES = ("vitral bf16", "vitral fp8", "timm")

PLAIN: tuple[str, int, dict[str, Any]] = ("bf16", 128, {})  # precision, batch size, recipe fields
DINOV3: dict[str, Any] = {"model.layer_scale": 1e-5, "model.registers": 4, "model.positions": "rotary"}
S16: dict[str, Any] = {"model.width": 384, "model.heads": 6, "model.mlp_width": 1536}
OPTIONS: dict[str, tuple[str, int, dict[str, Any]]] = {  # each is compared with the training without it
    "layer scale": ("bf16", 128, {"model.layer_scale": 1e-5}),
    "dropout 0.1": ("bf16", 128, {"model.dropout": 0.1}),
    "drop path 0.1": ("bf16", 128, {"model.drop_path": 0.1}),
    "drop path 0.4": ("bf16", 128, {"model.drop_path": 0.4}),
    "LoRA": ("bf16", 128, {"tune": "lora"}),
    "frozen first half": ("bf16", 128, {"tune": "last-6"}),
    "gradient clipping": ("bf16", 128, {"optim.grad_clip": 1.0}),
    "EMA": ("bf16", 128, {"ema": 0.2}),
    "activation checkpointing": ("bf16", 128, {"activation_checkpointing": True}),
    "1003 classes": ("bf16", 128, {"model.num_classes": 1003}),
    "layer-wise learning rates": ("bf16", 128, {"optim.layer_decay": 0.75}),
    "FP8": ("fp8", 128, {}),
    "FP8, batch size 125": ("fp8", 125, {}),
    "batch size 32": ("bf16", 32, {}),
    "FP8, batch size 32": ("fp8", 32, {}),
    "S/16": ("bf16", 128, S16),
    "FP8, S/16": ("fp8", 128, S16),
    "S/16, batch size 32": ("bf16", 32, S16),
    "FP8, S/16, batch size 32": ("fp8", 32, S16),
    "DINOv2 B/14": ("bf16", 128, DINOV2),
    "FP8, layer scale": ("fp8", 128, {"model.layer_scale": 1e-5}),
    "FP8, dropout 0.1": ("fp8", 128, {"model.dropout": 0.1}),
    "FP8, LoRA": ("fp8", 128, {"tune": "lora"}),
    "FP8, frozen first half": ("fp8", 128, {"tune": "last-6"}),
    "attention dropout 0.1": ("bf16", 128, {"model.dropout_attention": 0.1}),
    "LoRA, dropout 0.1": ("bf16", 128, {"tune": "lora", "lora.dropout": 0.1}),
    "DINOv3 blocks": ("bf16", 128, DINOV3 | {"model.rope": "centered", "model.key_bias": False}),
    "SwiGLU": ("bf16", 128, {"model.activation": "swiglu", "model.mlp_width": 2048}),
    "FP8, activation checkpointing": ("fp8", 128, {"activation_checkpointing": True}),
    "embedding dropout 0.1": ("bf16", 128, {"model.dropout_embedding": 0.1}),
    "quick GELU": ("bf16", 128, {"model.activation": "quick_gelu"}),
}

StepFn = Callable[[], None]


def make_recipe(batch_size: int, fields: dict[str, Any]) -> Any:
    from vitral.models.presets import preset
    from vitral.recipes.schema import DataConfig, OptimConfig, Recipe

    half = (0.5,) * 3
    recipe = Recipe(
        name="fine-tuning",
        data=DataConfig(name="noise", mean=half, std=half),
        model=preset("B/16"),
        optim=OptimConfig(lr=1e-4, grad_clip=0.0),
        batch_size=batch_size,
    )
    if not has_gpu():
        toy = {"model.image_size": (56, 56), "model.width": 32, "model.depth": 2, "model.heads": 2}
        toy |= {"model.patch_size": fields.get("model.patch_size", 28), "model.mlp_width": 32}
        fields = {**fields, **toy, "tune": str(fields.get("tune", "full")).replace("last-6", "last-1")}
    return recipe.with_overrides(fields)


def make_vitral_step(precision: str, batch_size: int, fields: dict[str, Any]) -> tuple[StepFn, dict[str, Any]]:
    """One training step of vitral, and what it uses."""
    import torch

    from vitral.data.preprocess import Preprocessing
    from vitral.device.select import select_hardware

    recipe = make_recipe(batch_size if has_gpu() else 4, fields)
    config = recipe.model
    settings: dict[str, Any] = {"precision": precision} if has_gpu() else {}
    hardware = replace(select_hardware(**settings, width=config.width), compile=False)
    preprocessing = Preprocessing(image_size=config.image_size, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    training = VitralTraining(recipe, preprocessing, hardware, total_steps=100_000)
    shape = (recipe.batch_size, 3, *config.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=hardware.device)
    labels = torch.randint(0, config.num_classes, (recipe.batch_size,), device=hardware.device)
    return lambda: training.step(images, labels), {
        "kernels": " ".join(sorted(getattr(training.backend, "overrides", ()))),
        "batch_size": recipe.batch_size,
    }


def make_timm_step(batch_size: int, fields: dict[str, Any]) -> tuple[StepFn, dict[str, Any]]:
    """The same training in timm: compiled, bf16 autocast, fused AdamW with layer-wise learning rates."""
    import torch
    import torch.nn.functional as F

    register_torchvision_ops()
    from timm.models.vision_transformer import VisionTransformer
    from timm.optim import param_groups_layer_decay

    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if has_gpu() else "cpu")
    recipe = make_recipe(batch_size if has_gpu() else 4, fields)
    config, optim = recipe.model, recipe.optim
    model: Any = VisionTransformer(
        img_size=config.image_size[0],
        patch_size=config.patch_size,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.hidden_width / config.width,
        num_classes=config.num_classes,
        drop_path_rate=config.drop_path,
        init_values=config.layer_scale,
        reg_tokens=config.registers,
    )
    model = model.to(device, memory_format=torch.channels_last).train()
    groups: Any = param_groups_layer_decay(model, weight_decay=optim.weight_decay, layer_decay=optim.layer_decay)
    for group in groups:
        group["lr"] = optim.lr * group["lr_scale"]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, fused=has_gpu())
    images = torch.randn(recipe.batch_size, 3, *config.image_size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, config.num_classes, (recipe.batch_size,), device=device)

    def compute_loss() -> Any:
        return F.cross_entropy(model(images).float(), labels)

    compiled = torch.compile(compute_loss) if has_gpu() else compute_loss

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, {"kernels": "compiled, autocast", "batch_size": recipe.batch_size}


def prepare(make: Callable[[], tuple[StepFn, dict[str, Any]]]) -> tuple[StepFn, dict[str, Any]]:
    """Build a step, run it until everything is compiled and captured, and measure its memory."""
    import torch

    before = torch.cuda.memory_allocated() if has_gpu() else 0
    step, info = make()
    step()
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARMUP_STEPS):
        step()
    synchronize()
    if has_gpu():
        info["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return step, info


def time_step(step: StepFn, seconds: float) -> float:
    """Milliseconds per step over a round of about this many seconds."""
    start, count = time.perf_counter(), 0
    step()
    synchronize()
    num_steps = max(2, min(50, round(seconds / max(time.perf_counter() - start, 1e-4))))
    start = time.perf_counter()
    for count in range(1, num_steps + 1):  # noqa: B007
        step()
    synchronize()
    return 1000 * (time.perf_counter() - start) / count


def summarise(times: list[float]) -> dict[str, float]:
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}


# Comparison


def make_case(task_name: str, library: str) -> tuple[StepFn, dict[str, Any]]:
    task = TASKS[task_name]
    fields = FINE_TUNING | task.fields
    if library == "timm":
        return make_timm_step(task.batch_size, fields)
    return make_vitral_step(library.removeprefix("vitral "), task.batch_size, fields)


def run_worker(task_name: str, library: str, seconds: float) -> None:
    """Prepare a case, report it as a JSON line, then time one round per line on stdin."""
    try:
        step, info = prepare(lambda: make_case(task_name, library))
        print(json.dumps(info), flush=True)
        for _ in sys.stdin:
            print(json.dumps({"ms": time_step(step, seconds)}), flush=True)
    except Exception as error:
        print(json.dumps({"failed": error_summary(error)}), flush=True)


class CaseProcess:
    """The process of one case of the comparison."""

    def __init__(self, task: str, library: str, seconds: float) -> None:
        self.task, self.library, self.times = task, library, list[float]()
        self.info: dict[str, Any] = {}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        command = [sys.executable, "-W", "ignore", __file__, "--worker", task, library, "--seconds", str(seconds)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)

    def receive(self, deadline: float) -> None:
        """Wait for the next line of JSON."""
        stdout = self.process.stdout
        assert stdout is not None
        while select.select([stdout], [], [], max(deadline - time.time(), 0.1))[0]:
            line = stdout.readline()
            if line.startswith("{"):
                message = json.loads(line)
                self.times += [message.pop("ms")] if "ms" in message else []
                self.info |= message
                return
            if not line:
                self.log.seek(0)
                self.info["failed"] = (self.log.read().strip().splitlines() or ["no output"])[-1][:200]
                return
        self.info["failed"] = "out of time"

    def run_round(self, deadline: float) -> None:
        if "failed" not in self.info:
            assert self.process.stdin is not None
            with suppress(BrokenPipeError):
                self.process.stdin.write("round\n")
                self.process.stdin.flush()
            self.receive(deadline)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {"part": "comparison", "task": self.task, "case": self.library, **self.info}
        return row | (summarise(self.times) | {"rounds": len(self.times)} if self.times else {})


def compare(args: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """All cases prepare in parallel and are then timed in turns, task by task."""
    processes = [CaseProcess(task, library, args.seconds) for task in args.tasks for library in args.libraries]
    try:
        prepared = min(deadline, time.time() + PREPARE_SECONDS)
        for process in processes:
            process.receive(prepared)
        for task in args.tasks:
            for _ in range(args.rounds):
                for process in (process for process in processes if process.task == task):
                    process.run_round(deadline)
    finally:
        for process in processes:
            process.close()
    rows = [process.row() for process in processes]
    for row in rows:
        timm = next((r["ms"] for r in rows if (r["task"], r["case"]) == (row["task"], "timm") and "ms" in r), None)
        row["speed"] = timm / row["ms"] if timm and "ms" in row else None
    return rows


# Options


def measure_options(args: argparse.Namespace, deadline: float) -> Iterator[dict[str, Any]]:
    """Each option in turns with the training without it."""
    bases: dict[str, tuple[StepFn, dict[str, Any]]] = {}
    for name in args.options:
        if time.time() > deadline - 12:
            yield {"part": "options", "case": name, "failed": "out of time"}
            continue
        try:
            yield {"part": "options", "case": name, **measure_option(name, bases, args)}
        except Exception as error:
            yield {"part": "options", "case": name, "failed": error_summary(error)}
        gc.collect()
        if has_gpu():
            import torch

            torch.cuda.empty_cache()


def measure_option(name: str, bases: dict[str, tuple[StepFn, dict[str, Any]]], args: Any) -> dict[str, Any]:
    precision, batch_size, fields = OPTIONS[name]
    base_precision = "bf16" if name == "FP8" else precision
    if base_precision not in bases:
        bases[base_precision] = prepare(lambda: make_vitral_step(base_precision, PLAIN[1], {}))
    base, base_info = bases[base_precision]
    step, info = prepare(lambda: make_vitral_step(precision, batch_size, fields))
    times, base_times = list[float](), list[float]()
    for _ in range(OPTION_ROUNDS):
        base_times.append(time_step(base, args.seconds))
        times.append(time_step(step, args.seconds))
    per_image = statistics.median(times) / info["batch_size"]
    return {
        **info,
        **summarise(times),
        "rounds": OPTION_ROUNDS,
        "base_ms": statistics.median(base_times),
        "base_peak_gib": base_info.get("peak_gib"),
        "time_ratio": per_image / (statistics.median(base_times) / base_info["batch_size"]),
    }


def format_row(row: dict[str, Any]) -> str:
    name = f"{row.get('task', ''):<20}{row['case']:<30}"
    if "ms" not in row:
        return f"{name} {row.get('failed', 'not timed')}"
    memory = f"{row['peak_gib']:6.2f} GiB" if row.get("peak_gib") is not None else ""
    if row["part"] == "comparison":
        ratio = f"{row['speed']:.2f}x timm" if row["speed"] else ""
    else:
        ratio = f"{row['time_ratio']:.3f}x the time of {row['base_ms']:.1f} ms"
    return (
        f"{name} {row['ms']:8.2f} ms ({row['ms_min']:.2f} to {row['ms_max']:.2f}) {memory}  {ratio}  {row['kernels']}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "comparison", "options"), default="all")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=LIBRARIES)
    parser.add_argument("--options", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="length of a round")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds for everything; the rest is skipped")
    parser.add_argument("--worker", nargs=2, metavar=("TASK", "LIBRARY"), help=argparse.SUPPRESS)
    add_output_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.worker:
        task, library = args.worker
        run_worker(task, library, args.seconds)
        return
    deadline = time.time() + args.budget
    if not has_gpu():
        print(NO_GPU_NOTICE)
        args.rounds, args.seconds = 1, 0.01
    header, rows = environment(PACKAGES), list[dict[str, Any]]()
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    print(f"{header['gpu'] or header['cpu']}, {versions}, {header['date']}, {args.rounds} rounds", flush=True)
    if args.part != "options":
        rows += compare(args, deadline)
        print("\n".join(map(format_row, rows)), flush=True)
        write_results(args, rows, packages=PACKAGES)
    if args.part != "comparison":
        for row in measure_options(args, deadline):
            rows.append(row)
            print(format_row(row), flush=True)
            write_results(args, rows, packages=PACKAGES)


if __name__ == "__main__":
    main()
