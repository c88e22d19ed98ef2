"""Trained models in use: `vitral.load`, `embed` and `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vitral import bundled
from vitral.data.files.walk import SkippedFile
from vitral.data.names import path_text
from vitral.device.cpu import available_cpus
from vitral.device.select import DeviceOption
from vitral.evaluation.comparison_images import load_comparison_images
from vitral.inference.bench import BATCH_SIZES as CPU_BATCH_SIZES
from vitral.inference.bench import run_bench
from vitral.inference.bench_results import BenchResult, benched_device, delete_bench_result, load_bench_results
from vitral.inference.engine import EngineName
from vitral.inference.gpu_bench import BATCH_SIZES as GPU_BATCH_SIZES
from vitral.inference.gpu_bench import run_gpu_bench
from vitral.inference.predictor import Predictor
from vitral.inference.task_support import require_task
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.reporting.feature_files import check_features_path, write_features
from vitral.runs.run import find_model_dir, is_checkpoint
from vitral.utils.progress import LogFn, no_log


def load(
    path: str | Path,
    *,
    options: CheckpointOptions = NO_OPTIONS,
    engine: EngineName = "auto",
    device: DeviceOption = "auto",
    tome_r: int = 0,
) -> Predictor:
    """Load a trained model.

    Args:
        path: Run or model folder, checkpoint file, `hf:owner/name`, or the name of a bundled model ("mnist").
        options: What the files of a checkpoint of another library do not contain.
        engine: Inference engine: "auto", "reference" (the plain fp32 module), "fp32", "bf16", "int8", "fp8",
            or a cascade, which computes close calls again: "bf16-cascade", "int8-cascade" or "fp8-cascade".
        device: "auto", "cpu" or "gpu" (also "cuda"). CUDA_VISIBLE_DEVICES selects one of several GPUs.
        tome_r: Tokens that each block merges (token merging, ToMe): faster and less accurate.

    Examples:
        >>> model = vitral.load("mnist")
        >>> model.predict("photo.png").best.name
    """
    return Predictor.load(path, options=options, device=device, engine=engine, tome_r=tome_r)


def as_predictor(model: str | Path | Predictor, engine: EngineName, options: CheckpointOptions) -> Predictor:
    return model if isinstance(model, Predictor) else Predictor.load(model, options=options, engine=engine)


def reference_predictor(model: str | Path | Predictor, device: DeviceOption = "cpu") -> Predictor:
    if not isinstance(model, Predictor):
        return Predictor.load(model, device=device, engine="reference")
    return model.reference() if device == "cpu" or model.hardware.device.type == "cpu" else model


class EmbedResult(NamedTuple):
    """What `embed` wrote and what it left out."""

    images: int
    errors: list[str]  # one message per unreadable file
    skipped: list[SkippedFile]  # files in the given folders that are not images


def embed(
    model: str | Path | Predictor,
    files: Sequence[str | Path],
    out: str | Path,
    *,
    options: CheckpointOptions = NO_OPTIONS,
    engine: EngineName = "auto",
) -> EmbedResult:
    """Write one feature vector per image, the input of the classification head, to .npy, .parquet or .csv.

    Args:
        model: The model that computes the features.
        files: Image files and folders.
        out: File to write.
        options: What the files of a checkpoint of another library do not contain.
        engine: Inference engine; ignored if `model` is a Predictor.

    Examples:
        >>> vitral.embed("runs/mine", ["folder/"], "features.npy").images
    """
    check_features_path(out)
    predictor = as_predictor(model, engine, options)
    skipped: list[SkippedFile] = []
    names, features, errors = predictor.embed_files(files, skipped.append)
    write_features(names, features, out)
    return EmbedResult(len(names), errors, skipped)


def bench(
    model: str | Path | Predictor,
    *,
    data: str | Path | None = None,
    images: int = 1000,
    threads: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
    seconds: float = 0.5,
    device: DeviceOption = "auto",
    log: LogFn = no_log,
) -> BenchResult:
    """Measure the speed of all inference engines on this CPU or GPU and store the recommendation with the model.

    From then on, engine "auto" is the recommended one; `load_bench` returns the stored result and `reset_bench`
    deletes it. An engine other than fp32 (bf16 on a GPU) is recommended only if its top-1 labels are those of fp32 for
    more than 99% of all images with 95% confidence, which takes at least 381 images. Nothing is stored for checkpoints
    of other libraries.

    Args:
        model: The model to measure.
        data: Dataset or folder to measure with. Default: the validation images of the dataset it was trained on.
        images: Maximum number of images to compare with fp32. int8 is calibrated on training images or, if those are
            not available, on every fourth image.
        threads: Numbers of threads of a CPU. Default: one, and all CPUs.
        batch_sizes: Batch sizes. Default: 1 and 8; on a GPU 1, 64 and 256.
        seconds: Duration of each measurement.
        device: "auto" is the GPU, if there is one.
        log: Called with one line per phase.

    Examples:
        >>> vitral.bench("runs/mine", batch_sizes=[1], seconds=0.1).engine
    """
    predictor = reference_predictor(model, device)
    predictor.require_head()
    require_task(predictor, "vitral bench", "classification")
    comparison = load_comparison_images(predictor, path_text(data), images)
    for note in comparison.notes:
        log(f"  {note}")
    if predictor.hardware.is_gpu:
        return run_gpu_bench(
            predictor.model,
            predictor.model_config.preprocessing,
            predictor.hardware,
            comparison.images,
            comparison.calibration,
            bench_folder(predictor),
            batch_sizes=batch_sizes or GPU_BATCH_SIZES,
            seconds=seconds,
            log=log,
        )
    return run_bench(
        predictor.model,
        predictor.model_config.preprocessing,
        comparison.images,
        comparison.calibration,
        bench_folder(predictor),
        threads=threads or sorted({1, available_cpus()}),
        batch_sizes=batch_sizes or CPU_BATCH_SIZES,
        seconds=seconds,
        log=log,
    )


def bench_folder(predictor: Predictor) -> Path | None:
    """Folder for benchmark results: the model folder, or the cache for bundled models. None for other checkpoints."""
    if predictor.path is None or is_checkpoint(predictor.path):
        return None
    folder = bundled.measurement_dir(find_model_dir(predictor.path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def load_bench(model: str | Path | Predictor, device: DeviceOption = "auto") -> BenchResult | None:
    """The stored benchmark of this CPU or GPU, which determines engine "auto"; None if there is none.

    Args:
        model: The model that was measured.
        device: "auto" is the GPU, if there is one.

    Examples:
        >>> vitral.api.load_bench("runs/mine")
    """
    predictor = reference_predictor(model, device)
    folder = bench_folder(predictor)
    return load_bench_results(folder).get(benched_device(predictor.hardware)) if folder is not None else None


def reset_bench(model: str | Path | Predictor, device: DeviceOption = "auto") -> BenchResult | None:
    """Delete the stored benchmark of this CPU or GPU and return it. Engine "auto" is then fp32, or bf16 on a GPU.

    Args:
        model: The model that was measured.
        device: "auto" is the GPU, if there is one.

    Examples:
        >>> vitral.api.reset_bench("runs/mine")
    """
    predictor = reference_predictor(model, device)
    folder = bench_folder(predictor)
    return delete_bench_result(folder, benched_device(predictor.hardware)) if folder is not None else None
