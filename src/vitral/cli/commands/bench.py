"""vitral bench: measure inference speed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitral import bundled
from vitral.cli.checks import check_inputs
from vitral.cli.messages import EVAL_DATA_HELP, JSON_HELP, MODEL_HELP, announce_downloads, load_model
from vitral.cli.options import DeviceFlag, checkpoint_flags
from vitral.cli.parsing import Command, argument, option
from vitral.errors import VitralError, shell_quote
from vitral.utils.json_toml import dump_json

if TYPE_CHECKING:
    from vitral.inference.predictor import Predictor

NO_RESULT = "No benchmark is stored for this {}"


@dataclass(frozen=True, kw_only=True)
class BenchArgs:
    """Measure inference speed and accuracy on this CPU or GPU for every engine and batch size.

    The fastest engine that agrees with fp32 is stored with the model; predict, evaluate and serve use it on the same
    device. An engine agrees if the 95% interval of the share of images with the same top-1 label is above 99%, which
    takes at least 381 images; with fewer, fp32 is used (bf16 on a GPU). See the stored choice with --show, undo it with
    --reset.
    """

    model: str = argument(MODEL_HELP)
    data: str | None = option(None, EVAL_DATA_HELP)
    images: int = option(1000, "maximum number of images to compare the engines on")
    device: DeviceFlag = option("auto", "device to measure; auto: the GPU, if there is one")
    threads: tuple[int, ...] = option((), "thread counts to measure on a CPU (default: 1 and all cores)")
    batch_sizes: tuple[int, ...] = option((), "batch sizes to measure (default: 1 8; on a GPU 1 64 256)")
    seconds: float = option(0.5, "time per measurement, in seconds")
    json: bool = option(False, JSON_HELP)
    show: bool = option(False, "print the stored result and measure nothing", group="Stored result")
    reset: bool = option(False, "delete the stored result of this device", group="Stored result")
    checkpoint: Mapping[str, Any] = checkpoint_flags()


def bench(args: BenchArgs) -> int:
    check_inputs(args.model, data=args.data)
    from vitral import api
    from vitral.api.inference import bench_folder

    predictor = load_model(args.model, args.checkpoint, device=args.device, engine="reference")
    on_gpu = predictor.hardware.is_gpu
    device, default_engine = ("GPU", "bf16") if on_gpu else ("CPU", "fp32")
    if args.show and args.reset:
        raise VitralError("--show and --reset cannot be combined", "Choose one of them")
    if args.reset:
        removed = api.reset_bench(predictor)
        print(f"Deleted the choice of {removed.engine}" if removed else NO_RESULT.format(device))
        print(f"predict, evaluate and serve use {default_engine} on this {device}")
        print_calibration_hint(predictor, default_engine, args.model)
        return 0
    if args.show:
        result = api.load_bench(predictor)
    else:
        announce_downloads(args.data or predictor.model_config.trained_on)
        result = api.bench(
            predictor,
            data=args.data,
            images=args.images,
            threads=args.threads,
            batch_sizes=args.batch_sizes,
            seconds=args.seconds,
            log=lambda line: print(line, file=sys.stderr),
        )
    if args.json:
        from vitral.utils.serialization import to_dict

        print(dump_json(to_dict(result)))
    elif result is None:
        print(f"{NO_RESULT.format(device)}; predict, evaluate and serve use {default_engine}")
        print(f"Measure with: vitral bench {shell_quote(args.model)}")
    else:
        from vitral.reporting.terminal.bench import print_bench

        is_stored = bench_folder(predictor) is not None
        print_bench(result, args.model, is_stored=is_stored, device=device)
        if is_stored:
            print_calibration_hint(predictor, result.engine, args.model)
    return 0


def print_calibration_hint(predictor: Predictor, engine: str, model: str) -> None:
    """Say how to calibrate a model for `engine` if it was calibrated with another one. Bundled models are read-only."""
    calibration = predictor.model_config.calibration
    is_calibrated = calibration.temperature != 1 or calibration.ood_threshold is not None
    has_same_logits = calibration.engine == engine or {calibration.engine, engine} == {"reference", "fp32"}
    if is_calibrated and not has_same_logits and not bundled.bundled_name(predictor.path or ""):
        print(
            f"Temperature and OOD threshold were fitted with {calibration.engine}. "
            f"To fit them with {engine}: vitral evaluate {shell_quote(model)} --calibrate"
        )


COMMAND = Command("bench", BenchArgs, bench)
