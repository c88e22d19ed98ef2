"""Heatmap overlays, and sheets with several methods and classes next to each other.

All colours are distinguishable with colour blindness: perceptual colour maps, and blue and orange for signed values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from vitral.errors import VitralError
from vitral.explain.api import Explanation, Heatmap
from vitral.inference.prediction import Label, TargetValue, target_value_to_dict
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViTConfig
from vitral.reporting.figures.images import blend_light, draw_image
from vitral.reporting.figures.style import BLUE, GRAY, ORANGE, Array, format_percent, save, shorten

Colormap = Literal["inferno", "viridis", "cividis", "magma"]
OUTSIDE_CROP_BRIGHTNESS = 0.35
POSITIVE_COLOUR, NEGATIVE_COLOUR = np.array(to_rgb(BLUE)), np.array(to_rgb(ORANGE))


def render_heatmap(image: Image.Image, heat: Heatmap, colormap: Colormap = "inferno") -> Image.Image:
    """Blend a heatmap over its image. Pixels outside the model's crop are darkened."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32) / 255
    in_crop = ~np.isnan(heat.display)
    strength = np.nan_to_num(heat.display).clip(-1, 1)
    if heat.method.is_signed:
        blended = blend_signed(pixels, strength)
    else:
        blended = blend_light(pixels, colormaps[colormap](0.15 + 0.75 * strength), strength)
    result: Array = np.where(in_crop[..., None], blended, OUTSIDE_CROP_BRIGHTNESS * pixels)
    return Image.fromarray((result.clip(0, 1) * 255).round().astype(np.uint8))


def blend_signed(pixels_hw3: Array, strength_hw: Array) -> Array:
    """The greyscale image with evidence for the class in blue and evidence against it in orange."""
    gray = 0.25 + 0.6 * (pixels_hw3 @ np.array([0.299, 0.587, 0.114]))[..., None]
    colour = np.where(strength_hw[..., None] > 0, POSITIVE_COLOUR, NEGATIVE_COLOUR)
    opacity = 0.85 * np.abs(strength_hw[..., None])
    blended: Array = gray * (1 - opacity) + colour * opacity
    return blended


