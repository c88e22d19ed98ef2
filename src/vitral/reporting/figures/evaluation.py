"""Figures of an evaluation: reliability, risk-coverage curve, OOD scores, corruption robustness."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from vitral.errors import VitralError, error_reason
from vitral.evaluation.ood import OODResult
from vitral.evaluation.reliability import Reliability
from vitral.evaluation.report import EvaluationReport
from vitral.evaluation.robustness import Robustness
from vitral.evaluation.selective_prediction import RiskCoverage
from vitral.reporting.figures.style import (
    BLUE,
    GRAY,
    GREEN,
    ORANGE,
    PALE_BLUE,
    PALE_GRAY,
    PINK,
    YELLOW,
    save,
    style_axes,
)

CORRUPTION_STYLES = {
    "noise": (BLUE, "o"),
    "blur": (ORANGE, "s"),
    "contrast": (GREEN, "D"),
    "jpeg": (PINK, "^"),
    "rotation": (YELLOW, "v"),
}


def plot_evaluation(report: EvaluationReport, folder: Path) -> list[Path]:
    """Draw one file per measurement; returns their paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VitralError(
            f"cannot create {folder}: {error_reason(error)}", "Choose another --figures folder"
        ) from error
    paths = [
        plot_reliability(report.uncalibrated, report.calibrated, report.temperature, folder / "reliability.png"),
        plot_risk_coverage(report.risk_coverage, folder / "risk_coverage.png"),
    ]
    if report.ood is not None:
        paths.append(plot_ood(report.ood, folder / "ood.png"))
    if report.robustness is not None:
        paths.append(plot_robustness(report.robustness, folder / "robustness.png"))
    return paths


def plot_reliability(uncalibrated: Reliability, calibrated: Reliability, temperature: float, path: Path) -> Path:
    """Accuracy against confidence with 95% intervals. A perfectly calibrated model is on the diagonal."""
    panels = (
        (f"Uncalibrated (ECE {uncalibrated.ece:.2%})", uncalibrated),
        (f"Temperature {temperature:.3f} (ECE {calibrated.ece:.2%})", calibrated),
    )
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    low = min(min(b.confidence, b.low) for _, reliability in panels for b in reliability.bins)
    low = max(min(low, 0.9) - 0.03, 0)
    for axes, (title, reliability) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        axes.plot([low, 1], [low, 1], color=GRAY, ls=":", lw=1, label="perfect calibration")
        _draw_bins(axes, reliability)
        axes.set(xlim=(low, 1.005), ylim=(low, 1.005), xlabel="Confidence", title=title)
        style_axes(axes)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(xmax=1))
    figure.axes[0].set_ylabel("Accuracy")
    figure.axes[0].legend(frameon=False, loc="upper left")
    return save(figure, path)


def _draw_bins(axes: Axes, reliability: Reliability) -> None:
    confidence = np.array([b.confidence for b in reliability.bins])
    accuracy = np.array([b.accuracy for b in reliability.bins])
    error_bars = np.abs(np.array([(b.low, b.high) for b in reliability.bins]).T - accuracy)
    label = "bins with equal numbers of images"
    axes.errorbar(confidence, accuracy, error_bars, fmt="o", color=BLUE, ecolor=PALE_BLUE, ms=5, capsize=2, label=label)


def plot_risk_coverage(curve: RiskCoverage, path: Path) -> Path:
    """Error rate among the most confident predictions, against their fraction."""
    figure = Figure(figsize=(5.5, 3.8), layout="constrained")
    axes = figure.subplots()
    label = f"AURC {curve.aurc:.4f} (optimal {curve.optimal_aurc:.4f})"
    axes.plot(curve.coverage, curve.risk, color=BLUE, label=label)
    axes.fill_between(curve.coverage, curve.risk, color=BLUE, alpha=0.12, lw=0)
    axes.set(xlim=(0, 1), xlabel="Coverage (most confident first)", ylabel="Error rate")
    axes.set_ylim(bottom=0, top=max(max(curve.risk) * 1.1, 1e-3))
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.legend(frameon=False, loc="upper left")
    style_axes(axes)
    return save(figure, path)


def plot_ood(result: OODResult, path: Path) -> Path:
    """Histograms of each OOD score for in-distribution and OOD images, with the threshold."""
    figure = Figure(figsize=(4.2 * len(result.scores), 3.2), layout="constrained")
    for axes, score in zip(figure.subplots(1, len(result.scores), squeeze=False)[0], result.scores, strict=True):
        histograms = ((score.id_histogram, BLUE, "in distribution"), (score.ood_histogram, ORANGE, result.dataset))
        for counts, colour, label in histograms:
            fractions = np.array(counts) / max(sum(counts), 1)
            axes.stairs(fractions, score.bin_edges, fill=True, color=colour, alpha=0.35)
            axes.stairs(fractions, score.bin_edges, color=colour, lw=1.2, label=label)
        if score.threshold is not None:
            axes.axvline(score.threshold, color=GRAY, ls="--", lw=1, label="threshold")
        axes.set(title=f"{score.name}: AUROC {score.auroc.value:.1%}", xlabel="Score", yticks=[])
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.axes[0].set_ylabel("Fraction of images")
    figure.axes[0].legend(frameon=False)
    return save(figure, path)


def plot_robustness(result: Robustness, path: Path) -> Path:
    """Accuracy against severity for each corruption, with 95% intervals."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(result.clean_accuracy, color=PALE_GRAY, lw=1.5, zorder=0)
    axes.annotate("clean", (0.6, result.clean_accuracy), color=GRAY, fontsize=9, va="bottom")
    for corruption in result.corruptions:
        colour, marker = CORRUPTION_STYLES.get(corruption.corruption, (GRAY, "o"))
        accuracies = [interval.value for interval in corruption.accuracy]
        severity = np.arange(1, len(accuracies) + 1)
        label = f"{corruption.corruption} ({corruption.relative_accuracy.value:.0%} of clean)"
        axes.plot(severity, accuracies, color=colour, marker=marker, ms=5, label=label)
        low = [interval.low for interval in corruption.accuracy]
        high = [interval.high for interval in corruption.accuracy]
        axes.fill_between(severity, low, high, color=colour, alpha=0.15, lw=0)
    axes.set(xlabel="Severity", ylabel=f"Accuracy on {result.images:,} images", ylim=(0, 1.03), xlim=(0.5, 5.2))
    axes.set_xticks(range(1, 6))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.legend(frameon=False, loc="lower left")
    style_axes(axes)
    return save(figure, path)
