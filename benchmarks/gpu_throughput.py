"""Training and inference throughput on a GPU: vitral compared with timm, transformers, vit-pytorch and torchvision.

    python benchmarks/gpu_throughput.py [--budget 360] [--vitral bf16 fp8] [--save]
    python benchmarks/gpu_throughput.py --cases vitral:B/16:train timm:B/16:train timm:B/16:train:channels-last

A case is LIBRARY:MODEL:MODE[:OPTION+OPTION]. All cases of a task (mode and model) use the same batch size and do the
same work: 224 px, 197 tokens, exact GELU, 1000 classes. Training is forward, cross-entropy, backward and AdamW with
fp32 weights, in bf16 unless vitral uses FP8.

vitral   The training step of vitral.training and the engine of vitral.inference, as select_hardware configures them
         unless an option names a precision (bf16, fp8), eager, unfused, or another model (tanh GELU, mean pooling).
         Option recheck-PERCENT: the engine fp8-cascade with a margin that sends this percentage of the batch through
         its second engine; random weights have no meaningful margins (see gpu_agreement.py for measured percentages).
         Option tome-R: token merging, R tokens per block.
         Input is uint8, so its time includes normalisation.
others   torch.compile, fused AdamW, TF32 for what remains in fp32. Input is float, normalised, on the GPU. Training
         under autocast, inference with bf16 weights. Options: eager, graphs (CUDA graphs through
         mode="reduce-overhead"), channels-last, autocast, float8 and float8-rowwise (torchao's FP8 training, with one
         scale per tensor or per row), bf16-weights (loses small updates: shown, not compared).

Modes: train; infer, a large batch; latency-1, latency-8, latency-64: that many images, from pixels on the GPU to logits
on the CPU.

Each case runs in its own process. The processes of a wave prepare in parallel (import, build, compile, first steps) and
are then timed one at a time, in several rounds. Reported are the median, minimum and maximum over the rounds. Before
that, B/16 training runs alone in vitral and in timm with an empty compiler cache, for the time from process start to
the first finished step and for undisturbed figures. Utilisation is relative to an 8192x8192x8192 bf16 GEMM, measured
first; FLOP are those of the model's GEMMs, three times for training. Memory is the peak allocation after the first
step, or what a captured CUDA graph holds if that is more.

A case that fails is reported with its error. Waves that do not fit into --budget are skipped, the last ones first.
Without a GPU a toy version shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _output import add_output_arguments, environment, write_results
from peers import NO_GPU_NOTICE, PEERS, Case, error_summary, has_gpu, make_step, measure_peak, synchronize

GOALS = {"train": 1.6, "infer": 1.7}  # speed relative to the fastest peer
MEMORY_GOAL = 0.75
PARALLEL = 6  # processes of a wave: B/16 training takes up to 23 GiB
MIN_WAVE_SECONDS = 45.0
PREPARE_TIMEOUT = 240.0  # seconds for compiling in parallel
PACKAGES = ("torch", "triton", "timm", "transformers", "vit-pytorch", "torchvision")


# One case, in its own process


def run_worker(case: Case, seconds: float, process_start: float) -> None:
    """Prepare, report it as a JSON line, then time one round per line on stdin."""
    warnings.simplefilter("ignore")

    def report(**fields: Any) -> None:
        print(json.dumps(fields), flush=True)

    try:
        if case.library == "peak":
            report(**measure_peak())
            return
        step, steps_per_round, info = prepare(case, seconds, process_start)
        report(ready=True, **info)
        for _ in sys.stdin:
            step()
            synchronize()
            start = time.perf_counter()
            for _ in range(steps_per_round):
                step()
            synchronize()
            report(images_per_second=steps_per_round * case.batch_size / (time.perf_counter() - start))
    except Exception as error:
        report(failed=error_summary(error))


def prepare(case: Case, seconds: float, process_start: float) -> tuple[Any, int, dict[str, Any]]:
    """The step, the number of steps in `seconds`, and what to report."""
    import torch

    if case.library != "vitral":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    info: dict[str, Any] = {"batch_size": case.batch_size}
    imported = time.time()
    step = make_step(case, info)
    built = time.time()
    step()
    synchronize()
    info["first_step_s"] = time.time() - process_start
    info["build_s"], info["compile_s"] = built - imported, time.time() - built
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()
    for _ in range(6):  # graph capture and other late set-up
        step()
    synchronize()
    start = time.perf_counter()
    for _ in range(3):
        step()
    synchronize()
    steps_per_round = max(3, math.ceil(seconds / ((time.perf_counter() - start) / 3)))
    if has_gpu():
        info["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        info["reserved_gib"] = torch.cuda.memory_reserved() / 2**30
        torch.cuda.empty_cache()  # for the cases that prepare at the same time
        info["held_gib"] = torch.cuda.memory_reserved() / 2**30  # captured graphs keep their memory
        info["peak_gib"] = max(info["allocated_gib"], info["held_gib"])
    return step, steps_per_round, info


# All cases


class Worker:
    """The process of one case, controlled through lines of JSON."""

    def __init__(self, case: Case, cache: Path, parallel: int, seconds: float) -> None:
        self.case = case
        self.info: dict[str, Any] = {}
        self.speeds: list[float] = []
        threads = str(max(2, (os.cpu_count() or 2) // parallel))
        env = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": threads,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        command = [sys.executable, __file__, "--worker", json.dumps(asdict(case)), "--seconds", str(seconds)]
        self.process = subprocess.Popen(
            [*command, "--process-start", str(time.time())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            env=env,
            start_new_session=True,
        )
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.messages.put(json.loads(line))
        self.process.wait()
        self.stderr.seek(0)
        last_line = (self.stderr.read().strip().splitlines() or ["no output"])[-1]
        self.messages.put({"failed": f"exit status {self.process.returncode}: {last_line[:200]}"})

    def receive(self, timeout: float) -> bool:
        """Wait for the next message; False if the case failed or the time is up."""
        try:
            message = self.messages.get(timeout=max(timeout, 0.1))
        except queue.Empty:
            message = {"failed": f"no result within {timeout:.0f} s"}
        if "failed" in message:
            self.info["failed"] = message["failed"]
            self.close()
            return False
        if "images_per_second" in message:
            self.speeds.append(message["images_per_second"])
        else:
            self.info |= message
        return True

    def run_round(self, timeout: float) -> bool:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("round\n")
            self.process.stdin.flush()
        return self.receive(timeout)

    def close(self) -> None:
        """Kill the process group, which includes the compiler's workers."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join()
        for file in (self.process.stdin, self.process.stdout, self.stderr):
            assert file is not None
            with suppress(BrokenPipeError):
                file.close()

    def result(self) -> dict[str, Any]:
        row: dict[str, Any] = {"case": str(self.case), **asdict(self.case), **self.info}
        row.pop("ready", None)
        if self.speeds:
            row["images_per_second"] = statistics.median(self.speeds)
            row["images_per_second_min"], row["images_per_second_max"] = min(self.speeds), max(self.speeds)
            row["rounds"] = len(self.speeds)
            passes = 3 if self.case.mode == "train" else 1
            row["tflops"] = row["images_per_second"] * row["gflop"] * passes / 1e3
        return row


