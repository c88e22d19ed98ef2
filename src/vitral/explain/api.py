"""Pictures explained as a whole: decoded, shown to the model, and the maps laid back where they belong.

Shapes:  H, W pixels of what the model saw   h, w pixels of the picture
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.data.sequence import picture_of
from vitral.errors import VitralError, unknown
from vitral.explain.method import Method, scaled
from vitral.explain.registry import DEFAULT, METHODS
from vitral.inference.predictor import Label, Picture, Predictor
from vitral.weights.files import EXPORTED

MOST_SIDE = 1024  # pixels of the longer side that a map is laid onto: it has no more detail than the model saw

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Heat:
    """One map: how much each pixel mattered for `label`, by one method."""

    method: Method
    label: Label  # the class that was asked about, and the model's probability for it
    values: Array  # H W, float32, in the method's unit: on what the model saw
    placed: Array  # h w, float32, the same on the whole picture; NaN where the model did not look (outside its crop)

    shown: Array  # `placed` for drawing: 0…1, or -1…1 for a method whose maps have a sign; NaN outside the crop


@dataclass(frozen=True, kw_only=True, eq=False)
class Explanation:
    """One picture, what the model says of it, and a map for each class and method that was asked for."""

    source: str
    picture: Image.Image  # upright, RGB, its longer side at most MOST_SIDE
    crop: tuple[int, int, int, int]  # left, top, right, bottom of what the model saw, in pixels of `picture`
    answer: tuple[Label, ...]  # most probable first
    unknown: bool  # it looks like nothing the model was trained on
    heats: tuple[Heat, ...]  # class by class, in each the methods in the order asked for


def open_to_look_inside(path: Path | str, labels: Path | None = None) -> Predictor:
    """A model with its weights; an exported one is refused."""
    if Path(path).suffix.lower() in EXPORTED:
        raise VitralError(
            f"{path} is an exported model: it gives answers, but has neither attention nor gradients to look at",
            "give the run it was exported from",
        )
    return Predictor.load(path, labels=labels)


def explain(
    predictor: Predictor,
    picture: Picture,
    methods: Sequence[str] = DEFAULT,
    targets: Sequence[str | int] = (),
    options: Mapping[str, Any] | None = None,
) -> Explanation:
    """Maps of `methods` for the classes `targets`: names or indices; none: the class that the model says.

    `options` (layer, head, residual, fusion, …) go to those methods that have them; one that none has is refused.
    """
    asked = [find_method(name) for name in methods]
    given = dict(options or {})
    for name in given:
        if not any(name in method.options for method in asked):
            known = sorted({option for method in asked for option in method.options})
            raise unknown(f"option of {', '.join(m.name for m in asked)}", name, known)
    original = picture_of(picture)
    preprocessing = predictor.card.preprocessing
    pixels_CHW = preprocessing.pixels(original)
    image_CHW = preprocessing.normalise(pixels_CHW[None].to(predictor.hardware.device))[0]
    logits, calibration = predictor.logits(pixels_CHW[None]), predictor.card.calibration
    chances = calibration.probabilities(logits)[0].tolist()
    strange = bool(calibration.unknown(logits))
    labels = [Label(name=name, probability=p) for name, p in zip(predictor.classes, chances, strict=True)]
    ranked = sorted(labels, key=lambda label: -label.probability)
    classes = [find_class(predictor, target) for target in targets] or [chances.index(max(chances))]
    laid_on = original.convert("RGB")
    laid_on.thumbnail((MOST_SIDE, MOST_SIDE))
    heats = []
    for index in classes:
        for method in asked:
            own = {name: value for name, value in given.items() if name in method.options}
            values = method(predictor.model, image_CHW, index, **own)
            drawn = scaled(
                smoothed(values, predictor.model.config.patch_size) if method.fine else values, method.signed
            )
            placed, shown = (
                place(heat.cpu().numpy(), preprocessing, original.size, laid_on.size) for heat in (values, drawn)
            )
            heat = Heat(method=method, label=labels[index], values=values.cpu().numpy(), placed=placed, shown=shown)
            heats.append(heat)
    name = "image" if isinstance(picture, bytes | Image.Image) else str(picture)
    crop = crop_box(preprocessing, original.size, laid_on.size)
    return Explanation(
        source=name, picture=laid_on, crop=crop, answer=tuple(ranked), unknown=strange, heats=tuple(heats)
    )


def smoothed(heat_HW: Tensor, patch_size: int) -> Tensor:
    """For drawing what is salt and pepper pixel by pixel: the mean over about half a patch, twice."""
    side = patch_size // 4 * 2 + 1
    for _ in range(2):
        padded = F.pad(heat_HW[None, None], (side // 2,) * 4, mode="replicate")
        heat_HW = F.avg_pool2d(padded, side, stride=1)[0, 0]
    return heat_HW


def find_method(name: str) -> Method:
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


def find_class(predictor: Predictor, target: str | int) -> int:
    """Its index, from its name or its index; a class called '7' is meant before the seventh."""
    names = predictor.classes
    if target in names:
        return names.index(str(target))
    lower = [name.lower() for name in names]
    if lower.count(str(target).lower()) == 1:
        return lower.index(str(target).lower())
    parts = [[part.strip() for part in name.lower().split(",")] for name in names]  # ImageNet: "tench, Tinca tinca"
    found = [index for index, synonyms in enumerate(parts) if str(target).lower() in synonyms]
    if len(found) == 1:
        return found[0]
    if str(target).isdigit() and int(target) < len(names):
        return int(target)
    few = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    error = unknown("class", str(target), names)
    raise VitralError(error.what, f"The model knows {few}")


def crop_box(preprocessing: Preprocessing, size: tuple[int, int], on: tuple[int, int]) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of what the model saw of a picture of `size` (width, height), on one scaled to `on`."""
    w, h = size
    scaled_H, scaled_W, top, left = preprocessing.placed(h, w)
    H, W = preprocessing.image_size
    across, down = on[0] / scaled_W, on[1] / scaled_H
    x0, y0 = round(left * across), round(top * down)
    return x0, y0, max(round((left + W) * across), x0 + 1), max(round((top + H) * down), y0 + 1)


def place(values_HW: Array, preprocessing: Preprocessing, size: tuple[int, int], on: tuple[int, int]) -> Array:
    """The map where it belongs on the picture: scaling and cropping undone, NaN outside."""
    x0, y0, x1, y1 = crop_box(preprocessing, size, on)
    fitted = Image.fromarray(values_HW.astype(np.float32)).resize((x1 - x0, y1 - y0), Image.Resampling.BILINEAR)
    canvas: Array = np.full((on[1], on[0]), np.nan, dtype=np.float32)
    inside = canvas[y0:y1, x0:x1]
    inside[:] = np.asarray(fitted)[: inside.shape[0], : inside.shape[1]]
    return canvas