def plot_explanation(explanation: Explanation, path: Path, colormap: Colormap = "inferno") -> Path:
    """One row per class and one column per method, after the image. A method without target class repeats its map."""
    rows = group_by_class(explanation.heatmaps)
    num_columns = len(rows[0]) + 1
    w, h = explanation.image.size
    image_width, title_height = 2.4, 0.45  # inches
    image_height = image_width * h / w
    height = len(rows) * (image_height + title_height) + 0.3
    figure = Figure(figsize=(num_columns * (image_width + 0.1), height))
    figure.subplots_adjust(
        left=0,
        right=1,
        bottom=0.3 / height,
        top=1 - title_height / height,
        wspace=0.04,
        hspace=title_height / image_height,
    )
    grid = figure.subplots(len(rows), num_columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for row_axes, heats in zip(grid, rows, strict=True):
        label = heats[0].label
        draw_image(row_axes[0], np.asarray(explanation.image))
        if label is None:
            title, colour = "", BLUE
        elif isinstance(label, TargetValue):
            title, colour = f"{shorten(label.name, 20)} {label.value:.4g}", BLUE
        else:
            title = f"{shorten(label.name, 20)} ({format_percent(label.probability)})"
            colour = BLUE if label.name == explanation.prediction[0].name else GRAY
        row_axes[0].set_title(title, fontsize=11, loc="left", color=colour, weight="bold", parse_math=False)
        for axes, heat in zip(row_axes[1:], heats, strict=True):
            draw_image(axes, np.asarray(render_heatmap(explanation.image, heat, colormap)))
            note = "" if heat.method.is_class_specific or len(rows) == 1 else " (same for all classes)"
            axes.set_title(heat.method.name + note, fontsize=10, loc="left", color=GRAY)
    figure.text(0, 0, footnote(explanation, len(rows)), fontsize=9, color=GRAY, va="bottom")
    return save(figure, path)


def footnote(explanation: Explanation, num_classes: int) -> str:
    """What the titles and colours of a figure mean."""
    if num_classes > 1:
        text = "blue: predicted class"
    else:
        is_predicted = explanation.heatmaps[0].label in explanation.prediction[:1]
        text = f"{'predicted' if is_predicted else 'requested'} class and probability"
    if explanation.values:
        text = "target and predicted value"
    elif not explanation.prediction:
        text = "what the features depend on; the model has no classifier"
    if explanation.is_ood:
        text = "unknown image: unlike anything in the training set"
    if any(heat.method.is_signed for heat in explanation.heatmaps):
        text += " · blue areas are evidence for the class, orange areas against it"
    return text


def group_by_class(heats: Sequence[Heatmap]) -> list[list[Heatmap]]:
    """One list per class, in the requested order."""
    rows: list[list[Heatmap]] = []
    for heat in heats:
        if not rows or rows[-1][0].label != heat.label:
            rows.append([])
        rows[-1].append(heat)
    return rows


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────


def unique_stems(files: Sequence[Path]) -> list[str]:
    """A distinct output name per file: its stem, with a number if several files share it."""
    counts: dict[str, int] = {}
    names = []
    for file in files:
        counts[file.stem] = counts.get(file.stem, 0) + 1
        names.append(file.stem if counts[file.stem] == 1 else f"{file.stem}-{counts[file.stem]}")
    return names


def write_explanation(
    explanation: Explanation, folder: Path, stem: str, colormap: Colormap = "inferno", *, overlays: bool, npy: bool
) -> list[Path]:
    """Write the sheet and, on request, one overlay and one array per heatmap; returns the files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [plot_explanation(explanation, folder / f"{stem}.png", colormap)]
        for heat in explanation.heatmaps:
            target = "features" if heat.label is None else heat.label.name
            name = re.sub(r"[^\w.-]+", "_", f"{stem}-{heat.method.name}-{target}")
            if overlays:
                written.append(folder / f"{name}.png")
                render_heatmap(explanation.image, heat, colormap).save(written[-1])
            if npy:
                written.append(folder / f"{name}.npy")
                np.save(written[-1], heat.values)
    except OSError as error:
        raise VitralError(f"cannot write to {folder}: {error.strerror or error}", "Choose another --out") from error
    return written


def explanation_to_dict(explanation: Explanation, predictor: Predictor, files: Sequence[Path]) -> dict[str, Any]:
    """JSON form: the prediction, and each heatmap as its mean per patch, rows from the top."""
    config = predictor.model.config
    labels = [{"name": label.name, "probability": label.probability} for label in explanation.prediction[:5]]
    values = [target_value_to_dict(value) for value in explanation.values]
    return {
        "file": explanation.source,
        **({"values": values} if values else {"labels": labels, "ood": explanation.is_ood}),
        "crop": list(explanation.crop),
        "size": list(explanation.image.size),
        "heatmaps": [
            {
                "method": heat.method.name,
                **_target_to_dict(heat.label),
                "unit": heat.method.unit,
                "patches": patch_means(heat, config),
            }
            for heat in explanation.heatmaps
        ],
        "files": [str(file) for file in files],
    }


def _target_to_dict(label: Label | TargetValue | None) -> dict[str, Any]:
    if isinstance(label, TargetValue):
        return {"target": label.name, "value": label.value}
    return {} if label is None else {"class": label.name, "probability": label.probability}


def patch_means(heat: Heatmap, config: ViTConfig) -> list[list[float]]:
    H, W = heat.values.shape  # of native images not that of the configuration
    (rows, columns), P, margin = config.grid_for(H, W), config.patch_size, config.margin_for(H, W)
    values = heat.values[margin : margin + rows * P, margin : margin + columns * P]
    means: list[list[float]] = values.reshape(rows, P, columns, P).mean(axis=(1, 3)).tolist()
    return means