def run_wave(
    cases: Sequence[Case], cache: Path, rounds: int, seconds: float, deadline: float, parallel: int = 0
) -> list[dict[str, Any]]:
    """Prepare the cases in parallel, then time them one at a time, round by round."""
    workers = [Worker(case, cache, parallel or len(cases), seconds) for case in cases]
    try:
        prepare_deadline = min(time.time() + PREPARE_TIMEOUT, deadline)
        running = [worker for worker in workers if worker.receive(prepare_deadline - time.time())]
        for _ in range(rounds):
            if time.time() > deadline:
                break
            running = [worker for worker in running if worker.run_round(30 + 20 * seconds)]
    finally:
        for worker in workers:
            worker.close()
    return [worker.result() for worker in workers]


def default_waves(vitral_options: Iterable[str]) -> list[list[Case]]:
    """All cases, the most important waves first."""

    def task(model: str, mode: str, *peers: str) -> list[Case]:
        own = [Case("vitral", model, mode, "" if option == "auto" else option) for option in vitral_options]
        return own + [Case(name, model, mode, options) for name, _, options in (peer.partition("+") for peer in peers)]

    return [
        task("B/16", "train", *PEERS),
        task("S/16", "train", *PEERS),
        task("B/16", "infer", *PEERS) + task("S/16", "infer", *PEERS),
        task("Ti/16", "train", "timm") + task("L/16", "train", "timm"),
        task("Ti/16", "infer", "timm", "timm+graphs") + task("L/16", "infer", "timm", "torchvision"),
        [case for mode in ("latency-1", "latency-8", "latency-64") for case in task("B/16", mode, "timm+graphs")],
        task("B/16", "train", "timm", "timm+channels-last", "timm+bf16-weights"),
    ]


