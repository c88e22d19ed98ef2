"""Maps over their pictures, and several methods and classes side by side.

Every colour here is told apart by the colour-blind: matplotlib's perceptual maps, and blue against orange for a sign.
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
from vitral.explain.api import Explanation, Heat
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViTConfig
from vitral.reporting.figures.training import BLUE, GRAY, ORANGE, percent, save, shortened, show

Array = np.ndarray[Any, Any]
ColourMap = Literal["inferno", "viridis", "cividis", "magma"]
UNSEEN = 0.35  # of its light is left of what the model did not see
FOR, AGAINST = np.array(to_rgb(BLUE)), np.array(to_rgb(ORANGE))


def overlay(picture: Image.Image, heat: Heat, colours: ColourMap = "inferno") -> Image.Image:
    """The picture with the map over it; dark where the model did not see it. Blue speaks for, orange against."""
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float32) / 255
    seen = ~np.isnan(heat.shown)
    strength = np.nan_to_num(heat.shown).clip(-1, 1)
    lit = tinted(pixels, strength) if heat.method.signed else glowing(pixels, strength, colours)
    laid: Array = np.where(seen[..., None], lit, UNSEEN * pixels)
    return Image.fromarray((laid.clip(0, 1) * 255).round().astype(np.uint8))


def glowing(pixels_hw3: Array, strength_hw: Array, colours: ColourMap) -> Array:
    """The picture, darker, with the map's light added as by a second lamp: what lies under it stays visible."""
    glow = colormaps[colours](0.15 + 0.75 * strength_hw)[..., :3] * (1.5 * strength_hw[..., None]).clip(0, 1)
    lit: Array = 1 - (1 - 0.6 * pixels_hw3) * (1 - 0.9 * glow)
    return lit


def tinted(pixels_hw3: Array, strength_hw: Array) -> Array:
    """The picture in gray, with blue laid over what speaks for the class and orange over what speaks against it."""
    gray = 0.25 + 0.6 * (pixels_hw3 @ np.array([0.299, 0.587, 0.114]))[..., None]
    colour = np.where(strength_hw[..., None] > 0, FOR, AGAINST)
    cover = 0.85 * np.abs(strength_hw[..., None])
    lit: Array = gray * (1 - cover) + colour * cover
    return lit


def sheet(explanation: Explanation, path: Path, colours: ColourMap = "inferno") -> Path:
    """A row a class, a column a method, the picture itself in front. A map that knows no class is drawn once."""
    rows = by_class(explanation.heats)
    names = [heat.method.name for heat in rows[0]]
    w, h = explanation.picture.size
    side, gap = 2.4, 0.45  # inches: across a picture, above it
    tall = side * h / w
    height = len(rows) * (tall + gap) + 0.3
    figure = Figure(figsize=((len(names) + 1) * (side + 0.1), height))
    figure.subplots_adjust(left=0, right=1, bottom=0.3 / height, top=1 - gap / height, wspace=0.04, hspace=gap / tall)
    grid = figure.subplots(len(rows), len(names) + 1, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    answer = explanation.answer[0]
    for row, heats in zip(grid, rows, strict=True):
        label = heats[0].label
        show(row[0], np.asarray(explanation.picture))
        asked = f"{shortened(label.name, 20)} · {percent(label.probability)}"
        colour = BLUE if label.name == answer.name else GRAY
        row[0].set_title(asked, fontsize=11, loc="left", color=colour, weight="bold", parse_math=False)
        for axes, heat in zip(row[1:], heats, strict=True):
            if heat.method.by_class or heats is rows[0]:
                show(axes, np.asarray(overlay(explanation.picture, heat, colours)))
                alike = "" if heat.method.by_class or len(rows) == 1 else ", for any class"
                axes.set_title(heat.method.name + alike, fontsize=10, loc="left", color=GRAY)
    foot = "blue class: what the model says" if len(rows) > 1 else "what the model says, and how sure it is"
    if explanation.unknown:
        foot = "unsure: it looks like nothing the model was trained on"
    if any(heat.method.signed for heat in explanation.heats):
        foot += " · blue places speak for the class, orange ones against it"
    figure.text(0, 0, foot, fontsize=9, color=GRAY, va="bottom")
    return save(figure, path)


def by_class(heats: Sequence[Heat]) -> list[list[Heat]]:
    """One list a class, in the order asked for."""
    rows: list[list[Heat]] = []
    for heat in heats:
        if not rows or rows[-1][0].label is not heat.label:
            rows.append([])
        rows[-1].append(heat)
    return rows


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────


def stems(files: Sequence[Path]) -> list[str]:
    """A name for each file's pictures: its own, with a number where several have the same."""
    seen: dict[str, int] = {}
    names = []
    for file in files:
        seen[file.stem] = seen.get(file.stem, 0) + 1
        names.append(file.stem if seen[file.stem] == 1 else f"{file.stem}-{seen[file.stem]}")
    return names


def write(
    explanation: Explanation, folder: Path, stem: str, colours: ColourMap = "inferno", *, each: bool, npy: bool
) -> list[Path]:
    """The sheet, then what else was asked for; returns the files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [sheet(explanation, folder / f"{stem}.png", colours)]
        for heat in explanation.heats:
            name = re.sub(r"[^\w.-]+", "_", f"{stem}-{heat.method.name}-{heat.label.name}")
            if each:
                written.append(folder / f"{name}.png")
                overlay(explanation.picture, heat, colours).save(written[-1])
            if npy:
                written.append(folder / f"{name}.npy")
                np.save(written[-1], heat.values)
    except OSError as error:
        raise VitralError(f"cannot write into {folder}: {error.strerror or error}", "choose another --out") from error
    return written


def as_dict(explanation: Explanation, predictor: Predictor, files: Sequence[Path]) -> dict[str, Any]:
    """For programs: the answer, and each map as the mean over each patch, rows from the top."""
    config = predictor.model.config
    return {
        "file": explanation.source,
        "answer": [{"label": label.name, "probability": label.probability} for label in explanation.answer[:5]],
        "unknown": explanation.unknown,
        "crop": list(explanation.crop),
        "size": list(explanation.picture.size),
        "maps": [
            {
                "method": heat.method.name,
                "class": heat.label.name,
                "probability": heat.label.probability,
                "unit": heat.method.unit,
                "patches": patches(heat, config),
            }
            for heat in explanation.heats
        ],
        "files": [str(file) for file in files],
    }


def patches(heat: Heat, config: ViTConfig) -> list[list[float]]:
    (rows, columns), P, margin = config.grid, config.patch_size, config.margin_of(*config.image_size)
    values = heat.values[margin : margin + rows * P, margin : margin + columns * P]
    cells = values.reshape(rows, P, columns, P)
    means: list[list[float]] = cells.mean(axis=(1, 3)).tolist()
    return means
