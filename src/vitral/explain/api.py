"""Explain an image: decode it, compute heatmaps, and project them back onto the original image.

Shapes:  H, W pixels of the model input   h, w pixels of the displayed image
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

from vitral.data.decode import decode_pixels
from vitral.data.pixels import to_display
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError, truncate_list, unknown_name_error
from vitral.explain.method import Method, rescale_for_display
from vitral.explain.registry import DEFAULT, METHODS
from vitral.inference.prediction import Label, TargetValue, rank_labels, target_values
from vitral.inference.predictor import ImageInput, Predictor
from vitral.recipes.checkpoint_options import NO_OPTIONS, CheckpointOptions
from vitral.weights.files import EXPORT_SUFFIXES

MAX_OVERLAY_SIDE = 1024  # pixels of the longer side of the displayed image; heatmaps have no more detail

Array = np.ndarray[Any, Any]
Size = tuple[int, int]  # width, height


@dataclass(frozen=True, kw_only=True, eq=False)
class Heatmap:
    """Importance of each pixel for `label` by one method."""

    method: Method
    label: Label | TargetValue | None  # the target class, or the target of a regression; None: features, no classifier
    values: Array  # (H, W) float32 in the method's unit, on the model input
    on_image: Array  # (h, w) float32, the same on the displayed image; NaN outside the crop
    display: Array  # `on_image` scaled for display: [0, 1], or [-1, 1] for signed methods; NaN outside the crop


@dataclass(frozen=True, kw_only=True, eq=False)
class Explanation:
    """An image, its prediction, and one heatmap per requested class and method."""

    source: str
    image: Image.Image  # upright, RGB, longer side at most MAX_OVERLAY_SIDE
    crop: tuple[int, int, int, int]  # left, top, right, bottom of the model input in pixels of `image`
    prediction: tuple[Label, ...]  # most probable first; empty for a regression and for a model without a classifier
    is_ood: bool  # out of distribution: unlike the training images
    heatmaps: tuple[Heatmap, ...]  # by class, then by method
    values: tuple[TargetValue, ...] = ()  # of a regression, which has no prediction in classes

    def save(self, path: str | Path) -> Path:
        """Draw all heatmaps over the image, as `vitral explain` does, and write the picture."""
        from vitral.reporting.figures.heatmaps import plot_explanation

        return plot_explanation(self, Path(path))


def load_explainable(
    path: Path | str, labels: Path | None = None, options: CheckpointOptions = NO_OPTIONS
) -> Predictor:
    """Load a model for explanation; exported models have neither attention nor gradients and are refused."""
    if Path(path).suffix.lower() in EXPORT_SUFFIXES:
        raise VitralError(
            f"{path} is an exported model, which has neither attention nor gradients",
            "Use the run it was exported from",
        )
    return Predictor.load(path, labels=labels, options=options)


def explain(
    predictor: Predictor,
    image: ImageInput,
    methods: str | Sequence[str] = DEFAULT,
    targets: str | int | Sequence[str | int] = (),
    options: Mapping[str, Any] | None = None,
) -> Explanation:
    """Compute heatmaps that explain the prediction for an image.

    For a model without a classifier they explain the features, by the methods that do not depend on a class.

    Args:
        predictor: The model.
        image: A file, bytes, PIL image, array or tensor.
        methods: One or several names from `METHODS`.
        targets: One or several class names or indices; without any, the predicted class. For a regression, names of
            targets; without any, the first one.
        options: Options such as `layer`, `head` or `fusion`, passed to the methods that have them.

    Examples:
        >>> explanation = vitral.explain.explain(vitral.load("mnist"), "photo.png", ["relevance", "rollout"])
        >>> path = explanation.save("explained.png")
    """
    selected = select_methods(predictor, [methods] if isinstance(methods, str) else methods)
    targets = [targets] if isinstance(targets, str | int) else targets
    option_values = dict(options or {})
    for name in option_values:
        if not any(name in method.options for method in selected):
            available = sorted({option for method in selected for option in method.options})
            raise unknown_name_error(f"option of {', '.join(m.name for m in selected)}", name, available)
    preprocessing = predictor.model_config.preprocessing
    original = decode_pixels(image, preprocessing.pixel_format)
    pixels_CHW = preprocessing.resize_and_crop(original)
    labels, values, is_ood = _predict(predictor, predictor.logits(pixels_CHW[None]))
    by_name = {label.name: label for label in labels or values}
    first = predictor.classes.index(labels[0].name) if labels else 0
    classes = [class_index(predictor, target) for target in targets] or [first]
    overlay_image = to_display(original).convert("RGB")
    overlay_image.thumbnail((MAX_OVERLAY_SIDE, MAX_OVERLAY_SIDE))
    heatmaps = [
        compute_heatmap(
            predictor,
            pixels_CHW,
            method,
            index,
            label=by_name.get(predictor.classes[index]),
            options={name: value for name, value in option_values.items() if name in method.options},
            size=original.size,
            target_size=overlay_image.size,
        )
        for index in classes
        for method in selected
    ]
    return Explanation(
        source=str(image) if isinstance(image, str | Path) else "image",
        image=overlay_image,
        crop=crop_box(predictor.model_config.preprocessing, original.size, overlay_image.size),
        prediction=labels,
        is_ood=is_ood,
        heatmaps=tuple(heatmaps),
        values=values,
    )


def _predict(predictor: Predictor, logits_1K: Tensor) -> tuple[tuple[Label, ...], tuple[TargetValue, ...], bool]:
    """Ranked labels of one image, or the values of a regression, and whether it is out of distribution."""
    if not predictor.has_head:
        return (), (), False
    if predictor.is_regression:
        intervals = predictor.model_config.calibration.prediction_intervals
        return (), target_values(predictor.classes, predictor.to_units(logits_1K)[0].tolist(), intervals), False
    probabilities, is_ood = next(predictor.calibrated_rows(logits_1K))
    return rank_labels(predictor.classes, probabilities, None, predictor.model_config.thresholds), (), is_ood


def compute_heatmap(
    predictor: Predictor,
    pixels_CHW: Tensor,
    method: Method,
    target: int,
    *,
    label: Label | TargetValue | None,
    options: Mapping[str, Any],
    size: Size,
    target_size: Size,
) -> Heatmap:
    """The heatmap of one method for one class, on the model input and on the displayed image."""
    preprocessing = predictor.model_config.preprocessing
    image_CHW = preprocessing.normalise(pixels_CHW[None].to(predictor.hardware.device))[0]
    values = method(predictor.model, image_CHW, target, **options)
    smooth = smooth_for_display(values, predictor.model.config.patch_size) if method.is_pixelwise else values
    on_image, display = (
        project_to_image(heat.cpu().numpy(), preprocessing, size, target_size)
        for heat in (values, rescale_for_display(smooth, method.is_signed))
    )
    return Heatmap(method=method, label=label, values=values.cpu().numpy(), on_image=on_image, display=display)


def smooth_for_display(heat_HW: Tensor, patch_size: int) -> Tensor:
    """Smooth pixel-wise heatmaps for display: twice the mean over about half a patch."""
    side = patch_size // 4 * 2 + 1
    for _ in range(2):
        padded = F.pad(heat_HW[None, None], (side // 2,) * 4, mode="replicate")
        heat_HW = F.avg_pool2d(padded, side, stride=1)[0, 0]
    return heat_HW


def select_methods(predictor: Predictor, names: Sequence[str]) -> list[Method]:
    """Methods by name. Of the default ones, a model without a classifier has those that do not depend on a class."""
    methods = [find_method(name) for name in names]
    if predictor.has_head:
        return methods
    if tuple(names) == DEFAULT:
        return [method for method in methods if not method.is_class_specific]
    for method in methods:
        if method.is_class_specific:
            general = [name for name, other in METHODS.items() if not other.is_class_specific]
            raise VitralError(
                f"{method.name} explains the logit of a class, but the model has no classifier",
                f"Methods that explain its features: {', '.join(general)}",
            )
    return methods


def find_method(name: str) -> Method:
    if name not in METHODS:
        raise unknown_name_error("method", name, METHODS)
    return METHODS[name]


def class_index(predictor: Predictor, target: str | int) -> int:
    """Class index from a name or an index. A class named '7' takes precedence over index 7."""
    predictor.require_head()
    names = predictor.classes
    if target in names:
        return names.index(str(target))
    lower = [name.lower() for name in names]
    if lower.count(str(target).lower()) == 1:
        return lower.index(str(target).lower())
    # ImageNet names contain synonyms: "tench, Tinca tinca".
    synonyms_of = [[part.strip() for part in name.lower().split(",")] for name in names]
    matches = [index for index, synonyms in enumerate(synonyms_of) if str(target).lower() in synonyms]
    if len(matches) == 1:
        return matches[0]
    if str(target).isdigit() and int(target) < len(names):
        return int(target)
    kind, plural = ("target", "Targets") if predictor.is_regression else ("class", "Classes")
    error = unknown_name_error(kind, str(target), names)
    raise VitralError(error.what, f"{plural} of the model: {truncate_list(names, 8)}")


def crop_box(preprocessing: Preprocessing, size: Size, target_size: Size) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of the part of an image of `size` that the model sees, scaled to `target_size`."""
    geometry = preprocessing.geometry(size[1], size[0])
    y_start, x_start, y_end, x_end = geometry.content  # of the model input, without padding
    across, down = target_size[0] / geometry.resized[1], target_size[1] / geometry.resized[0]
    x0, y0 = round((geometry.left + x_start) * across), round((geometry.top + y_start) * down)
    x1, y1 = round((geometry.left + x_end) * across), round((geometry.top + y_end) * down)
    return x0, y0, max(x1, x0 + 1), max(y1, y0 + 1)


def project_to_image(values_HW: Array, preprocessing: Preprocessing, size: Size, target_size: Size) -> Array:
    """Undo resizing, cropping and padding of a heatmap; NaN outside the crop."""
    x0, y0, x1, y1 = crop_box(preprocessing, size, target_size)
    top, left, bottom, right = preprocessing.geometry(size[1], size[0]).content
    content = Image.fromarray(values_HW[top:bottom, left:right].astype(np.float32))
    resized = content.resize((x1 - x0, y1 - y0), Image.Resampling.BILINEAR)
    canvas: Array = np.full((target_size[1], target_size[0]), np.nan, dtype=np.float32)
    inside = canvas[y0:y1, x0:x1]
    inside[:] = np.asarray(resized)[: inside.shape[0], : inside.shape[1]]
    return canvas
