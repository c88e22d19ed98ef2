"""The pictures of a run: curves, confusion matrix, and what the model looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from vitral.evaluation.metrics import Metrics
from vitral.explain.rollout import rollout
from vitral.predict import Predictor

BLUE, ORANGE = "#0072B2", "#D55E00"  # told apart by the colour-blind too (Okabe and Ito)


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130, bbox_inches="tight")
    return path


def curves(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Loss and accuracy, epoch by epoch, training beside validation."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    epochs = [row["epoch"] for row in rows]
    for axes, what, name in ((loss, "loss", "loss"), (accuracy, "top1", "accuracy")):
        axes.plot(
            epochs, [row[f"train_{what}"] for row in rows], "o-", color=ORANGE, ms=3, label="training (augmented)"
        )
        axes.plot(epochs, [row[f"validation_{what}"] for row in rows], "o-", color=BLUE, ms=3, label="validation")
        axes.set(xlabel="epoch", title=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    best = max((row["epoch"] for row in rows if row["best"]), default=epochs[-1])
    accuracy.axvline(best, color="gray", ls=":", label="best epoch")
    accuracy.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    accuracy.legend(frameon=False)
    return save(figure, path)


def confusion(metrics: Metrics, path: Path, title: str = "") -> Path:
    """Rows: what it is. Columns: what it was called. Mistakes are coloured; right answers would drown them."""
    names = [figures.name for figures in metrics.per_class]
    counts = np.array(metrics.confusion)
    K = len(names)
    mistakes = counts.astype(float)
    np.fill_diagonal(mistakes, 0)
    size = min(max(0.55 * K, 4.0), 16)
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.subplots()
    axes.imshow(mistakes, cmap="Oranges", vmin=0, vmax=max(mistakes.max(), 1))
    if K <= 30:
        for true in range(K):
            for said in range(K):
                if counts[true, said]:
                    dark = mistakes[true, said] > 0.6 * mistakes.max()
                    color = "white" if dark else "black" if true != said else BLUE
                    axes.text(said, true, str(counts[true, said]), ha="center", va="center", fontsize=8, color=color)
    ticks = range(K) if K <= 30 else range(0, K, max(K // 20, 1))
    axes.set_xticks(list(ticks), [names[i] for i in ticks], rotation=90 if max(map(len, names)) > 2 else 0)
    axes.set_yticks(list(ticks), [names[i] for i in ticks])
    axes.set(xlabel="the model said", ylabel="it is", title=title)
    return save(figure, path)


def attention(predictor: Predictor, images_NCHW: Tensor, labels_N: Tensor, path: Path) -> Path:
    """Each image, with the answer and its probability, and beside it where the model looked."""
    preprocessing = predictor.card.preprocessing
    probabilities = predictor.probabilities(images_NCHW)
    heat = rollout(predictor.model, preprocessing.normalise(images_NCHW.to(predictor.hardware.device))).cpu()
    columns = min(6, len(images_NCHW))
    rows = -(-len(images_NCHW) // columns)
    figure = Figure(figsize=(2.6 * columns, 1.65 * rows), layout="constrained")
    grid = figure.subplots(rows, 2 * columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for index, (image, label, chances) in enumerate(zip(images_NCHW, labels_N.tolist(), probabilities, strict=True)):
        plain, seen = grid[index // columns, 2 * (index % columns) : 2 * (index % columns) + 2]
        pixels = image.permute(1, 2, 0).numpy()
        gray = pixels[..., 0] if pixels.shape[-1] == 1 else pixels[..., :3]
        said = int(chances.argmax())
        right = said == label
        plain.imshow(gray, cmap="gray", vmin=0, vmax=255)
        plain.set_title(
            f"{predictor.classes[said]} {chances[said]:.0%}" + ("" if right else f" (is {predictor.classes[label]})"),
            fontsize=9,
            color="black" if right else ORANGE,
            loc="left",
        )
        seen.imshow(gray, cmap="gray", vmin=0, vmax=255)
        seen.imshow(heat[index], cmap="inferno", alpha=0.6, vmin=0, vmax=1)
    return save(figure, path)


def choose_examples(probabilities_NK: Tensor, labels_N: Tensor, count: int = 12) -> Tensor:
    """Which images to show: one right answer a class while they last, then the surest mistakes."""
    said = probabilities_NK.argmax(dim=1)
    wrong = (said != labels_N).nonzero().flatten()
    surest = wrong[probabilities_NK[wrong].amax(dim=1).argsort(descending=True)]
    shown_wrong = surest[: max(count // 4, count - int(labels_N.max()) - 1)]
    right: list[int] = []
    for label in labels_N.unique().tolist():
        found = ((labels_N == label) & (said == labels_N)).nonzero().flatten()
        right += found[:1].tolist()
    return torch.cat([torch.tensor(right[: count - len(shown_wrong)], dtype=torch.long), shown_wrong])


def picture(image_CHW: Tensor, path: Path) -> Path:
    """One uint8 image as a file."""
    pixels = image_CHW.permute(1, 2, 0).squeeze(-1).cpu().numpy()
    Image.fromarray(pixels).save(path)
    return path
