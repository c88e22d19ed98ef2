"""Benchmark of all CPU engines over threads and batch sizes, and a recommendation."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from vitral import __version__
from vitral.data.preprocess import Preprocessing
from vitral.device.cpu import busy_warning, cpu_name
from vitral.errors import VitralError
from vitral.inference.agreement import Agreement, top1_agreement
from vitral.inference.bench_results import BenchResult, BenchRow, save_bench_result
from vitral.inference.cascade import CascadeEngine, cascade_margin
from vitral.inference.cpu_backends import (
    BACKEND_TITLES,
    CPU_BACKENDS,
    CpuBackend,
    PrecisionEngine,
    backend_unsupported_reason,
    build_precision_engine,
    fp32_difference,
)
from vitral.inference.cpu_engine import CPU_PRECISIONS, CpuPrecision, unsupported_reason
from vitral.inference.engine_selection import check_threads
from vitral.inference.int8_calibration import ActivationRanges, collect_activation_ranges, save_activation_ranges
from vitral.inference.openvino_engine import (
    INSTALL_COMMAND,
    NOT_INSTALLED,
    is_installed,
    openvino_unsupported_reason,
    openvino_version,
)
from vitral.inference.parallel_batches import parallel_map, share_batch
from vitral.models.vit import ViT
from vitral.utils.intervals import images_to_show
from vitral.utils.progress import LogFn, format_duration, no_log
from vitral.utils.text import count_text

MIN_AGREEMENT = 0.99  # share of images with the same top-1 label as fp32; the 95% interval must lie above it
MIN_SPEEDUP = 1.2  # over fp32 that a recommended engine must reach
MIN_IMAGES = 16
BATCH_SIZES = (1, 8)
MAX_BATCH_SIZE = 4096
CALIBRATION_BATCH_SIZE = 16
CALIBRATION_STRIDE = 4  # without training images, every fourth image calibrates instead of being compared
MAX_CALIBRATION_IMAGES = 128  # of which activation ranges and margins are computed
MIN_ROUNDS = 3
RACE_BATCH_SIZES, RACE_SECONDS = (1, 8), 0.2  # of the comparison of two backends
SETTLE_SECONDS = 0.01  # PyTorch's threads wait actively after a call, which would slow the next engine down
RELATIVE_COST = 0.6  # estimated time of bf16 and int8 relative to fp32
Name = TypeVar("Name", bound=str)
CpuEngines = Mapping[str, PrecisionEngine | CascadeEngine]
Margins = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class BenchEngines:
    """All engines by name, the faster backend of each precision, and the margins of the cascades."""

    engines: CpuEngines
    backends: dict[str, CpuBackend] = field(default_factory=dict)
    margins: Margins = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What is measured."""

    num_images: int
    num_calibration: int
    threads: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    seconds: float  # per engine, number of threads and batch size

    def check(self) -> None:
        if self.num_images < MIN_IMAGES:
            what = f"{self.num_images} images are too few for a benchmark"
            raise VitralError(what, f"At least {MIN_IMAGES} are needed")
        check_threads(self.threads)
        if not 0 < self.seconds < math.inf:
            raise VitralError(f"seconds must be positive, got {self.seconds}", "The default is --seconds 0.5")
        for batch_size in self.batch_sizes:
            if not 1 <= batch_size <= MAX_BATCH_SIZE:
                what = f"expected batch sizes between 1 and {MAX_BATCH_SIZE:,}, got {batch_size}"
                raise VitralError(what, "For example --batch-sizes 1 8")

    def estimate_seconds(self, per_image: float, lower_precisions: Sequence[str]) -> float:
        """Remaining time after the race of the fp32 backends, from the seconds per image with all threads."""
        passes = 0.0
        if count := len(lower_precisions):
            ranges = 2 if "int8" in lower_precisions else 0  # collected by the module itself, which is slower
            passes = self.num_calibration * (1 + RELATIVE_COST * count + ranges)
            passes += self.num_images * (1 + RELATIVE_COST * count)
        relative_costs = [1.0, *[RELATIVE_COST, 1.3 * RELATIVE_COST] * count]  # of the engines, with cascades
        rows = sum(
            max(self.seconds, (MIN_ROUNDS + 1) * batch_size * cost * per_image * max(self.threads) / num_threads)
            for num_threads in self.threads
            for batch_size in self.batch_sizes
            for cost in relative_costs
        )
        return per_image * passes + rows


