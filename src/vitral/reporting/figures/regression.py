"""Figures of a regression: predicted against true values."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor

from vitral.evaluation.data import evenly_spaced_indices
from vitral.evaluation.regression import MAX_SCATTER_POINTS, RegressionReport
from vitral.reporting.figures.style import BLUE, GRAY, ORANGE, save, style_axes

MAX_TARGETS = 6


def plot_scatter(report: RegressionReport, predicted_NT: Tensor, true_NT: Tensor, path: Path) -> Path:
    """Predicted against true values of each target, with the prediction interval around the diagonal."""
    targets = report.targets[:MAX_TARGETS]
    figure = Figure(figsize=(4.4 * len(targets), 4.4), layout="constrained")
    rows = evenly_spaced_indices(len(true_NT), MAX_SCATTER_POINTS)
    for index, (metrics, axes) in enumerate(
        zip(targets, figure.subplots(1, len(targets), squeeze=False)[0], strict=True)
    ):
        true, predicted = true_NT[rows, index].numpy(), predicted_NT[rows, index].numpy()
        low, high = min(true.min(), predicted.min()), max(true.max(), predicted.max())
        low, high = low - 0.03 * (high - low), high + 0.03 * (high - low)
        axes.plot([low, high], [low, high], color=GRAY, lw=1, ls="--")
        if (fitted := metrics.interval) is not None:
            for sign, label in ((-1, None), (1, f"{100 * fitted.target:.4g}% prediction interval")):
                shifted = [low + sign * fitted.half_width, high + sign * fitted.half_width]
                axes.plot([low, high], shifted, color=ORANGE, lw=1, label=label)
            axes.legend(frameon=False, loc="upper left")
        axes.scatter(true, predicted, s=8, color=BLUE, alpha=0.5, linewidths=0)
        axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
        axes.set_xlabel(f"True {metrics.name}", parse_math=False)
        axes.set_ylabel(f"Predicted {metrics.name}", parse_math=False)
        r2 = "" if metrics.r2 is None else f", R² {metrics.r2.value:.3f}"
        axes.set_title(f"MAE {metrics.mae.value:.4g}{r2}", parse_math=False)
        style_axes(axes)
    return save(figure, path)
