"""The benchmark that a large prediction job on a GPU starts with, if none is stored with the model.

A job of a hundred thousand images repays the half minute that it takes; `vitral bench` does the same at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vitral.data.files.walk import iter_images
from vitral.errors import VitralError
from vitral.inference.bench import CALIBRATION_STRIDE
from vitral.inference.bench_results import benched_device, load_bench_results
from vitral.inference.gpu_bench import run_gpu_bench
from vitral.inference.gpu_selection import select_gpu_engine
from vitral.inference.predictor import Predictor
from vitral.utils.progress import LogFn, no_log

MIN_JOB_IMAGES = 100_000
SAMPLE_SIZE = 1024  # a quarter calibrates the margin, the others are compared with fp32
MIN_WIDTH = 384  # FP8 was slower than bf16 at width 192 (H200)


def bench_for_job(predictor: Predictor, paths: Sequence[Path], folder: Path | None, log: LogFn = no_log) -> None:
    """Choose between bf16 and fp8-cascade on a sample of the job's images, and store the choice in `folder`.

    Does nothing on a CPU, for small jobs, with several processes, for other tasks than classification, where FP8 has no
    advantage, and if there is a benchmark of this GPU.
    """
    if (
        folder is None
        or not predictor.hardware.is_gpu
        or predictor.hardware.world.size > 1
        or predictor.model_config.task != "classification"
        or predictor.model_config.architecture.width < MIN_WIDTH
        or benched_device(predictor.hardware) in load_bench_results(folder)
        or (count := sum(1 for _ in iter_images(paths))) < MIN_JOB_IMAGES
    ):
        return
    log(f"Measuring bf16 and FP8 on {SAMPLE_SIZE:,} of {count:,} images; the choice is stored with the model")
    try:
        choose_engine(predictor, load_sample(predictor, paths, count), folder)
    except (VitralError, RuntimeError) as error:  # the job continues with bf16
        reason = error.what if isinstance(error, VitralError) else str(error).partition("\n")[0]
        log(f"bf16 stays in use: {reason}")
    else:
        log(f"Using {predictor.engine}")


def choose_engine(predictor: Predictor, images_NCHW: Tensor, folder: Path) -> None:
    """Run the benchmark on these images and give the predictor the engine that it recommends."""
    is_calibration = torch.arange(len(images_NCHW)) % CALIBRATION_STRIDE == 0
    model, preprocessing, hardware = predictor.model, predictor.model_config.preprocessing, predictor.hardware
    compared, calibration = images_NCHW[~is_calibration], images_NCHW[is_calibration]
    run_gpu_bench(model, preprocessing, hardware, compared, calibration, folder, batch_sizes=(256,), seconds=0.5)
    predictor.engine = select_gpu_engine(model, preprocessing, hardware, "auto", folder, throughput=True)


def load_sample(predictor: Predictor, paths: Sequence[Path], count: int, size: int = SAMPLE_SIZE) -> Tensor:
    """Up to `size` readable images, evenly spaced among the `count` images in `paths`."""
    stride = max(1, count // size)
    files = (path for index, path in enumerate(iter_images(paths)) if index % stride == 0)
    batches = predictor.decode_batches(files)
    images = [pixels for batch in batches for _, pixels in batch if isinstance(pixels, Tensor)]
    if not images:
        raise VitralError("none of the sampled images is readable", "Check the folder with vitral doctor")
    return torch.stack(images[:size])