def format_table(rows: Sequence[dict[str, Any]], peak_tflops: float | None) -> list[str]:
    """One line per case, grouped by task, with the speed relative to the fastest peer of the task."""
    lines: list[str] = []
    for task in dict.fromkeys(f"{row['mode']} {row['model']}" for row in rows):
        task_rows = [row for row in rows if f"{row['mode']} {row['model']}" == task]
        fastest = fastest_peer(task_rows)
        lines.append(
            f"\n{task}" + (f", batch size {task_rows[0]['batch_size']}" if "batch_size" in task_rows[0] else "")
        )
        lines += [format_row(row, fastest, peak_tflops) for row in task_rows]
    return lines


def format_row(row: dict[str, Any], fastest: dict[str, Any] | None, peak_tflops: float | None) -> str:
    name = row["library"] + (f" {row['options']}" if row["options"] else "")
    name += f" ({row['cache']} cache)" if row.get("cache") else ""
    if "images_per_second" not in row:
        return f"  {name:<28} {row.get('failed', 'not timed')}"
    ratio = f"{row['images_per_second'] / fastest['images_per_second']:5.2f}x" if fastest else ""
    utilisation = f"{row['tflops'] / peak_tflops:5.1%} of peak" if peak_tflops else ""
    memory = f"{row['peak_gib']:6.2f} GiB" if "peak_gib" in row else ""
    if memory and fastest:
        memory += f" ({row['peak_gib'] / fastest['peak_gib']:.2f}x)"
    first = f"first step after {row['first_step_s']:.1f} s" if row.get("cache") else ""
    spread = f"({row['images_per_second_min']:,.0f} - {row['images_per_second_max']:,.0f})"
    figures = f"{row['images_per_second']:10,.0f} images/s {spread}  {ratio}  {utilisation}  {memory}  {first}"
    return f"  {name:<28} {figures}".rstrip()


