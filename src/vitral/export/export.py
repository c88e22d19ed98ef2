"""Write an exported file, load it back, compare it with the model, and only then rename it to its final name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitral.data.decode import decode_pixels
from vitral.data.pixels import PixelFormat
from vitral.data.preprocess import Preprocessing
from vitral.data.resize_crop import to_array
from vitral.errors import VitralError
from vitral.evaluation.comparison_images import ComparisonImages
from vitral.export import onnx_file, torch_file
from vitral.export.parity import (
    MIN_AGREEMENT,
    ModelFn,
    ParityReport,
    check_parity,
    first_divergent_block,
    measure_parity,
)
from vitral.export.wrapper import ExportPrecision, ExportWrapper
from vitral.inference.onnx_runtime import OnnxModel
from vitral.inference.predictor import Predictor

Target = Literal["onnx", "torch", "aoti"]
SUFFIX_BY_TARGET = {"onnx": ".onnx", "torch": ".pt2", "aoti": ".pt2"}
BATCH_SIZE = 8
# Relative RMS error of the tokens above which a block counts as diverged.
DIVERGENCE_TOLERANCE = {"fp32": 1e-3, "fp16": 0.03, "bf16": 0.05, "int8": 0.15}


def export_model(
    predictor: Predictor,
    out: Path,
    *,
    to: Target,
    precision: ExportPrecision,
    preprocessing: bool,
    comparison: ComparisonImages,
    min_agreement: float = MIN_AGREEMENT,
) -> ParityReport:
    """Write `out` and compare it with the predictor. Raises a VitralError and writes nothing if they disagree.

    Args:
        predictor: must use the reference engine on the CPU.
        comparison: images to compare on, and those for the int8 scales.
        min_agreement: share of images that must have the same top-1 label.
    """
    if preprocessing and to != "onnx":
        raise VitralError("preprocessing can only be exported to ONNX", "Use --to onnx, or omit --preprocessing")
    check_exportable(predictor.model_config.preprocessing)
    suffix = SUFFIX_BY_TARGET[to]
    if out.suffix != suffix:
        raise VitralError(
            f"expected a file name that ends in {suffix}, got {out}", f"Use --out {out.with_suffix(suffix)}"
        )
    if not 0 <= min_agreement <= 1:
        raise VitralError(f"--min-agreement must be between 0 and 1, got {min_agreement:g}", "The default is 0.99")
    calibration = comparison.calibration
    with _temporary_sibling(out) as file:
        exported = _write(file, predictor, to, precision, preprocessing, calibration)
        batches = _batches(comparison, predictor.model_config.preprocessing.pixel_format, preprocessing)
        scaling, names = predictor.model_config.target_scaling, predictor.classes
        units = None if scaling is None else tuple(zip(names, scaling.std, strict=True))
        parity = measure_parity(
            _predictor_fn(predictor), exported, batches, comparison.labels, units, predictor.model_config
        )
        check_parity(
            parity,
            precision,
            lambda: locate_divergence(predictor, to, precision, calibration, comparison.images[:BATCH_SIZE]),
            min_agreement,
        )
    return replace(parity, calibration_images=len(calibration) if precision == "int8" else 0)


def check_exportable(preprocessing: Preprocessing) -> None:
    """Refuse native models: the patch grid is fixed in an exported file."""
    if preprocessing.resize == "native":
        raise VitralError(
            "a model with --resize native accepts any patch grid, and exported files have a fixed one",
            "Serve it with vitral serve, or fine-tune it for export: vitral train DATA --init-from RUN --resize pad",
        )


def _batches(
    comparison: ComparisonImages, pixel_format: PixelFormat, preprocessing: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of batches: input of the model and input of the file, which are images of any size if it preprocesses."""
    if not preprocessing:
        yield from ((images, images) for images in comparison.images.split(BATCH_SIZE))
        return
    for images, source in zip(comparison.images.split(1), comparison.sources, strict=True):
        pixels = to_array(decode_pixels(source, pixel_format), pixel_format.channels)
        yield images, torch.from_numpy(np.array(pixels))[None]


def _write(
    file: Path,
    predictor: Predictor,
    to: Target,
    precision: ExportPrecision,
    preprocessing: bool,
    calibration_images: Tensor,
) -> ModelFn:
    """Write the file and load it back."""
    model, config = predictor.model, predictor.model_config
    if to == "onnx":
        onnx_file.write_onnx(file, model, config, precision, preprocessing, calibration_images)
        return _onnx_fn(OnnxModel(file, spinning=False))  # it takes turns with PyTorch
    write, read = (
        (torch_file.write_pt2, torch_file.read_pt2) if to == "torch" else (torch_file.write_aoti, torch_file.read_aoti)
    )
    write(file, model, config, precision)
    return read(file)[0]


@contextmanager
def _temporary_sibling(out: Path) -> Iterator[Path]:
    """A temporary file that is renamed to `out` when the block succeeds, and deleted otherwise."""
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.with_name(f".{out.stem}.{os.getpid()}{out.suffix}")
    file.touch()  # fail early if the folder is not writable
    try:
        yield file
        file.replace(out)
    finally:
        file.unlink(missing_ok=True)


def _predictor_fn(predictor: Predictor) -> ModelFn:
    def run(images: Tensor) -> tuple[Tensor, Tensor]:
        logits = predictor.logits(images)
        if predictor.is_regression:
            return logits, predictor.to_units(logits)
        return logits, predictor.model_config.calibration.probabilities(logits)

    return run


def _onnx_fn(model: OnnxModel) -> ModelFn:
    def run(images: Tensor) -> tuple[Tensor, Tensor]:
        logits, probabilities = model.logits(images.numpy())
        return torch.from_numpy(logits), torch.from_numpy(probabilities)

    return run


def locate_divergence(
    predictor: Predictor, to: Target, precision: ExportPrecision, calibration_images: Tensor, images: Tensor
) -> str:
    """Which block is the first to differ from the model. Exports the model again with the tokens of all blocks."""
    model, config = predictor.model, predictor.model_config
    run: Callable[[Tensor], Sequence[Tensor]]
    if to != "onnx":
        run = ExportWrapper(model, config, precision, blocks=True).eval()
    else:
        _, onnxruntime = onnx_file.require_onnx()
        graph = (
            onnx_file.quantize_graph(model, config, calibration_images, blocks=True)
            if precision == "int8"
            else onnx_file.build_graph(model, config, precision, blocks=True)
        )
        session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])

        def run(images: Tensor) -> Sequence[Tensor]:
            return [torch.from_numpy(values) for values in session.run(None, {"images": images.numpy()})]

    with torch.inference_mode():
        expected = list(ExportWrapper(model, config, blocks=True).eval()(images))
        actual = list(run(images))
    return first_divergent_block(expected, actual, DIVERGENCE_TOLERANCE[precision])
