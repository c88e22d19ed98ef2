"""Benchmark of the GPU engines over batch sizes. Recommends bf16, or FP8 with a re-check of close calls.

The baseline of the speed is bf16, not fp32 as in `bench.py`: without a benchmark, a GPU uses bf16.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vitral import __version__
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.inference.agreement import Agreement, top1_agreement
from vitral.inference.bench import MIN_AGREEMENT, BenchPlan, make_row, repeat_to, time_in_turns
from vitral.inference.bench_results import BenchResult, BenchRow, benched_device, save_bench_result
from vitral.inference.cascade import margin_for_agreement
from vitral.inference.cuda_cascade import CudaCascadeEngine, build_recheck_engine, fp8_hardware
from vitral.inference.cuda_engine import CudaEngine
from vitral.inference.engine import ReferenceEngine
from vitral.inference.gpu_selection import cuda_hardware
from vitral.models.vit import ViT
from vitral.utils.intervals import images_to_show
from vitral.utils.progress import LogFn, no_log

MIN_GPU_SPEEDUP = 1.1  # over bf16 that FP8 with a re-check must reach
MAX_DISAGREEMENT = 0.001  # share of images with another top-1 label than fp32; one image is always allowed
BATCH_SIZES = (1, 64, 256)
COMPARE_BATCH_SIZE = 256
GpuEngines = Mapping[str, ReferenceEngine | CudaEngine | CudaCascadeEngine]


def run_gpu_bench(
    model: ViT,
    preprocessing: Preprocessing,
    hardware: Hardware,
    images_NCHW: Tensor,
    calibration_images_NCHW: Tensor,
    folder: Path | None = None,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seconds: float = 1.0,
    log: LogFn = no_log,
) -> BenchResult:
    """Measure fp32, bf16 and, where the GPU supports it, FP8 with and without a re-check of close calls.

    `hardware` is the fp32 hardware that the model is on. The engines take turns; each row takes about `seconds`, from
    pixels in host memory to logits in host memory. The result is stored in `folder`.
    """
    BenchPlan(
        num_images=len(images_NCHW),
        num_calibration=len(calibration_images_NCHW),
        threads=(1,),
        batch_sizes=tuple(batch_sizes),
        seconds=seconds,
    ).check()
    log(f"Calibrating on {len(calibration_images_NCHW):,} images")
    engines, margins, unavailable = build_gpu_engines(model, preprocessing, hardware, calibration_images_NCHW)
    log(f"Comparing with fp32 on {len(images_NCHW):,} images")
    agreement, recheck_rate = measure_gpu_agreement(engines, images_NCHW)
    rows: list[BenchRow] = []
    for batch_size in batch_sizes:
        log(f"Batch size {batch_size}")
        times = time_in_turns(engines, repeat_to(images_NCHW, batch_size), batch_size, seconds)
        rows += [
            make_row(
                name,
                1,
                batch_size,
                times[name],
                nbytes=getattr(engine, "nbytes", 0),
                agreement=agreement[name],
                recheck_rate=recheck_rate if name == "fp8-cascade" else 0.0,
            )
            for name, engine in engines.items()
        ]
    best, reason = recommend_gpu_engine(rows, len(images_NCHW), unavailable)
    result = BenchResult(
        cpu=benched_device(hardware),
        versions=f"vitral {__version__}, torch {torch.__version__}",
        date=time.strftime("%Y-%m-%d"),
        images=len(images_NCHW),
        calibration_images=len(calibration_images_NCHW),
        rows=tuple(rows),
        margins=margins,
        engine=best.engine,
        threads=1,
        batch_size=best.batch_size,
        reason=reason,
    )
    if folder is not None:
        save_bench_result(folder, result)
    return result


def build_gpu_engines(
    model: ViT, preprocessing: Preprocessing, hardware: Hardware, images_NCHW: Tensor
) -> tuple[GpuEngines, dict[str, float], str | None]:
    """All engines of this GPU, the margin of the FP8 cascade calibrated on these images, or why there is no cascade."""
    fp32 = ReferenceEngine(model, preprocessing, hardware)
    engines: dict[str, ReferenceEngine | CudaEngine | CudaCascadeEngine] = {
        "fp32": fp32,
        "bf16": CudaEngine(model, preprocessing, cuda_hardware("bf16", "no", throughput=True)),
    }
    try:
        fp8 = CudaEngine(model, preprocessing, fp8_hardware())
    except VitralError as error:
        return engines, {}, error.what
    margin = margin_for_agreement(logits_of(fp8, images_NCHW), logits_of(fp32, images_NCHW))
    recheck = build_recheck_engine(model, preprocessing, hardware)
    return engines | {"fp8": fp8, "fp8-cascade": CudaCascadeEngine(fp8, recheck, margin)}, {"fp8": margin}, None


def logits_of(engine: ReferenceEngine | CudaEngine | CudaCascadeEngine, images_NCHW: Tensor) -> Tensor:
    return torch.cat([engine(images) for images in images_NCHW.split(COMPARE_BATCH_SIZE)])


def measure_gpu_agreement(engines: GpuEngines, images_NCHW: Tensor) -> tuple[dict[str, Agreement], float]:
    """Top-1 agreement of each engine with fp32, and the share of images that the cascade computes twice."""
    logits = {name: logits_of(engine, images_NCHW) for name, engine in engines.items()}
    agreement = {name: top1_agreement(logits["fp32"], values) for name, values in logits.items()}
    cascade = engines.get("fp8-cascade")
    if not isinstance(cascade, CudaCascadeEngine):
        return agreement, 0.0
    return agreement, float(cascade.is_ambiguous(logits["fp8"]).double().mean())


def recommend_gpu_engine(
    rows: Sequence[BenchRow], num_images: int, unavailable: str | None = None
) -> tuple[BenchRow, str]:
    """The fastest FP8 cascade if it is faster than bf16 and has fp32's labels, otherwise bf16; and the reason."""
    bf16 = max((row for row in rows if row.engine == "bf16"), key=lambda row: row.images_per_second)
    cascades = [row for row in rows if row.engine == "fp8-cascade"]
    speed = f"{bf16.images_per_second:,.0f} images/s"
    if not cascades:
        return bf16, f"{speed}; {unavailable}" if unavailable else speed
    best = max(cascades, key=lambda row: row.images_per_second)
    agreement = Agreement(same=round(best.agreement * num_images), images=num_images)
    speedup = best.images_per_second / bf16.images_per_second
    comparison = f"{speedup:.2f}x bf16, {agreement}, {best.recheck_rate:.1%} computed again"
    if speedup < MIN_GPU_SPEEDUP:
        return bf16, f"{speed}; FP8 is not used: {comparison}, less than {MIN_GPU_SPEEDUP:g}x"
    if num_images < (needed := images_to_show(MIN_AGREEMENT)):
        return bf16, (
            f"{speed}; FP8 is not used: at least {needed} images are needed to show an agreement of {MIN_AGREEMENT:.0%}"
        )
    allowed = max(1, int(MAX_DISAGREEMENT * num_images))
    if num_images - agreement.same > allowed or agreement.interval.low < MIN_AGREEMENT:
        return bf16, f"{speed}; FP8 is not used: {comparison}, not {1 - MAX_DISAGREEMENT:.1%}"
    return best, f"{best.images_per_second:,.0f} images/s, {comparison}"