def fastest_peer(rows: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    timed = [row for row in rows if "images_per_second" in row and is_comparable(row)]
    return max(timed, key=lambda row: row["images_per_second"], default=None)


def is_comparable(row: dict[str, Any]) -> bool:
    return Case(row["library"], row["model"], row["mode"], row["options"]).is_comparable


def compare_with_peers(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each vitral case relative to the fastest peer of its task. Runs with an empty cache are left out."""
    comparisons: dict[str, dict[str, Any]] = {}
    timed = [row for row in rows if "images_per_second" in row and "cache" not in row]
    for row in timed:
        fastest = fastest_peer(peer for peer in timed if (peer["mode"], peer["model"]) == (row["mode"], row["model"]))
        if row["library"] != "vitral" or fastest is None:
            continue
        comparison = {
            "fastest_peer": fastest["case"],
            "speed": row["images_per_second"] / fastest["images_per_second"],
            "speed_goal": GOALS.get(row["mode"]),
        }
        if "peak_gib" in row:
            comparison |= {"memory": row["peak_gib"] / fastest["peak_gib"], "memory_goal": MEMORY_GOAL}
        comparisons[row["case"]] = comparison
    return comparisons


CSV_COLUMNS = (
    "mode", "model", "batch_size", "library", "options", "cache", "images_per_second", "images_per_second_min",
    "images_per_second_max", "rounds", "tflops", "peak_gib", "first_step_s", "hardware", "relative_error", "failed",
)  # fmt: skip


@dataclass
class Results:
    """Rows measured so far. Files are rewritten after every wave, so an interrupted benchmark loses nothing."""

    args: argparse.Namespace
    peak: dict[str, Any]
    rows: list[dict[str, Any]]

    def add(self, rows: list[dict[str, Any]]) -> None:
        self.rows += rows
        for line in format_table(rows, self.peak.get("bf16_tflops")):
            print(line, flush=True)
        details = {"peak": self.peak, "comparisons": compare_with_peers(self.rows), "cases": self.rows}
        csv_rows = [{column: row.get(column) for column in CSV_COLUMNS} for row in self.rows]
        write_results(self.args, csv_rows, details, packages=("torch", "timm"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=Case.parse, help="these cases, e.g. timm:B/16:train:channels-last")
    parser.add_argument("--vitral", nargs="+", default=["auto"], metavar="OPTION", help="precisions to run vitral with")
    parser.add_argument("--libraries", nargs="+", metavar="LIBRARY", help="only these libraries")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help='only these tasks, e.g. "train B/16"')
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a round")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for the whole benchmark")
    parser.add_argument("--parallel", type=int, default=PARALLEL, help="processes that prepare in parallel")
    parser.add_argument("--no-cold-start", action="store_true", help="skip the runs with an empty compiler cache")
    parser.add_argument("--cache", type=Path, help="keep compiled code here for the next time")
    add_output_arguments(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--process-start", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


def select_waves(args: argparse.Namespace) -> tuple[list[list[Case]], list[Case]]:
    """Waves of cases, and the cases to run alone with an empty compiler cache."""
    if args.cases:
        return split_waves(args.cases, args.parallel), []
    if not has_gpu():
        libraries = args.libraries or ("vitral", *PEERS)
        return [[Case(library, "toy", mode) for library in libraries] for mode in ("train", "infer")], []
    waves = []
    for wave in default_waves(args.vitral):
        selected = [
            case
            for case in wave
            if (not args.libraries or case.library in args.libraries) and (not args.tasks or case.task in args.tasks)
        ]
        is_inference = all(case.mode != "train" for case in selected)
        waves += split_waves(selected, 2 * args.parallel if is_inference else args.parallel)
    cold_start = [] if args.no_cold_start else [Case("vitral", "B/16", "train"), Case("timm", "B/16", "train")]
    return waves, cold_start


def split_waves(cases: Sequence[Case], size: int) -> list[list[Case]]:
    return [list(cases[start : start + size]) for start in range(0, len(cases), size)]


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    deadline = time.time() + args.budget
    waves, cold_start = select_waves(args)
    results = Results(args, {}, [])
    if has_gpu():
        worker = Worker(Case("peak", "", "peak"), folder / "peak", 1, args.seconds)
        worker.receive(90)
        worker.close()
        results.peak = worker.info
    header = environment(PACKAGES)
    print(f"{header['gpu'] or header['cpu']}, {header['cpus']} CPUs, {header['date']}, {args.rounds} rounds")
    print(", ".join(f"{name} {version}" for name, version in header["versions"].items()), flush=True)
    for case in cold_start:
        for cache in ("empty", "warm") if case.library == "vitral" else ("empty",):
            rounds = args.rounds if cache == "empty" else 1
            rows = run_wave([case], folder / case.library, rounds, args.seconds, deadline, parallel=1)
            results.add([{**row, "cache": cache} for row in rows])
    for wave in waves:
        if has_gpu() and deadline - time.time() < MIN_WAVE_SECONDS:
            results.add([{"case": str(case), **asdict(case), "failed": "out of time"} for case in wave])
        else:
            results.add(run_wave(wave, args.cache or folder / "shared", args.rounds, args.seconds, deadline))
    return results.rows


def main() -> None:
    args = parse_arguments()
    if args.worker:
        run_worker(Case(**json.loads(args.worker)), args.seconds, args.process_start or time.time())
        return
    if not has_gpu():
        print(NO_GPU_NOTICE)
    with tempfile.TemporaryDirectory(prefix="throughput-", ignore_cleanup_errors=True) as folder:
        rows = measure(args, Path(folder))
    print()
    for case, comparison in compare_with_peers(rows).items():
        memory = f", memory {comparison['memory']:.2f}x (goal {MEMORY_GOAL}x)" if "memory" in comparison else ""
        goal = f" (goal {comparison['speed_goal']}x)" if comparison["speed_goal"] and has_gpu() else ""
        print(f"{case}: {comparison['speed']:.2f}x {comparison['fastest_peer']}{goal}{memory}")


if __name__ == "__main__":
    main()
