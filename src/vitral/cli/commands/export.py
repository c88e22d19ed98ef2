"""vitral export: write a model for other runtimes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitral.cli.checks import check_inputs, check_output
from vitral.cli.messages import (
    EVAL_DATA_HELP,
    LABELS_HELP,
    MODEL_HELP,
    announce_downloads,
    load_model,
    print_notes,
    status_line,
)
from vitral.cli.options import checkpoint_flags
from vitral.cli.parsing import Command, argument, option
from vitral.errors import shell_quote


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Export a model with its class names, preprocessing and calibration as one file.

    The file is loaded again and compared with the model on at least 100 real images; if they disagree, no file is
    written. int8 is calibrated on training images or, if those are not available, on every fourth image.
    """

    model: str = argument(MODEL_HELP)
    to: Literal["onnx", "torch", "aoti"] = option("onnx", "torch: torch.export (.pt2); aoti: compiled for this CPU")
    precision: Literal["fp32", "fp16", "bf16", "int8"] = option("fp32", "precision of the exported weights")
    preprocessing: bool = option(False, "include resizing and cropping, for input images of any size (ONNX)")
    out: Path | None = option(None, "file to write (default: in exports/ of the run folder)")
    data: str | None = option(None, f"images to compare on: {EVAL_DATA_HELP}")
    images: int | None = option(
        None, "maximum number of images to compare on (default: all of --data, or 1,000 validation images)"
    )
    min_agreement: float = option(0.99, "share of images on which file and model must have the same top-1 label")
    labels: Path | None = option(None, LABELS_HELP)
    checkpoint: Mapping[str, Any] = checkpoint_flags()


def export(args: ExportArgs) -> int:
    check_inputs(args.model, data=args.data, labels=args.labels)
    check_output(args.out)
    from vitral import api

    predictor = load_model(args.model, args.checkpoint, device="cpu", engine="reference", labels=args.labels)
    announce_downloads(args.data or predictor.model_config.trained_on)
    with status_line("Exporting"):
        file, parity = api.export(
            predictor,
            to=args.to,
            precision=args.precision,
            preprocessing=args.preprocessing,
            out=args.out,
            data=args.data,
            images=args.images,
            min_agreement=args.min_agreement,
        )
    print_notes(parity.notes)
    print(f"Exported {file} ({file.stat().st_size / 1e6:.1f} MB)")
    print(f"Compared with the model: {parity}")
    if args.to == "onnx":
        print(f"Next step: vitral predict {shell_quote(file)} photo.jpg   (needs numpy, pillow and onnxruntime only)")
    return 0


COMMAND = Command("export", ExportArgs, export)
