"""An exported model, asked without torch: numpy, Pillow and ONNX Runtime are enough.

    pip install --no-deps vitral && pip install numpy pillow onnxruntime
    vitral predict model.onnx photo.jpg

The file says everything: class names, preprocessing, calibration. Pictures are decoded and scaled by the same code as
everywhere in vitral.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from vitral.data import resize_crop as scale
from vitral.data.decode import NotAnImage, decode, image_files
from vitral.errors import VitralError, typed
from vitral.inference.prediction import Prediction, in_order, show

KEY = "vitral"  # of the entry in the file's metadata
FORMAT = 1
Array = np.ndarray[Any, Any]


class OnnxModel:
    """`OnnxModel("model.onnx").predict("photo.jpg").best`"""

    def __init__(self, path: Path | str, threads: int | None = None) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise VitralError("asking an ONNX file needs ONNX Runtime", "pip install onnxruntime") from error
        self.path = Path(path)
        if not self.path.is_file():
            raise VitralError(f"there is no file {path}", "vitral export RUN --to onnx writes one")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its exceptions share no base class
            raise VitralError(
                f"ONNX Runtime cannot read {path}: {str(error).splitlines()[0]}", "copy or export it again"
            ) from error
        self.about = self._about()
        self.classes: tuple[str, ...] = tuple(self.about["classes"])
        self.scales_itself = bool(self.about["preprocessing_inside"])
        self.most = 1 if self.scales_itself else 32  # pictures of different sizes cannot share a batch

    def _about(self) -> dict[str, Any]:
        said = self.session.get_modelmeta().custom_metadata_map.get(KEY)
        if said is None:
            raise VitralError(
                f"{self.path} was not written by vitral: it names no classes and no preprocessing",
                "vitral export RUN --to onnx writes one that does",
            )
        about: dict[str, Any] = json.loads(said)
        if about.get("format") != FORMAT:
            raise VitralError(
                f"{self.path} has format {about.get('format')}; this vitral reads {FORMAT}",
                "export it again, or: pip install --upgrade vitral",
            )
        return about

    def pixels(self, source: Any) -> Array:
        """A picture as the graph wants it: uint8, C H W."""
        picture, wanted = decode(source), self.about["preprocessing"]
        size = wanted["image_size"][0], wanted["image_size"][1]
        if self.scales_itself:
            array = np.asarray(picture.convert(scale.MODES[wanted["channels"]]))
            return array.reshape(*array.shape[:2], wanted["channels"]).transpose(2, 0, 1)
        return scale.pixels(picture, size, wanted["channels"], wanted["crop"], wanted["interpolation"])

    def logits(self, images_BCHW: Array) -> tuple[Array, Array]:
        """uint8 images → logits and calibrated probabilities, B K each."""
        images = np.ascontiguousarray(images_BCHW)
        logits, probabilities = self.session.run(["logits", "probabilities"], {"images": images})
        return logits, probabilities

    def unknown(self, logits_BK: Array) -> Array:
        """B booleans: whether the image looks like nothing the model was trained on."""
        said = self.about["calibration"]
        largest = logits_BK.max(axis=1)
        score = largest
        if said["score"] == "energy":
            score = largest + np.log(np.exp(logits_BK - largest[:, None]).sum(axis=1))
        least = said.get("unknown_below")
        return np.asarray(~(score >= (-math.inf if least is None else least)))

    def predict(self, source: Any, top: int | None = None) -> Prediction:
        answer = next(self.predict_many([source], top))
        if answer.error:
            raise NotAnImage(answer.error)
        return answer

    def predict_many(self, sources: Iterable[Any], top: int | None = None) -> Iterator[Prediction]:
        """An answer for each picture, in order. One that cannot be read gets an error and stops nothing."""
        waiting: list[tuple[str, Array | str]] = []
        for source in sources:
            name = str(source) if isinstance(source, str | Path) else "image"
            try:
                waiting.append((name, self.pixels(source)))
            except NotAnImage as error:
                waiting.append((name, error.what))
            if len(waiting) == self.most:
                yield from self._answer(waiting, top)
                waiting = []
        yield from self._answer(waiting, top)

    def _answer(self, waiting: list[tuple[str, Array | str]], top: int | None) -> Iterator[Prediction]:
        readable = [pixels for _, pixels in waiting if not isinstance(pixels, str)]
        rows: Iterable[tuple[list[float], bool]] = ()
        if readable:
            logits, probabilities = self.logits(np.stack(readable))
            rows = zip(probabilities.tolist(), self.unknown(logits).tolist(), strict=True)
        return in_order(waiting, rows, self.classes, top)


class Flags(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise VitralError(message, "vitral predict model.onnx --help lists the flags")


def main(words: Sequence[str]) -> int:
    """`vitral predict model.onnx FILES…`, with the flags of predict that make sense here."""
    parser = Flags(prog="vitral predict", description="Ranked labels from an exported model.")
    parser.add_argument("model", type=Path)
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE")
    parser.add_argument("--top", type=int, default=3, help="labels a picture (default 3)")
    parser.add_argument("--threads", type=int, help="of ONNX Runtime; default: one a core")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--csv", action="store_true", help="file, rank, label, probability, unknown, error")
    chosen = parser.parse_args(list(words))
    if chosen.top < 1:
        raise VitralError(f"--top must be at least 1, not {chosen.top}", "leave it out for 3")
    if not chosen.files:
        raise VitralError("which images?", f"vitral predict {typed(chosen.model)} photo.jpg folder/")
    files = image_files(chosen.files)
    if not files:
        raise VitralError(
            f"no images in {', '.join(map(str, chosen.files))}", "JPEG, PNG, WebP, BMP, GIF and TIFF are read"
        )
    model = OnnxModel(chosen.model, chosen.threads)
    form = "json" if chosen.json else "csv" if chosen.csv else "lines"
    return show(list(model.predict_many(files, chosen.top)), form)
