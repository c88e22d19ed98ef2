"""Real images for a model to be measured with: of its own validation split, of another set, or of any folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitral.data.decode import NotAnImage, decode, image_files
from vitral.data.preprocess import adapt
from vitral.data.resize_crop import MODES
from vitral.errors import VitralError
from vitral.evaluation.evaluate import images_of, learned_from, recipe_of, spread
from vitral.inference.predictor import Predictor


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """uint8 images as the model wants them. Labels, its own class numbers, where they are known."""

    name: str
    images: Tensor
    originals: Sequence[Tensor]  # uint8, C H W, before they were scaled and cropped
    labels: Tensor | None

    def __len__(self) -> int:
        return len(self.images)

    def halves(self) -> tuple[Sample, Sample]:
        """Every other image: to learn from, and to compare on."""
        return self._every(0), self._every(1)

    def _every(self, start: int) -> Sample:
        labels = None if self.labels is None else self.labels[start::2]
        return Sample(name=self.name, images=self.images[start::2], originals=self.originals[start::2], labels=labels)


def sample(predictor: Predictor, data: str | None, count: int) -> Sample:
    """At most `count` images of `data`, or validation images of what the model was trained on, spread over all. Where
    none were held out, training images without their labels: it knows those by heart."""
    if count < 2:
        raise VitralError(f"--images must be at least 2, not {count}", "half to learn from, half to compare on")
    name = data or learned_from(predictor)
    place = Path(name)
    if place.is_dir() and not any(p.is_dir() and not p.name.startswith(".") for p in place.iterdir()):
        return _flat(predictor, place, count)
    try:
        dataset = images_of(name, predictor, recipe_of(predictor))
    except VitralError as error:
        hint = error.hint if data else "name a set or a folder with --data"
        raise VitralError(f"no images to measure with: {error.what}", hint) from error
    held_out = len(dataset.validation) > 0
    split = dataset.validation if held_out else dataset.train
    order = spread(len(split), count)
    stored = split.images[order]
    images = adapt(stored, predictor.card.preprocessing)
    originals = stored.expand(-1, images.shape[1], -1, -1).unbind(0) if stored.shape[1] == 1 else stored.unbind(0)
    known = (held_out or data is not None) and {*dataset.classes} <= {*predictor.classes}
    by_name = torch.tensor([predictor.classes.index(c) for c in dataset.classes]) if known else None
    labels = None if by_name is None else by_name[split.labels[order]]
    return Sample(name=dataset.name, images=images, originals=originals, labels=labels)


def _flat(predictor: Predictor, folder: Path, count: int) -> Sample:
    files, pixels, originals, wanted = image_files([folder]), [], [], predictor.card.preprocessing
    for index in spread(len(files), count).tolist():
        try:
            picture = decode(files[index]).convert(MODES[wanted.channels])
        except NotAnImage:
            continue
        pixels.append(wanted.pixels(picture))
        array = np.array(picture).reshape(picture.height, picture.width, wanted.channels)
        originals.append(torch.from_numpy(array).permute(2, 0, 1))
    if not pixels:
        raise VitralError(f"no readable images in {folder}", "JPEG, PNG, WebP, BMP, GIF and TIFF are read")
    return Sample(name=str(folder), images=torch.stack(pixels), originals=originals, labels=None)
