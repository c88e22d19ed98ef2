"""The scatter plot of a regression."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from vitral.evaluation.regression import RegressionReport, regression_metrics
from vitral.models.conformal import ConformalIntervals
from vitral.reporting.figures.regression import plot_scatter


def test_scatter_plot_has_a_panel_per_target(tmp_path: Path) -> None:
    true = torch.randn(40, 2)
    conformal = ConformalIntervals(coverage=0.9, half_widths=(0.5, 0.5), images=30)
    widths = []
    for count, intervals in ((1, None), (2, conformal)):
        names = ("$age$ <b>", "mass")[:count]
        metrics = regression_metrics(true[:, :count] + 0.1, true[:, :count], names, intervals)
        report = RegressionReport(images=40, targets=metrics)
        path = plot_scatter(report, true[:, :count] + 0.1, true[:, :count], tmp_path / f"{count}.png")
        with Image.open(path) as image:
            widths.append(image.width)
    assert widths[1] > 1.5 * widths[0]