def build_engines(
    model: ViT,
    preprocessing: Preprocessing,
    images_NCHW: Tensor,
    folder: Path | None,
    log: LogFn = no_log,
    on_fp32: Callable[[PrecisionEngine], None] | None = None,
) -> BenchEngines:
    """Build all engines that this CPU supports, each with its faster backend, calibrated on these images.

    The activation ranges that int8 needs are stored in `folder`, if one is given. `on_fp32` is called with the first
    engine.
    """
    if reason := unsupported_reason(model):
        raise VitralError(f"only the reference engine supports this model: {reason}", "No benchmark is needed")
    images_NCHW = images_NCHW[:: max(-(-len(images_NCHW) // MAX_CALIBRATION_IMAGES), 1)]
    engines: dict[str, PrecisionEngine] = {}
    backends: dict[str, CpuBackend] = {}
    margins: Margins = {}
    ranges: ActivationRanges | None = None
    fp32_logits: Tensor | None = None
    for precision in CPU_PRECISIONS:
        available = supporting_backends(model, preprocessing, precision)
        if not available:
            continue
        if precision == "int8":
            ranges = collect_activation_ranges(model, images_NCHW.split(CALIBRATION_BATCH_SIZE), preprocessing)
            if folder is not None:
                save_activation_ranges(folder, ranges)
        candidates = {
            backend: build_precision_engine(model, preprocessing, precision, ranges, backend) for backend in available
        }
        if precision == "fp32":
            drop_inexact_backends(candidates, images_NCHW[:CALIBRATION_BATCH_SIZE], log)
        backends[precision] = fastest_backend(precision, candidates, images_NCHW, log)
        engines[precision] = candidates[backends[precision]]
        if precision == "fp32":
            if on_fp32 is not None:
                on_fp32(engines["fp32"])
        else:
            if fp32_logits is None:
                fp32_logits = run_batched(engines["fp32"], images_NCHW)
            margins[precision] = cascade_margin(run_batched(engines[precision], images_NCHW), fp32_logits)
    return BenchEngines(engines={**engines, **build_cascades(engines, margins)}, backends=backends, margins=margins)


def supporting_backends(model: ViT, preprocessing: Preprocessing, precision: CpuPrecision) -> tuple[CpuBackend, ...]:
    return tuple(
        backend
        for backend in CPU_BACKENDS
        if backend_unsupported_reason(backend, model, preprocessing, precision) is None
    )


def drop_inexact_backends(candidates: dict[CpuBackend, PrecisionEngine], images_NCHW: Tensor, log: LogFn) -> None:
    """Remove fp32 engines whose logits differ from those of PyTorch by more than rounding."""
    expected_NK = candidates["pytorch"](images_NCHW)
    for backend in [name for name in candidates if name != "pytorch"]:
        if (difference := fp32_difference(candidates[backend](images_NCHW), expected_NK)) is not None:
            log(f"{BACKEND_TITLES[backend]} is not used: its fp32 logits differ by {difference:.2g}")
            del candidates[backend]


def fastest_backend(
    precision: CpuPrecision, candidates: Mapping[CpuBackend, PrecisionEngine], images_NCHW: Tensor, log: LogFn
) -> CpuBackend:
    """The backend with the smallest sum of its median times per image for the batch sizes of the race."""
    if len(candidates) == 1:
        return next(iter(candidates))
    per_image = dict.fromkeys(candidates, 0.0)
    for batch_size in RACE_BATCH_SIZES:
        times = time_in_turns(shared(candidates), repeat_to(images_NCHW, batch_size), batch_size, RACE_SECONDS)
        for backend, seconds in times.items():
            per_image[backend] += statistics.median(seconds) / batch_size
    best = min(per_image, key=lambda backend: per_image[backend])
    speeds = (f"{BACKEND_TITLES[name]} {1e3 * total / len(RACE_BATCH_SIZES):.1f}" for name, total in per_image.items())
    log(f"{precision}: {BACKEND_TITLES[best]} is fastest (ms per image: {', '.join(speeds)})")
    return best


def build_cascades(engines: Mapping[str, PrecisionEngine], margins: Margins) -> dict[str, CascadeEngine]:
    """int8 falls back to the bf16 cascade, and bf16 to fp32."""
    cascades: dict[str, CascadeEngine] = {}
    for precision, margin in margins.items():
        accurate = cascades.get("bf16-cascade", engines["fp32"])
        cascades[f"{precision}-cascade"] = CascadeEngine(engines[precision], accurate, margin)
    return cascades


def run_batched(engine: Callable[[Tensor], Tensor], images_NCHW: Tensor) -> Tensor:
    """Logits (N, K), one batch per core at a time."""
    return torch.cat(list(parallel_map(engine, images_NCHW.split(CALIBRATION_BATCH_SIZE))))


def run_bench(
    model: ViT,
    preprocessing: Preprocessing,
    images_NCHW: Tensor,
    calibration_images_NCHW: Tensor,
    folder: Path | None = None,
    *,
    threads: Sequence[int],
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seconds: float = 0.5,
    log: LogFn = no_log,
) -> BenchResult:
    """Measure all engines on uint8 images of the model's input size.

    The engines take turns, so that background load affects all of them; each row takes about `seconds`. The result is
    stored in `folder`.
    """
    plan = BenchPlan(
        num_images=len(images_NCHW),
        num_calibration=min(len(calibration_images_NCHW), MAX_CALIBRATION_IMAGES),
        threads=tuple(threads),
        batch_sizes=tuple(batch_sizes),
        seconds=seconds,
    )
    plan.check()
    log(f"Comparing engines on {plan.num_images:,} images, calibrated on {plan.num_calibration:,} others")
    start, threads_before = time.perf_counter(), torch.get_num_threads()

    def log_estimate(fp32: PrecisionEngine) -> None:
        lower = [name for name in CPU_PRECISIONS[1:] if supporting_backends(model, preprocessing, name)]
        remaining = plan.estimate_seconds(seconds_per_image(fp32, images_NCHW), lower)
        log(f"Estimated time: {format_duration(time.perf_counter() - start + remaining)}")

    try:
        torch.set_num_threads(max(threads))
        if warning := busy_warning():
            log(warning)
        built = build_engines(model, preprocessing, calibration_images_NCHW, folder, log, log_estimate)
        times = measure_times(built.engines, images_NCHW, plan, log)
        torch.set_num_threads(max(threads))
        if len(built.engines) > 1:
            log(f"Comparing with fp32 on {len(images_NCHW):,} images")
        agreement, recheck_rate = measure_agreement(built.engines, images_NCHW)
    finally:
        torch.set_num_threads(threads_before)
    rows = [
        make_row(
            name,
            num_threads,
            batch_size,
            engine_times,
            nbytes=built.engines[name].nbytes,
            agreement=agreement[name],
            recheck_rate=recheck_rate.get(name, 0.0),
        )
        for (num_threads, batch_size, name), engine_times in times.items()
    ]
    result = make_result(rows, built, plan)
    if folder is not None:
        save_bench_result(folder, result)
    if openvino_unsupported_reason(model, preprocessing) == NOT_INSTALLED:
        log(f"OpenVINO may be faster: {INSTALL_COMMAND}, then run vitral bench again")
    return result


def make_result(rows: Sequence[BenchRow], built: BenchEngines, plan: BenchPlan) -> BenchResult:
    best, reason = recommend(rows, plan.num_images)
    backend = built.backends[best.engine.removesuffix("-cascade")]
    versions = f"vitral {__version__}, torch {torch.__version__}"
    return BenchResult(
        cpu=cpu_name(),
        versions=f"{versions}, OpenVINO {openvino_version()}" if is_installed() else versions,
        date=time.strftime("%Y-%m-%d"),
        images=plan.num_images,
        calibration_images=plan.num_calibration,
        rows=tuple(rows),
        margins=built.margins,
        backends=built.backends,
        engine=best.engine,
        threads=best.threads,
        batch_size=best.batch_size,
        reason=f"{BACKEND_TITLES[backend]}, {reason}",
    )


def measure_times(
    engines: CpuEngines, images_NCHW: Tensor, plan: BenchPlan, log: LogFn
) -> dict[tuple[int, int, str], list[float]]:
    """Seconds per batch by number of threads, batch size and engine."""
    times: dict[tuple[int, int, str], list[float]] = {}
    for num_threads in plan.threads:
        torch.set_num_threads(num_threads)
        for batch_size in plan.batch_sizes:
            log(f"{count_text(num_threads, 'thread')}, batch size {batch_size}")
            by_name = time_in_turns(shared(engines), repeat_to(images_NCHW, batch_size), batch_size, plan.seconds)
            times |= {(num_threads, batch_size, name): seconds for name, seconds in by_name.items()}
    return times


def seconds_per_image(engine: Callable[[Tensor], Tensor], images_NCHW: Tensor) -> float:
    """Measured on one batch. The races have warmed the engine up."""
    batch = images_NCHW[:CALIBRATION_BATCH_SIZE]
    start = time.perf_counter()
    engine(batch)
    return (time.perf_counter() - start) / len(batch)


def measure_agreement(engines: CpuEngines, images_NCHW: Tensor) -> tuple[dict[str, Agreement], dict[str, float]]:
    """Top-1 agreement of each engine with fp32, and the share of images that each cascade computes twice.

    The logits of a cascade follow from those of its two engines.
    """
    if len(engines) == 1:
        return {"fp32": Agreement(same=len(images_NCHW), images=len(images_NCHW))}, {}
    logits: dict[str, Tensor] = {}
    recheck_rate: dict[str, float] = {}
    for name, engine in engines.items():
        if isinstance(engine, CascadeEngine):
            fast_NK = logits[name.removesuffix("-cascade")]
            accurate = "fp32" if name == "bf16-cascade" else "bf16-cascade"
            ambiguous_N = engine.is_ambiguous(fast_NK)
            logits[name] = torch.where(ambiguous_N[:, None], logits.get(accurate, logits["fp32"]), fast_NK)
            recheck_rate[name] = float(ambiguous_N.double().mean())
        else:
            logits[name] = run_batched(engine, images_NCHW)
    return {name: top1_agreement(logits["fp32"], values) for name, values in logits.items()}, recheck_rate


def shared(engines: Mapping[Name, Callable[[Tensor], Tensor]]) -> dict[Name, Callable[[Tensor], Tensor]]:
    """The engines as predictions call them: every thread computes a share of a batch."""
    return {name: partial(share_batch, engine) for name, engine in engines.items()}


def repeat_to(images_NCHW: Tensor, min_count: int) -> Tensor:
    return images_NCHW.repeat(-(-min_count // len(images_NCHW)), 1, 1, 1)


def time_in_turns(
    engines: Mapping[Name, Callable[[Tensor], Tensor]], images_NCHW: Tensor, batch_size: int, seconds: float
) -> dict[Name, list[float]]:
    """Seconds per batch of each engine."""
    times: dict[Name, list[float]] = {name: [] for name in engines}
    starts = range(0, len(images_NCHW) - batch_size + 1, batch_size)
    round_index, end = 0, time.perf_counter() + seconds * len(engines)
    for engine in engines.values():
        engine(images_NCHW[:batch_size])  # oneDNN generates its kernels on the first call with a shape
    while round_index < MIN_ROUNDS or time.perf_counter() < end:
        # Other images in each round: the time of a cascade depends on how many of them are ambiguous.
        images = images_NCHW[starts[round_index % len(starts)] :][:batch_size]
        for name, engine in engines.items():
            if torch.get_num_threads() > 1:
                time.sleep(SETTLE_SECONDS)
            start = time.perf_counter()
            engine(images)
            times[name].append(time.perf_counter() - start)
        round_index += 1
    return times


def speed_columns(batch_size: int, times: Sequence[float]) -> dict[str, float]:
    """Latency percentiles, and throughput from the mean, which includes the batches that a cascade computes twice."""
    percentiles = statistics.quantiles(times, n=100, method="inclusive")
    return {
        "p50_ms": round(percentiles[49] * 1e3, 3),
        "p95_ms": round(percentiles[94] * 1e3, 3),
        "p99_ms": round(percentiles[98] * 1e3, 3),
        "images_per_second": round(batch_size / statistics.mean(times), 1),
    }


def make_row(
    name: str,
    threads: int,
    batch_size: int,
    times: Sequence[float],
    *,
    nbytes: int,
    agreement: Agreement,
    recheck_rate: float,
) -> BenchRow:
    """`times` are seconds per batch."""
    return BenchRow(
        engine=name,
        threads=threads,
        batch_size=batch_size,
        **speed_columns(batch_size, times),
        memory_mb=round(nbytes / 1e6, 1),
        agreement=agreement.value,
        agreement_low=agreement.interval.low,
        agreement_high=agreement.interval.high,
        recheck_rate=recheck_rate,
    )


def recommend(rows: Sequence[BenchRow], num_images: int) -> tuple[BenchRow, str]:
    """The fastest row with sufficient agreement and speedup, otherwise the fastest fp32 row; and the reason."""
    fp32 = max((row for row in rows if row.engine == "fp32"), key=lambda row: row.images_per_second)
    faster = [row for row in rows if row.images_per_second > MIN_SPEEDUP * fp32.images_per_second]
    agreeing = [row for row in faster if row.agreement_low >= MIN_AGREEMENT]
    best = max(agreeing, key=lambda row: row.images_per_second, default=fp32)
    threads = count_text(best.threads, "thread")
    speed = f"{best.images_per_second:,.0f} images/s with {threads}"
    if best is not fp32:
        return best, f"{speed}, {_comparison(best, fp32, num_images)}"
    if not faster:
        return best, f"{speed}; no engine is {MIN_SPEEDUP:g}x as fast"
    fastest = max(faster, key=lambda row: row.images_per_second)
    reason = f"{speed}; {fastest.engine} is not used: {_comparison(fastest, fp32, num_images)}"
    if num_images < (needed := images_to_show(MIN_AGREEMENT)):
        too_few = f"at least {needed} images are needed to show an agreement of {MIN_AGREEMENT:.0%}"
        return best, f"{reason}; {too_few}, name more with --data"
    return best, f"{reason}, not above {MIN_AGREEMENT:.0%}"


def _comparison(row: BenchRow, fp32: BenchRow, num_images: int) -> str:
    agreement = Agreement(same=round(row.agreement * num_images), images=num_images)
    return f"{row.images_per_second / fp32.images_per_second:.1f}x fp32, {agreement}"
