"""Fused training with several processes on one GPU: correctness, the cost of DDP, and the inputs of a scaling model.

    python benchmarks/multi_process.py --save
    python benchmarks/multi_process.py --parts equal

equal    Two processes share the GPU (gloo): a few steps of DDP and of FSDP, in bf16 and FP8, against one process on the
         same batches. One process that accumulates two micro-batches adds the same gradients as two ranks.
cost     B/16, batch 256: one process under NCCL with a world of size 1, whose gradients pass through all buckets,
         against one process without a process group. Both replay CUDA graphs, in processes of their own, in turns.
overlap  B/16, batch 256, in the process of `cost`: when each bucket's gradients are final during the backward pass, and
         the time of packing and reducing all buckets. The scaling model simulates an all-reduce of these buckets on n
         GPUs: bytes x 2(n-1)/n / bandwidth, one bucket after the other, none before it is final. Bandwidths are
         assumptions (NVLink 450 GB/s, network 50 GB/s per GPU), as is that communication does not slow down kernels.

Without a GPU a toy version shows that everything runs.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from _output import add_output_arguments, write_results
from peers import NO_GPU_NOTICE, VitralTraining, has_gpu, synchronize

EQUAL_STEPS = 4
BANDWIDTHS = {"NVLink 450 GB/s": 450e9, "network 50 GB/s per GPU": 50e9}
LATENCY = 20e-6  # per collective, an assumption
COST_CASES = {  # precision, parallelism, dtype of the reduction
    "fp8": ("fp8", "single", "fp32"),
    "fp8 ddp": ("fp8", "ddp", "fp32"),
    "fp8 ddp bf16 reduction": ("fp8", "ddp", "bf16"),
    "bf16": ("bf16", "single", "fp32"),
    "bf16 ddp": ("bf16", "ddp", "fp32"),
}


def make_training(
    precision: Any, mode: Any, *, is_large: bool, rank: int = 0, size: int = 1, grad_accum: int = 1,
    reduce_dtype: Any = "fp32", cuda_graphs: bool = True,
) -> tuple[VitralTraining, Any, Any]:  # fmt: skip
    """A training step with its images and labels: B/16, or a small model for comparisons."""
    import torch

    from vitral.data.preprocess import Preprocessing
    from vitral.device.select import select_hardware
    from vitral.distributed.parallel import ParallelPlan
    from vitral.distributed.world import World
    from vitral.models.presets import preset
    from vitral.models.vit import ViTConfig
    from vitral.recipes.schema import DataConfig, OptimConfig, Recipe

    if not has_gpu():
        precision = "fp32"
        config, batch_size = ViTConfig(image_size=(16, 16), patch_size=8, width=32, depth=2, heads=2, num_classes=16), 8
    elif is_large:
        config, batch_size = preset("B/16", num_classes=1000), 256
    else:
        config, batch_size = (
            ViTConfig(image_size=(96, 96), patch_size=8, width=512, depth=4, heads=8, num_classes=16),
            64,
        )
    hardware = select_hardware(precision=precision, compile="auto" if has_gpu() else "no", steps=100)
    hardware = replace(hardware, world=World(rank=rank, size=size), cuda_graphs=cuda_graphs and hardware.cuda_graphs)
    half = (0.5,) * 3
    recipe = Recipe(
        name="multi-process",
        data=DataConfig(name="noise", mean=half, std=half),
        model=config,
        optim=OptimConfig(lr=1e-3, grad_clip=0.0 if is_large else 1.0),
        batch_size=batch_size,
        grad_accum=grad_accum,
        reduce_dtype=reduce_dtype,
    )
    preprocessing = Preprocessing(image_size=config.image_size, channels=3, mean=half, std=half)
    plan = ParallelPlan(mode=mode, reason="benchmark")
    training = VitralTraining(recipe, preprocessing, hardware, total_steps=1000, parallel=plan)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch_size, 3, *config.image_size), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, config.num_classes, (batch_size,), generator=generator)
    return training, images.to(hardware.device), labels.to(hardware.device)


def join(backend: str, rank: int, size: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    if has_gpu():
        torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)


def leave_process_group() -> None:
    """As after training: the captured graphs are freed first."""
    import gc

    import torch.distributed as dist

    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


# Part "equal": one worker trains every case of its kind, and saves losses and weights


def run_equal_worker(rank: int, size: int, folder: Path) -> None:
    import torch

    if size > 1:
        join("gloo", rank, size, folder)
    modes = ("ddp", "fsdp") if size > 1 else ("single", "accumulated")
    for mode in modes:
        for precision in ("bf16", "fp8"):
            is_accumulated = mode == "accumulated"
            training, images, labels = make_training(
                precision, "single" if is_accumulated else mode, is_large=False, rank=rank, size=size,
                grad_accum=2 if is_accumulated else 1, cuda_graphs=False,
            )  # fmt: skip
            losses = []
            for step in range(EQUAL_STEPS):
                before = training.state.epoch_sums.clone()
                training.step(images.roll(step, 0), labels.roll(step, 0))
                losses.append(((training.state.epoch_sums - before)[0] / len(labels)).item())
            weights = full_weights(training)
            overrides = sorted(getattr(training.backend, "overrides", ()))
            if rank == 0:
                content = {
                    "losses": losses,
                    "overrides": overrides,
                    "weights": weights,
                }
                torch.save(content, folder / f"{precision}-{mode}.pt")
    print(json.dumps({"done": True}), flush=True)


def full_weights(training: VitralTraining) -> dict[str, Any]:
    """All weights on the CPU. `DTensor.full_tensor` gathers with a collective that gloo offers only for CPU tensors:
    with CUDA tensors the process ends with a segmentation fault (pytorch/pytorch#132471)."""
    import torch

    from vitral.distributed.dtensor import is_sharded

    state = training.state.model.state_dict()
    local = {name: (tensor.to_local() if is_sharded(tensor) else tensor).cpu() for name, tensor in state.items()}
    ranks = training.backend.hardware.world.all_gather_objects([local])
    return {
        name: torch.cat([rank[name] for rank in ranks]) if is_sharded(tensor) else local[name]
        for name, tensor in state.items()
    }


def compare_equal(folder: Path) -> list[dict[str, Any]]:
    import torch

    rows = []
    for precision in ("bf16", "fp8"):
        runs = {
            mode: torch.load(folder / f"{precision}-{mode}.pt", weights_only=True)
            for mode in ("single", "accumulated", "ddp", "fsdp")
            if (folder / f"{precision}-{mode}.pt").exists()
        }
        for mode, reference in (
            ("accumulated", "single"),
            ("ddp", "single"),
            ("ddp", "accumulated"),
            ("fsdp", "single"),
        ):
            if mode not in runs or reference not in runs:
                rows.append({"part": "equal", "case": f"{precision} {mode} against {reference}", "failed": True})
                continue
            a, b = runs[mode], runs[reference]
            pairs = [(a["weights"][name].double(), tensor.double()) for name, tensor in b["weights"].items()]
            difference = sum(float((x - y).square().sum()) for x, y in pairs) ** 0.5
            norm = sum(float(y.square().sum()) for _, y in pairs) ** 0.5
            losses = max(abs(x / y - 1) for x, y in zip(a["losses"], b["losses"], strict=True))
            row = {
                "part": "equal",
                "case": f"{precision} {mode} against {reference}",
                "relative_loss_difference": losses,
            }
            row |= {
                "relative_weight_difference": difference / norm,
                "identical": all(bool((x == y).all()) for x, y in pairs),
            }
            rows.append(row | {"fused_forward": "forward" in a["overrides"]})
    return rows


# Parts "cost" and "overlap"


def run_cost_worker(case: str, folder: Path) -> None:
    precision, mode, reduce_dtype = COST_CASES[case]
    if mode == "ddp":
        join("nccl" if has_gpu() else "gloo", 0, 1, folder)
    training, images, labels = make_training(precision, mode, is_large=True, reduce_dtype=reduce_dtype)
    for _ in range(8 if has_gpu() else 2):  # warm-up and capture
        training.step(images, labels)
    synchronize()
    hardware, overrides = training.backend.hardware, sorted(getattr(training.backend, "overrides", ()))
    print(json.dumps({"ready": True, "cuda_graphs": hardware.cuda_graphs, "overrides": overrides}), flush=True)
    num_steps = 20 if has_gpu() else 2
    for line in sys.stdin:
        if line.strip() == "digest":
            print(json.dumps({"digest": weights_digest(training)}), flush=True)
            continue
        if line.strip() == "overlap":
            print(json.dumps(measure_overlap(training, images, labels)), flush=True)
            continue
        training.step(images, labels)
        synchronize()
        start = time.perf_counter()
        for _ in range(num_steps):
            training.step(images, labels)
        synchronize()
        print(json.dumps({"ms": (time.perf_counter() - start) / num_steps * 1e3}), flush=True)


def weights_digest(training: VitralTraining) -> str:
    """Equal for equal weights, after the same number of steps."""
    digest = hashlib.sha256()
    for tensor in training.state.model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


class Stopwatch:
    """Milliseconds between marks: of the GPU's stream, or of the host without a GPU."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def mark(self) -> None:
        import torch

        if has_gpu():
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def since_first(self) -> list[float]:
        synchronize()
        first = self.marks[0]
        return [first.elapsed_time(m) if has_gpu() else (m - first) * 1e3 for m in self.marks]


def measure_overlap(training: VitralTraining, images: Any, labels: Any) -> dict[str, Any]:
    """Times of one eager forward and backward pass: medians of several repetitions, in ms."""
    backend: Any = training.backend
    reducer, state = backend.reducer, training.state
    batch = backend.augment(images, labels, state.augment_rng)
    ready, forward_ms, backward_ms, pack_ms, reduce_ms = [], [], [], [], []
    for _ in range(5):
        watch, starts = Stopwatch(), Stopwatch()
        originals = [bucket.start for bucket in reducer.buckets]
        for bucket in reducer.buckets:
            bucket.start = starts.mark  # only note the time
        for bucket in reducer.buckets:
            bucket.finish = lambda: None
        watch.mark()
        with reducer.sync(is_last=True):
            loss, _ = backend.loss_and_score(batch, labels)
            watch.mark()
            starts.mark()
            (loss / len(labels)).backward()
            watch.mark()
        times, bucket_times = watch.since_first(), starts.since_first()
        forward_ms.append(times[1])
        backward_ms.append(times[2] - times[1])
        ready.append(bucket_times[1:])
        for bucket, original in zip(reducer.buckets, originals, strict=True):
            bucket.start = original
            del bucket.finish
        watch = Stopwatch()
        watch.mark()
        for bucket in reducer.buckets:
            bucket.start()
        watch.mark()
        for bucket in reducer.buckets:
            bucket.finish()
        watch.mark()
        packed, reduced = watch.since_first()[1:]
        pack_ms.append(packed)
        reduce_ms.append(reduced)
        state.model.zero_grad(set_to_none=True)
    bucket_bytes = [bucket.buffer.numel() * bucket.buffer.element_size() for bucket in reducer.buckets]
    return {
        "forward_ms": statistics.median(forward_ms),
        "backward_ms": statistics.median(backward_ms),
        "ready_ms": [statistics.median(times) for times in zip(*ready, strict=True)],
        "bucket_bytes": bucket_bytes,
        "pack_ms": statistics.median(pack_ms),
        "pack_and_reduce_ms": statistics.median(reduce_ms),
    }


def exposed_ms(overlap: dict[str, Any], size: int, bandwidth: float) -> tuple[float, float]:
    """Time of the all-reduce that the backward pass does not hide, and all of it, in ms."""
    end = total = 0.0
    for ready, num_bytes in zip(overlap["ready_ms"], overlap["bucket_bytes"], strict=True):
        duration = (num_bytes * 2 * (size - 1) / size / bandwidth + LATENCY) * 1e3
        end, total = max(end, ready) + duration, total + duration
    return max(0.0, end - overlap["backward_ms"]), total


# All parts


WORKERS: list[subprocess.Popen[str]] = []


def end_workers() -> None:
    """End all workers when the time is over. They print their stacks; earlier measurements are still reported."""
    print("the time is over", file=sys.stderr)
    for process in WORKERS:
        process.terminate()
    time.sleep(2)
    for process in WORKERS:
        process.kill()


class Worker:
    """A process of this script, controlled through lines of JSON."""

    def __init__(self, *arguments: object) -> None:
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        command = [sys.executable, __file__, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.stderr, text=True
        )
        WORKERS.append(self.process)

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        return {"failed": self.messages()}

    def messages(self) -> str:
        """The end of stderr: reasons for kernels that are not used, or a traceback."""
        self.stderr.seek(0)
        return self.stderr.read()[-3000:]

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        return self.read()

    def end(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            print("a worker did not end by itself", file=sys.stderr)
            self.process.kill()


def measure_equal() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workers = [
            Worker("--worker", f"equal:{rank}:{size}", "--folder", folder) for rank, size in ((0, 1), (0, 2), (1, 2))
        ]
        for worker in workers:
            if "failed" in (answer := worker.read()):
                print(answer["failed"], file=sys.stderr)
            worker.end()
            if worker.process.returncode:
                print(f"a worker ended with status {worker.process.returncode}", file=sys.stderr)
        return compare_equal(folder)


def measure_cost(rounds: int, with_overlap: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        workers: dict[str, Worker] = {}
        for case in COST_CASES:
            folder = Path(name) / case.replace(" ", "-")
            folder.mkdir()
            workers[case] = Worker("--worker", f"cost:{case}", "--folder", folder)
        states = {case: worker.read() for case, worker in workers.items()}
        for case, state in states.items():
            if "failed" in state:
                print(f"{case}: {state['failed']}", file=sys.stderr)
                rows.append({"part": "cost", "case": case, "failed": True})
            elif has_gpu() and not (state["cuda_graphs"] and "forward" in state["overrides"]):
                print(f"{case}: {workers[case].messages()}", file=sys.stderr)
        running = {case: worker for case, worker in workers.items() if "ready" in states[case]}
        times: dict[str, list[float]] = {case: [] for case in running}
        for _ in range(rounds):
            for case, worker in running.items():
                times[case].append(worker.ask("time").get("ms", float("nan")))
        digests = {case: worker.ask("digest").get("digest") for case, worker in running.items()}
        overlap = running["fp8 ddp"].ask("overlap") if with_overlap and "fp8 ddp" in running else None
        for worker in workers.values():
            worker.end()
    for case, values in times.items():
        base = times.get(case.split()[0], values)
        ratios = [value / plain for value, plain in zip(values, base, strict=True)]
        row: dict[str, Any] = {"part": "cost", "case": case, "n": len(values), "ms": statistics.median(values)}
        row |= {"min_ms": min(values), "max_ms": max(values), "ratio": statistics.median(ratios)}
        row |= {"min_ratio": min(ratios), "max_ratio": max(ratios), "cuda_graphs": states[case]["cuda_graphs"]}
        row["fused_forward"] = "forward" in states[case]["overrides"]
        row["identical_weights"] = digests[case] == digests.get(case.split()[0])
        rows.append(row)
    if overlap is not None:
        rows += overlap_rows(overlap, statistics.median(times["fp8 ddp"]))
    return rows


def overlap_rows(overlap: dict[str, Any], step_ms: float) -> list[dict[str, Any]]:
    if "failed" in overlap:
        print(overlap["failed"], file=sys.stderr)
        return [{"part": "overlap", "failed": True}]
    inputs = {name: overlap[name] for name in ("forward_ms", "backward_ms", "pack_ms", "pack_and_reduce_ms")}
    counts = {"buckets": len(overlap["bucket_bytes"]), "gradient_mb": sum(overlap["bucket_bytes"]) / 1e6}
    rows: list[dict[str, Any]] = [{"part": "overlap", "case": "measured, fp32 reduction", **inputs, **counts}]
    rows += [
        {"part": "overlap", "case": f"bucket {index}", "ready_ms": ready, "gradient_mb": num_bytes / 1e6}
        for index, (ready, num_bytes) in enumerate(zip(overlap["ready_ms"], overlap["bucket_bytes"], strict=True))
    ]
    for name, bandwidth in BANDWIDTHS.items():
        for size in (2, 8, 64) if "network" in name else (2, 4, 8):
            exposed, total = exposed_ms(overlap, size, bandwidth)
            efficiency = step_ms / (step_ms + exposed)
            row = {"part": "model", "case": f"{size} GPUs, {name}", "all_reduce_ms": total, "exposed_ms": exposed}
            rows.append(row | {"efficiency": efficiency})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=("equal", "cost", "overlap"), default=["equal", "cost", "overlap"]
    )
    parser.add_argument("--rounds", type=int, default=6, help="timed rounds of each case, in turns")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which workers are ended")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    add_output_arguments(parser)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.worker:
        faulthandler.enable()  # a crash in a library prints its stack
        faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)  # where a worker hangs
        kind, _, case = args.worker.partition(":")
        if kind == "equal":
            rank, size = map(int, case.split(":"))
            run_equal_worker(rank, size, args.folder)
        else:
            run_cost_worker(case, args.folder)
        leave_process_group()
        return
    if not has_gpu():
        print(NO_GPU_NOTICE)
    start, rows = time.perf_counter(), []
    timer = threading.Timer(args.budget, end_workers)
    timer.daemon = True
    timer.start()
    for part in args.parts:
        if part == "equal":
            rows += measure_equal()
        elif part == "cost" or "cost" not in args.parts:
            rows += measure_cost(args.rounds, "overlap" in args.parts)
        write_results(args, rows, packages=("torch", "triton"))
    for row in rows:
        print(
            "  ".join(
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
            )
        )
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
