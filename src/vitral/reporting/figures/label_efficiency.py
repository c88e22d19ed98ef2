"""Accuracy of two sets of initial weights against the number of labels."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from vitral.evaluation.label_efficiency import LabelEfficiency, LabelEfficiencyRow, Method
from vitral.evaluation.label_subsets import fraction_text
from vitral.reporting.figures.style import BLUE, ORANGE, save, shorten, style_axes
from vitral.utils.intervals import Interval

# Method -> marker, line style and horizontal shift, as a factor, so that intervals do not cover each other.
STYLES: dict[Method, tuple[str, str, float]] = {
    "fine-tuning": ("o", "-", 1.0),
    "linear": ("D", "--", 1.12),
    "nearest neighbours": ("s", "", 1.25),
}
NAMES: dict[Method, str] = {"fine-tuning": "fine-tuned", "linear": "linear", "nearest neighbours": "k-NN"}
SIDES: tuple[tuple[str, str, Callable[[LabelEfficiencyRow], Interval], float], ...] = (
    ("after", BLUE, lambda row: row.after, 1.025),
    ("before", ORANGE, lambda row: row.before, 1 / 1.025),
)


def plot_label_efficiency(result: LabelEfficiency, path: Path) -> Path:
    """One line per method and side with 95% intervals, and the summary below."""
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    for method in STYLES:
        # Of nearest neighbours with several k, the selected one: the last.
        rows = {row.images: row for row in result.rows if row.method == method}
        _draw_method(axes, method, list(rows.values()), result)
    ticks = {row.images: row.fraction for row in result.rows}
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), [f"{images:,}\n({fraction_text(f)})" for images, f in ticks.items()])
    axes.minorticks_off()
    axes.set(
        xlabel="Labelled images",
        ylabel=f"Accuracy on {result.test_images:,} {result.evaluated_on} images (95% interval)",
    )
    if len(ticks) == 1:
        (images,) = ticks
        axes.set_xlim(images / 2, images * 2)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -0.004), min(high, 1.004))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    style_axes(axes)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    figure.text(0.01, -0.01, textwrap.fill(result.summary, 110), fontsize=8, va="top")
    return save(figure, path)


def _draw_method(axes: Axes, method: Method, rows: Sequence[LabelEfficiencyRow], result: LabelEfficiency) -> None:
    marker, line, method_shift = STYLES[method]
    names = {"before": result.before_name, "after": result.after_name}
    for side, colour, value, side_shift in SIDES:
        if not rows:
            continue
        intervals = [value(row) for row in rows]
        errors = np.array([(i.value - i.low, i.high - i.value) for i in intervals]).T.clip(min=0)
        axes.errorbar(
            [row.images * method_shift * side_shift for row in rows],
            [interval.value for interval in intervals],
            errors,
            fmt=f"{marker}{line}",
            color=colour,
            mfc=colour if method == "fine-tuning" else "white",
            ms=5,
            capsize=2.5,
            lw=1.4,
            label=f"{NAMES[method]}, {shorten(names[side], 28)}",
        )
