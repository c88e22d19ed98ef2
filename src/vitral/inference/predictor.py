"""Predictor: the one door from an image to ranked labels."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitral import bundled as box
from vitral import weights
from vitral.data.datasets import Split
from vitral.data.decode import NotAnImage, image_files
from vitral.data.lazy_images import Pixels
from vitral.data.preprocess import adapt
from vitral.data.sequence import picture_of
from vitral.device.hardware import Compile, Device, Hardware, Precision, choose, cores
from vitral.errors import VitralError, reason
from vitral.evaluation.metrics import Heard, Metrics, check_images, logits_of, logits_together, measure, unheard
from vitral.evaluation.probe import features_of
from vitral.inference.engine_selection import Choice, Wish, choose_on_gpu
from vitral.inference.engine_selection import choose as choose_numbers
from vitral.inference.prediction import Label as Label
from vitral.inference.prediction import Prediction as Prediction
from vitral.inference.prediction import in_order, ranked
from vitral.models.vit import ViT
from vitral.runs.run import ModelCard, check_heads, load_model, model_folder

Picture = str | Path | bytes | Image.Image | np.ndarray[Any, Any] | Tensor  # arrays: see data.sequence.picture_of
DARK_SET, LIGHT = 0.45, 0.6  # as the page has it: mean of dark training images, rim of a picture that is ink on paper


def is_checkpoint(path: Path | str) -> bool:
    """Whether a name means weights of some library, not a folder of vitral's own."""
    place = Path(path)
    ours = (place / "recipe.toml").is_file() or (place / "model").is_dir() or (place / "weights.safetensors").is_file()
    return str(path).startswith("hf:") or place.is_file() or (place.is_dir() and not ours and any(place.iterdir()))


def read_labels(path: Path, count: int) -> tuple[str, ...]:
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise VitralError(
            f"cannot read the labels in {path}: {reason(error)}", "a text file, one name a line"
        ) from error
    if len(names) != count:
        raise VitralError(
            f"{path} has {len(names)} names; the model has {count} classes",
            "one name a line, in the order of the classes",
        )
    return names


def _on_gpu(device: Device, wish: Wish, compile: Compile, many: bool) -> Hardware:
    number: Precision = wish if wish in ("fp32", "bf16", "fp8") else "auto"
    chosen = choose(device=device, precision=number, compile="auto" if many or number == "fp8" else compile)
    return replace(chosen, compile=False) if compile == "no" else chosen  # what our kernels cannot do stays as it is


