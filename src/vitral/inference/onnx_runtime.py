"""Inference with an exported ONNX model. Requires numpy, Pillow and ONNX Runtime, but not torch.

    pip install --no-deps vitral && pip install numpy pillow onnxruntime
    vitral predict model.onnx photo.jpg

The metadata of the file holds class names, preprocessing and calibration. Images are decoded and resized by the same
code as in the rest of vitral.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vitral.data.decode import ImageDecodeError, decode_pixels
from vitral.data.geometry import input_geometry, mean_color
from vitral.data.pixels import PixelFormat
from vitral.data.resize_crop import resize_and_crop, to_array
from vitral.errors import VitralError
from vitral.inference.prediction import Prediction, assemble_predictions, assemble_values, source_name
from vitral.models.conformal import ConformalIntervals, ConformalSets
from vitral.utils.json_toml import parse_json

METADATA_KEY = "vitral"
METADATA_FORMAT = 2
MAX_BATCH_SIZE = 32
Array = np.ndarray[Any, Any]


class OnnxModel:
    """`OnnxModel("model.onnx").predict("photo.jpg").best`

    With `spinning=False`, threads that wait for work sleep. Otherwise they keep their cores busy for a while after each
    run, and PyTorch in the same process is several times as slow.
    """

    def __init__(self, path: Path | str, threads: int | None = None, *, spinning: bool = True) -> None:
        self.path = Path(path)
        self.session = self._open_session(threads, spinning)
        self.metadata = self._read_metadata()
        self.classes: tuple[str, ...] = tuple(self.metadata["classes"])
        sets = self.metadata["calibration"].get("prediction_sets")
        self.prediction_sets = None if sets is None else ConformalSets(**sets)
        self.is_regression = "target_scaling" in self.metadata
        intervals = self.metadata["calibration"].get("prediction_intervals")
        self.prediction_intervals = (
            None
            if intervals is None
            else ConformalIntervals(**intervals | {"half_widths": tuple(intervals["half_widths"])})
        )
        self.thresholds: tuple[float, ...] = ()  # of a multi-label model
        if self.metadata.get("task") == "multilabel":
            self.thresholds = tuple(self.metadata["calibration"].get("thresholds") or [0.5] * len(self.classes))
        self.has_preprocessing = bool(self.metadata["has_preprocessing"])  # resizing is part of the graph
        self.max_batch_size = 1 if self.has_preprocessing else MAX_BATCH_SIZE  # images may differ in size

    def _open_session(self, threads: int | None, spinning: bool) -> Any:
        try:
            import onnxruntime
        except ImportError as error:
            raise VitralError("ONNX models require ONNX Runtime", "pip install onnxruntime") from error
        if not self.path.is_file():
            raise VitralError(f"no such file: {self.path}", "Create one with: vitral export RUN --to onnx")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            return onnxruntime.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions have no common base class
            raise VitralError(
                f"ONNX Runtime cannot read {self.path}: {str(error).splitlines()[0]}", "Copy or export it again"
            ) from error

    def _read_metadata(self) -> dict[str, Any]:
        text = self.session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
        if text is None:
            raise VitralError(
                f"{self.path} was not exported by vitral: it has no class names and no preprocessing",
                "Create a file that has them: vitral export RUN --to onnx",
            )
        metadata: dict[str, Any] = parse_json(text)
        if metadata.get("format") != METADATA_FORMAT:
            raise VitralError(
                f"{self.path} has metadata format {metadata.get('format')}; this version of vitral reads "
                f"{METADATA_FORMAT}",
                "Export it again, or: pip install --upgrade vitral",
            )
        return metadata

    def decode(self, source: Any) -> Array:
        """Decode an image into the graph's input (C, H, W), uint8 for photographs."""
        preprocessing = self.metadata["preprocessing"]
        channels = preprocessing["channels"]
        names = tuple(preprocessing.get("channel_names", ()))
        pixel_format = PixelFormat(
            channels, preprocessing.get("dtype", "uint8"), preprocessing.get("layout", "auto"), names
        )
        image = decode_pixels(source, pixel_format)
        if self.has_preprocessing:
            return to_array(image, channels)
        geometry = input_geometry(
            image.height,
            image.width,
            (preprocessing["image_size"][0], preprocessing["image_size"][1]),
            preprocessing.get("resize", "crop"),
            crop=preprocessing["crop"],
            patch_size=preprocessing.get("patch_size", 1),
        )
        pad_color = mean_color(preprocessing["mean"], preprocessing.get("dtype", "uint8"))
        return resize_and_crop(image, geometry, channels, preprocessing["interpolation"], pad_color=pad_color)

    def logits(self, images_BCHW: Array) -> tuple[Array, Array]:
        """Images to logits and calibrated probabilities, (B, K) each; for a regression, to outputs and values."""
        images = np.ascontiguousarray(images_BCHW)
        second = "values" if self.is_regression else "probabilities"
        logits, probabilities = self.session.run(["logits", second], {"images": images})
        return logits, probabilities

    def is_ood(self, logits_BK: Array) -> Array:
        """(B,) booleans: True for out-of-distribution images, as `Calibration.is_ood`."""
        calibration = self.metadata["calibration"]
        max_logit = logits_BK.max(axis=1)
        score = max_logit
        if calibration["ood_score"] == "energy":
            score = max_logit + np.log(np.exp(logits_BK - max_logit[:, None]).sum(axis=1))
        threshold = calibration.get("ood_threshold")
        return np.asarray(~(score >= (-math.inf if threshold is None else threshold)))

    def predict(self, source: Any, top: int | None = None) -> Prediction:
        """Predict one image. Raises ImageDecodeError if it cannot be read."""
        return next(self._predict_batch([(source_name(source), self.decode(source))], top))

    def predict_many(self, sources: Iterable[Any], top: int | None = None) -> Iterator[Prediction]:
        """Yield one prediction per image, in order. An unreadable image yields a Prediction with `error` set."""
        batch: list[tuple[str, Array | str]] = []
        for source in sources:
            try:
                batch.append((source_name(source), self.decode(source)))
            except ImageDecodeError as error:
                batch.append((source_name(source), error.what))
            if len(batch) == self.max_batch_size:
                yield from self._predict_batch(batch, top)
                batch = []
        yield from self._predict_batch(batch, top)

    def _predict_batch(self, batch: list[tuple[str, Array | str]], top: int | None) -> Iterator[Prediction]:
        readable = [pixels for _, pixels in batch if not isinstance(pixels, str)]
        if self.is_regression:
            values = self.logits(np.stack(readable))[1].tolist() if readable else []
            return assemble_values(batch, values, self.classes, "onnxruntime", self.prediction_intervals)
        rows: Iterable[tuple[list[float], bool]] = ()
        if readable:
            logits, probabilities = self.logits(np.stack(readable))
            rows = zip(probabilities.tolist(), self.is_ood(logits).tolist(), strict=True)
        return assemble_predictions(
            batch, rows, self.classes, top, "onnxruntime", self.prediction_sets, self.thresholds
        )
