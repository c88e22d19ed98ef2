"""The figure of a learning-rate sweep."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from vitral.reporting.figures.style import BLUE, ORANGE, save, style_axes
from vitral.training.trials.lr_finder import LRSweep


def plot_lr_sweep(sweep: LRSweep, path: Path) -> Path:
    """Averaged loss over the learning rate, with the suggestion."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(sweep.rates, sweep.losses, color=BLUE)
    axes.axvline(sweep.suggestion, color=ORANGE, ls=":", label=f"suggestion: {sweep.suggestion:g}")
    axes.set(xscale="log", xlabel="Learning rate (optim.lr)", ylabel="Training loss (averaged)")
    style_axes(axes)
    axes.legend(frameon=False)
    return save(figure, path)
