"""Figures that compare classifiers on frozen features, and training strategies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from vitral.evaluation.probe import ProbeResult, ProbeRow
from vitral.evaluation.strategy_comparison import StrategyResult
from vitral.reporting.figures.style import BLUE, GREEN, ORANGE, Array, save, style_axes
from vitral.training.comparison.strategies import StrategyComparison


def plot_probe(result: ProbeResult, path: Path) -> Path:
    """Accuracy against labelled images per class, with 95% intervals."""
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    few_shot = [row for row in result.rows if row.shots is not None]
    all_images = [row for row in result.rows if row.shots is None]
    ticks = _draw_few_shot(axes, few_shot, result.seeds)
    images_per_class = max(row.images for row in all_images) / len(result.classes)
    styles = {"nearest neighbours": (0.94, "s", ORANGE), "linear": (1.06, "D", GREEN)}  # shifted apart horizontally
    for row in all_images:
        shift, marker, colour = styles[row.method]
        label = f"{row.method}, all images ({row.hyperparameter})"
        x = [images_per_class * shift]
        axes.errorbar(x, [row.accuracy], _error_bars([row]), fmt=marker, color=colour, ms=6, capsize=3, label=label)
        axes.axhline(row.accuracy, color=colour, lw=0.8, ls=":", alpha=0.6, zorder=0)
    ticks = {x: name for x, name in ticks.items() if not 0.8 < x / images_per_class < 1.25}
    ticks[images_per_class] = f"all\n({images_per_class:.0f})"
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set(
        xlabel="Labelled images per class", ylabel=f"Accuracy on {result.test_images:,} {result.evaluated_on} images"
    )
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -0.004), min(high, 1.004))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    style_axes(axes)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1))  # above the axes, where it covers nothing
    return save(figure, path)


def _draw_few_shot(axes: Axes, rows: Sequence[ProbeRow], seeds: int) -> dict[float, str]:
    """Draw the few-shot curve; returns its ticks."""
    ticks = {float(row.shots): str(row.shots) for row in rows if row.shots is not None}
    if rows:
        label = f"least squares, few images ({seeds} draws)"
        accuracies = [row.accuracy for row in rows]
        axes.errorbar(list(ticks), accuracies, _error_bars(rows), fmt="o-", color=BLUE, ms=5, capsize=3, label=label)
    return ticks


def _error_bars(rows: Sequence[ProbeRow] | Sequence[StrategyResult]) -> Array:
    return np.array([(row.accuracy - row.low, row.high - row.accuracy) for row in rows]).T.clip(min=0)


def plot_strategy_comparison(result: StrategyComparison, path: Path) -> Path:
    """One row per strategy: mean accuracy with its 95% interval, and a dot per seed."""
    rows = result.verdict.rows
    figure = Figure(figsize=(6.5, 0.9 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(reversed(rows)):
        colour = GREEN if row.name == result.verdict.recommended else BLUE
        axes.errorbar([row.accuracy], [y], xerr=_error_bars([row]), fmt="D", color=colour, ms=6, capsize=4)
        if row.seeds > 1:
            axes.plot(row.accuracies, [y + 0.18] * row.seeds, ".", color=colour, alpha=0.6, ms=6)
    labels = [f"{row.name}\n{row.seconds:,.0f} s" for row in reversed(rows)]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set(xlabel=f"Accuracy on {result.evaluated_on.split(';')[0]} (bars: 95% interval)")
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1))
    style_axes(axes, grid_axis="x")
    return save(figure, path)
