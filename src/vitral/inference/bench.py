"""Benchmark of all CPU engines over threads and batch sizes, and a recommendation."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vitral import __version__
from vitral.data.preprocess import Preprocessing
from vitral.device.cpu import busy_warning, cpu_name
from vitral.errors import VitralError
from vitral.inference.agreement import Agreement, top1_agreement
from vitral.inference.cpu_engine import CpuEngine, supported_precisions, unsupported_reason
from vitral.inference.engine import CascadeEngine, cascade_margin
from vitral.inference.engine_selection import BenchResult, BenchRow, check_threads, save_bench_result
from vitral.inference.int8_calibration import collect_activation_ranges, save_activation_ranges
from vitral.models.vit import ViT
from vitral.utils.intervals import images_to_show
from vitral.utils.progress import LogFn, no_log

MIN_AGREEMENT = 0.99  # share of images with the same top-1 label as fp32; the 95% interval must lie above it
MIN_SPEEDUP = 1.2  # over fp32 that a recommended engine must reach
MIN_IMAGES = 16
MAX_BATCH_SIZE = 4096
CALIBRATION_BATCH_SIZE = 16
MIN_ROUNDS = 5
CpuEngines = Mapping[str, CpuEngine | CascadeEngine]
Margins = dict[str, float]


def build_engines(
    model: ViT, preprocessing: Preprocessing, images_NCHW: Tensor, folder: Path | None
) -> tuple[CpuEngines, Margins]:
    """Build all engines that this CPU supports, and the margins of the cascades, calibrated on these images.

    The activation ranges that int8 needs are stored in `folder`, if one is given.
    """
    if reason := unsupported_reason(model):
        raise VitralError(f"there is only the reference engine for this model: {reason}", "No benchmark is needed")
    fp32 = CpuEngine(model, preprocessing, "fp32")
    engines: dict[str, CpuEngine] = {"fp32": fp32}
    margins: Margins = {}
    fp32_logits = run_batched(fp32, images_NCHW)
    for precision in supported_precisions()[1:]:
        ranges = None
        if precision == "int8":
            ranges = collect_activation_ranges(model, images_NCHW.split(CALIBRATION_BATCH_SIZE), preprocessing)
            if folder is not None:
                save_activation_ranges(folder, ranges)
        engines[precision] = CpuEngine(model, preprocessing, precision, ranges)
        margins[precision] = cascade_margin(run_batched(engines[precision], images_NCHW), fp32_logits)
    return engines | build_cascades(engines, margins), margins


def build_cascades(engines: Mapping[str, CpuEngine], margins: Margins) -> dict[str, CascadeEngine]:
    """int8 falls back to the bf16 cascade, and bf16 to fp32."""
    cascades: dict[str, CascadeEngine] = {}
    for precision, margin in margins.items():
        accurate = cascades.get("bf16-cascade", engines["fp32"])
        cascades[f"{precision}-cascade"] = CascadeEngine(engines[precision], accurate, margin)
    return cascades


def run_batched(engine: Callable[[Tensor], Tensor], images_NCHW: Tensor) -> Tensor:
    return torch.cat([engine(images) for images in images_NCHW.split(CALIBRATION_BATCH_SIZE)])


def run_bench(
    model: ViT,
    preprocessing: Preprocessing,
    images_NCHW: Tensor,
    calibration_images_NCHW: Tensor,
    folder: Path | None = None,
    *,
    threads: Sequence[int],
    batch_sizes: Sequence[int] = (1, 8, 32),
    seconds: float = 1.0,
    log: LogFn = no_log,
) -> BenchResult:
    """Measure all engines on uint8 images of the model's input size.

    The engines take turns, so that background load affects all of them; each row takes about `seconds`. The result is
    stored in `folder`.
    """
    check_bench_arguments(len(images_NCHW), threads, batch_sizes, seconds)
    threads_before = torch.get_num_threads()
    try:
        torch.set_num_threads(max(threads))
        if warning := busy_warning():
            log(warning)
        log(f"Calibrating on {len(calibration_images_NCHW):,} images")
        engines, margins = build_engines(model, preprocessing, calibration_images_NCHW, folder)
        log(f"Comparing with fp32 on {len(images_NCHW):,} images")
        agreement, recheck_rate = measure_agreement(engines, images_NCHW)
        rows: list[BenchRow] = []
        for num_threads in threads:
            torch.set_num_threads(num_threads)
            for batch_size in batch_sizes:
                log(f"{num_threads} thread{'s' if num_threads > 1 else ''}, batch size {batch_size}")
                times = _time_in_turns(engines, _repeat_to(images_NCHW, batch_size), batch_size, seconds)
                rows += [
                    BenchRow(
                        engine=name,
                        threads=num_threads,
                        batch_size=batch_size,
                        **_speed(batch_size, times[name]),
                        memory_mb=round(engine.nbytes / 1e6, 1),
                        agreement=agreement[name].value,
                        agreement_low=agreement[name].low,
                        agreement_high=agreement[name].high,
                        recheck_rate=recheck_rate.get(name, 0.0),
                    )
                    for name, engine in engines.items()
                ]
    finally:
        torch.set_num_threads(threads_before)
    best, reason = recommend(rows, len(images_NCHW))
    result = BenchResult(
        cpu=cpu_name(),
        versions=f"vitral {__version__}, torch {torch.__version__}",
        date=time.strftime("%Y-%m-%d"),
        images=len(images_NCHW),
        calibration_images=len(calibration_images_NCHW),
        rows=tuple(rows),
        margins=margins,
        engine=best.engine,
        threads=best.threads,
        batch_size=best.batch_size,
        reason=reason,
    )
    if folder is not None:
        save_bench_result(folder, result)
    return result


def check_bench_arguments(num_images: int, threads: Sequence[int], batch_sizes: Sequence[int], seconds: float) -> None:
    if num_images < MIN_IMAGES:
        raise VitralError(f"{num_images} images are too few for a benchmark", f"At least {MIN_IMAGES} are needed")
    check_threads(threads)
    if not 0 < seconds < math.inf:
        raise VitralError(f"seconds must be positive, got {seconds}", "The default is --seconds 1")
    for batch_size in batch_sizes:
        if not 1 <= batch_size <= MAX_BATCH_SIZE:
            raise VitralError(
                f"expected batch sizes between 1 and {MAX_BATCH_SIZE:,}, got {batch_size}",
                "For example --batch-sizes 1 8 32",
            )


def measure_agreement(engines: CpuEngines, images_NCHW: Tensor) -> tuple[dict[str, Agreement], dict[str, float]]:
    """Top-1 agreement of each engine with fp32, and the share of images that each cascade computes twice."""
    logits = {name: run_batched(engine, images_NCHW) for name, engine in engines.items()}
    agreement = {name: top1_agreement(logits["fp32"], values) for name, values in logits.items()}
    recheck_rate = {
        name: float(engine.is_ambiguous(logits[name.removesuffix("-cascade")]).double().mean())
        for name, engine in engines.items()
        if isinstance(engine, CascadeEngine)
    }
    return agreement, recheck_rate


def _repeat_to(images_NCHW: Tensor, min_count: int) -> Tensor:
    return images_NCHW.repeat(-(-min_count // len(images_NCHW)), 1, 1, 1)


def _time_in_turns(engines: CpuEngines, images_NCHW: Tensor, batch_size: int, seconds: float) -> dict[str, list[float]]:
    """Seconds per batch of each engine."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    starts = range(0, len(images_NCHW) - batch_size + 1, batch_size)
    round_index, end = 0, time.perf_counter() + seconds * len(engines)
    for engine in engines.values():
        engine(images_NCHW[:batch_size])  # oneDNN generates its kernels on the first call with a shape
    while round_index < MIN_ROUNDS or time.perf_counter() < end:
        # Other images in each round: the time of a cascade depends on how many of them are ambiguous.
        images = images_NCHW[starts[round_index % len(starts)] :][:batch_size]
        for name, engine in engines.items():
            start = time.perf_counter()
            engine(images)
            times[name].append(time.perf_counter() - start)
        round_index += 1
    return times


