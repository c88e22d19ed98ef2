"""Deletion and insertion curves of explanation methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from vitral.explain.faithfulness import RANDOM, FaithfulnessResult
from vitral.reporting.figures.style import GRAY, save, style_axes


def plot_faithfulness(result: FaithfulnessResult, path: Path) -> Path:
    """Both curves of every method; the random baseline is dotted."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    deletion_axes, insertion_axes = figure.subplots(1, 2, sharey=True)
    colours = colormaps["viridis"](np.linspace(0, 0.92, max(len(result.rows) - 1, 1)))
    line_styles = ["-", "--", "-.", (0, (1, 1))]  # distinguishable without colours
    for axes, title, curve in (
        (deletion_axes, "Deletion: most important patches covered first (lower is better)", "deletion_curve"),
        (insertion_axes, "Insertion: most important patches shown first (higher is better)", "insertion_curve"),
    ):
        for index, row in enumerate(result.rows):
            values = getattr(row, curve)
            style: dict[str, Any] = {"color": GRAY, "ls": ":", "lw": 2}
            if row.method != RANDOM:
                width = 2.5 if row.method == result.best else 1.3
                style = {"color": colours[index], "ls": line_styles[index % 4], "lw": width}
            axes.plot(np.linspace(0, 1, len(values)), values, label=row.method, **style)
        axes.set_title(title, fontsize=10)
        axes.set(xlabel="Fraction of the patches", ylim=(0, 1.02), xlim=(0, 1))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        style_axes(axes)
    deletion_axes.set_ylabel("Probability of the predicted class")
    insertion_axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return save(figure, path)
