"""The diagrams of an evaluation: reliability, risk and coverage, known against unknown, damage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from vitral.errors import VitralError, reason
from vitral.evaluation.ood import Unknown
from vitral.evaluation.reliability import Reliability
from vitral.evaluation.report import Evaluation
from vitral.evaluation.robustness import Robustness
from vitral.evaluation.selective_prediction import Selective
from vitral.reporting.figures.training import BLUE, GRAY, GREEN, ORANGE, PALE, save

KINDS = {"noise": (BLUE, "o"), "blur": (ORANGE, "s"), "contrast": (GREEN, "D"), "jpeg": ("#CC79A7", "^"),
         "rotation": ("#E69F00", "v")}  # fmt: skip


def draw(found: Evaluation, folder: Path) -> list[Path]:
    """A file for each thing that was measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VitralError(f"cannot make the folder {folder}: {reason(error)}", "choose another --figures") from error
    paths = [
        reliability(found.raw, found.calibrated, found.temperature, folder / "reliability.png"),
        risk_coverage(found.selective, folder / "risk-coverage.png"),
    ]
    if found.unknown is not None:
        paths.append(unknown(found.unknown, folder / "unknown.png"))
    if found.robustness is not None:
        paths.append(robustness(found.robustness, folder / "robustness.png"))
    return paths


def reliability(raw: Reliability, calibrated: Reliability, temperature: float, path: Path) -> Path:
    """Accuracy against confidence, with 95 % intervals; on the diagonal a model means what it says."""
    both = (
        (f"as trained (ECE {raw.ece:.2%})", raw),
        (f"temperature {temperature:.3f} (ECE {calibrated.ece:.2%})", calibrated),
    )
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    low = min(min(b.confidence, b.low) for _, one in both for b in one.bins)
    low = max(min(low, 0.9) - 0.03, 0)
    for axes, (title, one) in zip(figure.subplots(1, 2, sharey=True), both, strict=True):
        sure = np.array([b.confidence for b in one.bins])
        right = np.array([b.accuracy for b in one.bins])
        spans = np.abs(np.array([(b.low, b.high) for b in one.bins]).T - right)
        axes.plot([low, 1], [low, 1], color=GRAY, ls=":", lw=1, label="means what it says")
        axes.errorbar(
            sure,
            right,
            spans,
            fmt="o",
            color=BLUE,
            ecolor="#9DB8CC",
            ms=5,
            capsize=2,
            label="a bin of equally many images",
        )
        axes.set(xlim=(low, 1.005), ylim=(low, 1.005), xlabel="how sure it was", title=title)
        tidy(axes)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(xmax=1))
    figure.axes[0].set_ylabel("how often it was right")
    figure.axes[0].legend(frameon=False, loc="upper left")
    return save(figure, path)


def risk_coverage(found: Selective, path: Path) -> Path:
    """Mistakes among the answers, if only the surest images get one."""
    figure = Figure(figsize=(5.5, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        found.coverage, found.risk, color=BLUE, label=f"AURC {found.aurc:.4f} (a perfect order: {found.best_aurc:.4f})"
    )
    axes.fill_between(found.coverage, found.risk, color=BLUE, alpha=0.12, lw=0)
    axes.set(xlim=(0, 1), xlabel="share of images that get an answer, the surest first", ylabel="wrong among them")
    axes.set_ylim(bottom=0, top=max(max(found.risk) * 1.1, 1e-3))
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.legend(frameon=False, loc="upper left")
    tidy(axes)
    return save(figure, path)


def unknown(found: Unknown, path: Path) -> Path:
    """How each score spreads over known and unknown images, and where the validation images put the threshold."""
    figure = Figure(figsize=(4.2 * len(found.scores), 3.2), layout="constrained")
    for axes, score in zip(figure.subplots(1, len(found.scores), squeeze=False)[0], found.scores, strict=True):
        for counts, color, label in ((score.known, BLUE, "known"), (score.unknown, ORANGE, found.against)):
            share = np.array(counts) / max(sum(counts), 1)
            axes.stairs(share, score.edges, fill=True, color=color, alpha=0.35)
            axes.stairs(share, score.edges, color=color, lw=1.2, label=label)
        if score.below is not None:
            axes.axvline(score.below, color=GRAY, ls="--", lw=1, label="threshold")
        axes.set(title=f"{score.name}: AUROC {score.auroc.value:.1%}", xlabel="score", yticks=[])
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.axes[0].set_ylabel("share of images")
    figure.axes[0].legend(frameon=False)
    return save(figure, path)


def robustness(found: Robustness, path: Path) -> Path:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(found.clean, color=PALE, lw=1.5, zorder=0)
    axes.annotate("undamaged", (0.6, found.clean), color=GRAY, fontsize=9, va="bottom")
    for damage in found.damages:
        color, marker = KINDS.get(damage.kind, (GRAY, "o"))
        values = [one.value for one in damage.accuracy]
        severity = np.arange(1, len(values) + 1)
        axes.plot(
            severity,
            values,
            color=color,
            marker=marker,
            ms=5,
            label=f"{damage.kind} ({damage.relative.value:.0%} left)",
        )
        axes.fill_between(
            severity,
            [one.low for one in damage.accuracy],
            [one.high for one in damage.accuracy],
            color=color,
            alpha=0.15,
            lw=0,
        )
    axes.set(xlabel="severity", ylabel=f"accuracy on {found.images:,} images", ylim=(0, 1.03), xlim=(0.5, 5.2))
    axes.set_xticks(range(1, 6))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.legend(frameon=False, loc="lower left")
    tidy(axes)
    return save(figure, path)


def tidy(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
