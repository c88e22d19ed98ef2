"""vitral predict: predict labels for images."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.cli.checks import check_inputs, check_output
from vitral.cli.messages import (
    BUNDLED,
    ENGINE_HELP,
    LABELS_HELP,
    TOME_HELP,
    find_image_files,
    load_model,
    missing_images_error,
)
from vitral.cli.options import DeviceFlag, EngineFlag, checkpoint_flags
from vitral.cli.output import OutputFormat, print_predictions
from vitral.cli.parsing import Command, argument, option
from vitral.errors import VitralError

MANY_FILES = 32  # files from which on the number of threads is measured


@dataclass(frozen=True, kw_only=True)
class PredictArgs:
    """Predict labels for image files and for the images in folders."""

    model: str = argument(f"run or model folder, checkpoint file, hf:owner/name, exported model.onnx, {BUNDLED}")
    files: tuple[Path, ...] = argument("image files and folders")
    out: Path | None = option(None, "write .parquet, .csv or .jsonl, for any number of images; resumes if interrupted")
    top: int = option(3, "number of labels per image; a multi-label model returns all above their thresholds")
    json: bool = option(False, "print one JSON object per image")
    csv: bool = option(False, "print CSV")
    engine: EngineFlag = option("auto", ENGINE_HELP)
    tome_r: int = option(0, TOME_HELP)
    threads: int | None = option(None, "number of CPU threads (default: measured if there are many images)")
    device: DeviceFlag = option("auto", "device to run on; CUDA_VISIBLE_DEVICES selects one of several GPUs")
    labels: Path | None = option(None, LABELS_HELP)
    checkpoint: Mapping[str, Any] = checkpoint_flags()


def predict(args: PredictArgs) -> int:
    if not args.files:
        raise missing_images_error("predict", args.model)
    if args.top < 1:
        raise VitralError(f"--top must be at least 1, got {args.top}", "The default is 3")
    if args.json and args.csv:
        raise VitralError("--json and --csv cannot be combined", "Choose one of them")
    output_format: OutputFormat = "json" if args.json else "csv" if args.csv else "text"
    if args.model.lower().endswith(".onnx"):
        return predict_onnx(args, output_format)
    check_inputs(args.model, images=args.files, labels=args.labels)
    check_output(args.out)
    predictor = load_model(
        args.model,
        args.checkpoint,
        device=args.device,
        labels=args.labels,
        engine=args.engine,
        threads=args.threads,
        tome_r=args.tome_r,
    )
    predictor.require_head()
    if args.threads is None and (args.out or len(args.files) >= MANY_FILES or any(map(Path.is_dir, args.files))):
        from vitral.inference.threads import use_fastest_threads

        if (choice := use_fastest_threads(predictor)) is not None and "slower" in choice.reason:
            print(f"Using {choice}", file=sys.stderr)
    if args.out is not None:
        from vitral.inference.batch_predict import predict_to_file

        if args.engine == "auto" and not args.tome_r:
            from vitral.api.inference import bench_folder
            from vitral.inference.job_bench import bench_for_job

            bench_for_job(predictor, args.files, bench_folder(predictor), lambda line: print(line, file=sys.stderr))
        return predict_to_file(predictor, args.files, args.out, top=args.top)
    return print_predictions(list(predictor.predict_many(find_image_files(args.files), top=args.top)), output_format)


def predict_onnx(args: PredictArgs, output_format: OutputFormat) -> int:
    """Run an exported model with ONNX Runtime. Imports neither torch nor any dependency but numpy and Pillow."""
    from vitral.inference.onnx_runtime import OnnxModel

    given = [flag for flag in ("out", "labels") if getattr(args, flag) is not None]
    for flag in (*given, *args.checkpoint):
        raise VitralError(
            f"--{flag.replace('_', '-')} does not apply to an exported model", "Use the run that it was exported from"
        )
    model = OnnxModel(args.model, args.threads)
    return print_predictions(list(model.predict_many(find_image_files(args.files), args.top)), output_format)


COMMAND = Command("predict", PredictArgs, predict)
