"""Colours and helpers shared by all figures.

Reports use them without a figure, so the slow parts of matplotlib (0.2 s) are imported on use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from vitral.utils.atomic import atomic_writer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Distinguishable with all common forms of colour blindness (Okabe and Ito).
BLUE, ORANGE, GREEN, PINK, YELLOW = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
GRAY, PALE_GRAY, PALE_BLUE = "#6B7280", "#D5DBE3", "#9DB8CC"
ERROR_COLOURS = LinearSegmentedColormap.from_list("errors", ["white", "#FDD0A2", "#F16913", "#8C2D04"])

Array = np.ndarray[Any, Any]


def save(figure: Figure, path: Path) -> Path:
    from vitral.reporting.figures.fonts import add_fallback_fonts, suppress_font_warnings

    add_fallback_fonts(figure)
    with suppress_font_warnings(), atomic_writer(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or "png", dpi=130, bbox_inches="tight")
    return path


def style_axes(axes: Axes, grid_axis: str = "both") -> None:
    axes.grid(alpha=0.3, axis=grid_axis)  # type: ignore[arg-type]
    axes.spines[["top", "right"]].set_visible(False)


def format_percent(fraction: float) -> str:
    """One decimal. Never rounds to 100% or 0% unless the value is exactly 1 or 0."""
    return "> 99.9%" if 0.9995 <= fraction < 1 else "< 0.1%" if 0 < fraction < 0.0005 else f"{fraction:.1%}"


def shorten(name: str, max_length: int) -> str:
    return name if len(name) <= max_length else name[: max_length - 1] + "…"