def _speed(batch_size: int, times: list[float]) -> dict[str, float]:
    """Latency percentiles, and throughput from the mean, which includes the batches that a cascade computes twice."""
    percentiles = statistics.quantiles(times, n=100, method="inclusive")
    return {
        "p50_ms": round(percentiles[49] * 1e3, 3),
        "p95_ms": round(percentiles[94] * 1e3, 3),
        "p99_ms": round(percentiles[98] * 1e3, 3),
        "images_per_second": round(batch_size / statistics.mean(times), 1),
    }


def recommend(rows: Sequence[BenchRow], num_images: int) -> tuple[BenchRow, str]:
    """The fastest row with sufficient agreement and speedup, otherwise the fastest fp32 row; and the reason."""
    fp32 = max((row for row in rows if row.engine == "fp32"), key=lambda row: row.images_per_second)
    faster = [row for row in rows if row.images_per_second > MIN_SPEEDUP * fp32.images_per_second]
    agreeing = [row for row in faster if row.agreement_low >= MIN_AGREEMENT]
    best = max(agreeing, key=lambda row: row.images_per_second, default=fp32)
    threads = f"{best.threads} thread{'s' if best.threads > 1 else ''}"
    speed = f"{best.images_per_second:,.0f} images/s with {threads}"
    if best is not fp32:
        return best, f"{speed}, {_comparison(best, fp32, num_images)}"
    if not faster:
        return best, f"{speed}; no engine is {MIN_SPEEDUP:g}x as fast"
    fastest = max(faster, key=lambda row: row.images_per_second)
    reason = f"{speed}; {fastest.engine} is not used: {_comparison(fastest, fp32, num_images)}"
    if num_images < (needed := images_to_show(MIN_AGREEMENT)):
        return best, f"{reason}; at least {needed} images are needed to show an agreement of {MIN_AGREEMENT:.0%}"
    return best, f"{reason}, not above {MIN_AGREEMENT:.0%}"


def _comparison(row: BenchRow, fp32: BenchRow, num_images: int) -> str:
    agreement = Agreement(same=round(row.agreement * num_images), images=num_images)
    return f"{row.images_per_second / fp32.images_per_second:.1f}x fp32, {agreement}"