class Predictor:
    """A trained model, with the preprocessing and the class names it was trained with."""

    def __init__(
        self, model: ViT, card: ModelCard, hardware: Hardware, path: Path | None = None, choice: Choice | None = None
    ) -> None:
        self.model, self.card, self.hardware, self.path = model.to(hardware.device).eval(), card, hardware, path
        self.notes: tuple[str, ...] = ()  # how its name, and a checkpoint of another library, were understood
        self.choice = choice or Choice(precision=hardware.precision, batch=64, why="the model as it is", run=None)

    @classmethod
    def load(
        cls,
        path: Path | str,
        device: Device = "auto",
        labels: Path | None = None,
        heads: int | None = None,
        precision: Wish = "auto",
        threads: int | None = None,
        compile: Compile = "no",
        many: bool = False,
    ) -> Predictor:
        """From a run folder, a model folder, any checkpoint that vitral reads, or the name of a model in the box.

        `labels`: a file, one name a line; `heads`: for a checkpoint whose tensors do not tell. `precision` and
        `threads` (of the whole process): what `vitral bench` found best on this machine, if it was asked;
        `Predictor.choice` says what was chosen and why. `compile` and `many`, on a GPU: a minute at the start for the
        compiler's kernels, or some seconds for our own, which answer sooner from then on.
        """
        place, notes = box.find(path), list(box.notes(path))
        if is_checkpoint(place):
            checkpoint = weights.read(place, heads=heads)
            notes = checkpoint.notes
            model, card, folder = checkpoint.build(), checkpoint.card, None
        else:
            model, card = load_model(place)
            check_heads(path, heads, card)
            folder = box.kept(model_folder(Path(place)))
        if labels is not None:
            card = replace(card, classes=read_labels(labels, card.architecture.classes))
        hardware = choose(device=device, precision="fp32", compile="no")
        if hardware.device.type == "cpu":
            choice = choose_numbers(model, card.preprocessing, folder, precision, threads)
        else:
            choice = choose_on_gpu(model, card.preprocessing, _on_gpu(device, precision, compile, many), precision)
        predictor = cls(model, card, hardware, Path(place), choice)
        predictor.notes = tuple(notes)
        return predictor

    def __repr__(self) -> str:
        H, W = self.card.preprocessing.image_size
        where = f"{str(self.path)!r}, " if self.path is not None else ""
        return f"Predictor({where}{len(self.classes)} classes, {H}×{W} pixels, trained on {self.card.trained_on!r})"

    @property
    def classes(self) -> tuple[str, ...]:
        return self.card.classes

    def predict(self, picture: Picture, top: int | None = None) -> Prediction:
        """The answer for one picture; what cannot be read is an error."""
        answer = next(iter(self.predict_many([picture], top=top)))
        if answer.error:
            raise NotAnImage(answer.error)
        return answer

    def predict_many(
        self, pictures: Iterable[Picture], top: int | None = None, batch: int = 64
    ) -> Iterable[Prediction]:
        """An answer for each picture, in order. One that cannot be read gets an error and stops nothing."""
        if top is not None and top < 1:
            raise VitralError(f"top must be at least 1, not {top}", "None: all labels")
        waiting: list[tuple[str, Tensor | str]] = []
        for picture in pictures:
            waiting.append(self.open(picture))
            if len(waiting) == batch:
                yield from self.answer(waiting, top)
                waiting = []
        yield from self.answer(waiting, top)

    def predict_files(self, paths: Sequence[Path | str], top: int | None = None) -> list[Prediction]:
        """Files, and the pictures in folders."""
        files = image_files([Path(path) for path in paths])
        if not files:
            raise VitralError(
                f"no images in {', '.join(map(str, paths))}", "JPEG, PNG, WebP, BMP, GIF and TIFF are read"
            )
        return list(self.predict_many(files, top=top))

    def embed_files(self, paths: Sequence[Path | str]) -> tuple[list[str], Tensor, list[str]]:
        """Names and features, N D, of the images that could be read, and what was wrong with the others."""
        names: list[str] = []
        features: list[Tensor] = []
        troubles: list[str] = []
        for opened in self.open_ahead(iter(image_files([Path(path) for path in paths]))):
            images = [pixels for _, pixels in opened if isinstance(pixels, Tensor)]
            names += [name for name, pixels in opened if isinstance(pixels, Tensor)]
            features += [self.features(torch.stack(images))] if images else []
            troubles += [pixels for _, pixels in opened if isinstance(pixels, str)]
        if not names:
            what = troubles[0] if len(troubles) == 1 else f"no readable images in {', '.join(map(str, paths))}"
            raise VitralError(what, "JPEG, PNG, WebP, BMP, GIF and TIFF are read")
        return names, torch.cat(features), troubles

    def features(self, images_NCHW: Pixels) -> Tensor:
        """What the head sees of uint8 images as the model wants them → N D."""
        return features_of(self.model, images_NCHW, self.card.preprocessing, self.hardware)

    @torch.inference_mode()
    def logits(self, images_BCHW: Pixels) -> Tensor:
        """uint8 images as the model wants them → B K, fp32. Threads may call it side by side."""
        check_images(images_BCHW, self.card.preprocessing)
        if self.choice.run is not None and len(images_BCHW):
            return torch.cat([self.choice.run(images) for images in images_BCHW.split(self.choice.batch)])
        return logits_of(self.model, images_BCHW, self.card.preprocessing, self.hardware).cpu()

    def logits_together(self, images_BCHW: Pixels, heard: Heard = unheard) -> Tensor:
        """The same from all processes that were started together, each computing its share; every one must ask."""
        seen = self.card.preprocessing
        return logits_together(self.model, images_BCHW, seen, self.hardware, heard=heard).cpu()

    def probabilities(self, images_BCHW: Pixels) -> Tensor:
        """uint8 images as the model wants them → calibrated, B K."""
        return self.card.calibration.probabilities(self.logits(images_BCHW))

    def evaluate(self, split: Split) -> Metrics:
        """Loss, accuracy, per-class figures and confusion on labelled images."""
        if not isinstance(split, Split):
            raise VitralError(
                f"evaluate takes labelled images, such as vitral.data.load('mnist').test, not {split!r}",
                "a set or folder by its name: vitral.evaluate(model, data=NAME)",
            )
        images = adapt(split.images, self.card.preprocessing)
        logits = self.logits(images)
        return measure(logits, split.labels, self.classes)

    def open(self, picture: Picture) -> tuple[str, Tensor | str]:
        """A name for the picture, with its pixels or with what is wrong with it."""
        name = str(picture) if isinstance(picture, str | Path) else "image"
        try:
            return name, self.card.preprocessing.pixels(picture_of(picture))
        except NotAnImage as error:
            return name, error.what

    def open_ahead(self, files: Iterator[Path]) -> Iterator[list[tuple[str, Tensor | str]]]:
        """Batch by batch. Threads decode ahead, a bounded number, while the model is busy: Pillow and torch let others
        run."""
        batch = max(self.choice.batch, 8)
        ahead: deque[Future[tuple[str, Tensor | str]]] = deque()
        with ThreadPoolExecutor(max(2, cores()), thread_name_prefix="decode") as pool:
            try:
                while True:
                    while len(ahead) < 4 * batch and (file := next(files, None)) is not None:
                        ahead.append(pool.submit(self.open, file))
                    if not ahead:
                        return
                    yield [ahead.popleft().result() for _ in range(min(batch, len(ahead)))]
            finally:
                for future in ahead:
                    future.cancel()

    def answer(self, waiting: list[tuple[str, Tensor | str]], top: int | None) -> Iterable[Prediction]:
        readable = [pixels for _, pixels in waiting if isinstance(pixels, Tensor)]
        images = torch.stack(readable) if readable else torch.empty(0, *self.card.preprocessing.shape).byte()
        logits = self.logits(images) if readable else torch.empty(0, len(self.classes))
        exchanged = iter(self.exchanged(images))
        for answer in in_order(waiting, self._rows(logits), self.classes, top):
            yield answer if answer.error else replace(answer, exchanged=next(exchanged))

    def exchanged(self, images_BCHW: Tensor) -> list[Label | None]:
        """What a gray model says of the negatives of pictures that are ink on paper where it learned chalk on slate, or
        the other way round. None for the others, and where it does not know the negative either."""
        found: list[Label | None] = [None] * len(images_BCHW)
        mean = self.card.preprocessing.mean
        if len(mean) > 1 or 1 - DARK_SET >= mean[0] >= DARK_SET:
            return found
        rims = rim(images_BCHW)
        turned = (rims > LIGHT if mean[0] < DARK_SET else rims < 1 - LIGHT).nonzero().flatten()
        if len(turned):
            rows = self._rows(self.logits(255 - images_BCHW[turned]))
            for index, (probabilities, unknown) in zip(turned.tolist(), rows, strict=True):
                found[index] = None if unknown else ranked(self.classes, probabilities, 1)[0]
        return found

    def _rows(self, logits_BK: Tensor) -> Iterator[tuple[list[float], bool]]:
        """Probabilities, and whether it is unknown, of each."""
        calibration = self.card.calibration
        return zip(calibration.probabilities(logits_BK).tolist(), calibration.unknown(logits_BK).tolist(), strict=True)


def rim(images_BCHW: Tensor) -> Tensor:
    """B numbers in 0…1: how light the outermost pixels are."""
    inside = images_BCHW[:, :, 1:-1, 1:-1]
    total, middle = (images.double().sum(dim=(1, 2, 3)) for images in (images_BCHW, inside))
    return (total - middle) / (255 * (images_BCHW.shape[1:].numel() - inside.shape[1:].numel()))
