"""Figures of a training run: curves, confusion matrix and attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from vitral.data.lazy_images import Images
from vitral.evaluation.metrics import Metrics
from vitral.inference.predictor import ImageInput, Predictor
from vitral.reporting.figures.images import draw_image, overlay_heatmap, patch_mosaic, rollout_heatmaps, to_rgb
from vitral.reporting.figures.style import (
    BLUE,
    ERROR_COLOURS,
    GRAY,
    ORANGE,
    PALE_BLUE,
    PALE_GRAY,
    Array,
    format_percent,
    save,
    shorten,
    style_axes,
)

MAX_COUNTED_CLASSES = 30  # a larger confusion matrix has no room for numbers
TOP_CLASSES = 5
SCORES = {"top1": "Accuracy", "f1": "F1 score and mAP", "rmse": "RMSE"}  # by name in metrics.jsonl


def plot_training_curves(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Loss and the task's metric per epoch on the training and validation sets. rows: lines of metrics.jsonl."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    loss_axes, score_axes = figure.subplots(1, 2)
    epochs = [row["epoch"] for row in rows]
    score = next((metric for metric in SCORES if rows and f"train_{metric}" in rows[0]), "top1")
    for axes, key, name in ((loss_axes, "loss", "Loss"), (score_axes, score, SCORES[score])):
        for split, colour, label in (("train", ORANGE, "training (augmented)"), ("validation", BLUE, "validation")):
            if all(f"{split}_{key}" in row for row in rows):  # a run may have no validation set
                axes.plot(epochs, [row[f"{split}_{key}"] for row in rows], "o-", color=colour, ms=3, label=label)
        axes.set(xlabel="Epoch", title=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
        style_axes(axes)
        if len(epochs) == 1:
            axes.set_xticks(epochs)
    if all("validation_map" in row for row in rows):
        score_axes.plot(
            epochs, [row["validation_map"] for row in rows], "s--", color=BLUE, ms=3, label="validation mAP"
        )
    if len(epochs) > 1 and all(f"validation_{score}" in row for row in rows):
        best = max((row["epoch"] for row in rows if row["best"]), default=epochs[-1])
        score_axes.axvline(best, color=GRAY, ls=":", zorder=0, label=f"best epoch ({best})")
    if score != "rmse":
        score_axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    score_axes.legend(frameon=False)
    return save(figure, path)


def plot_confusion_matrix(metrics: Metrics, path: Path, title: str = "") -> Path:
    """Rows are true classes, columns predicted ones. Only errors are coloured: correct predictions would dominate."""
    names = [shorten(class_metrics.name, 24) for class_metrics in metrics.per_class]
    counts = np.array(metrics.confusion)
    K = len(names)
    errors = counts.astype(float)
    np.fill_diagonal(errors, 0)
    side = min(max(0.55 * K, 4.0), 14)  # inches
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(errors, cmap=ERROR_COLOURS, vmin=0, vmax=max(errors.max(), 1))
    if K <= MAX_COUNTED_CLASSES:
        _draw_counts(axes, counts, errors)
    ticks = list(range(0, K, 1 if K <= MAX_COUNTED_CLASSES else max(K // 20, 1)))
    tick_names = [names[i] for i in ticks]
    overlapping = 0.1 * max(map(len, tick_names)) > side / len(ticks)  # 0.1 inches per character
    axes.set_xticks(ticks, tick_names, rotation=90 if overlapping else 0, parse_math=False)
    axes.set_yticks(ticks, tick_names, parse_math=False)
    axes.set(xlabel="Predicted class", ylabel="True class")
    axes.set_title(title, parse_math=False)
    axes.tick_params(length=0)
    axes.spines[:].set_color(PALE_GRAY)
    return save(figure, path)


def _draw_counts(axes: Axes, counts_KK: Array, errors_KK: Array) -> None:
    for true, predicted in zip(*counts_KK.nonzero(), strict=True):
        dark_cell = errors_KK[true, predicted] > 0.6 * errors_KK.max()
        colour = BLUE if true == predicted else "white" if dark_cell else "black"
        axes.text(predicted, true, f"{counts_KK[true, predicted]}", ha="center", va="center", fontsize=9, color=colour)
    lines = np.arange(len(counts_KK) - 1) + 0.5
    axes.set_xticks(lines, minor=True)
    axes.set_yticks(lines, minor=True)
    axes.grid(which="minor", color=PALE_GRAY, lw=0.5)
    axes.tick_params(which="minor", length=0)


def plot_attention(predictor: Predictor, images_NCHW: Images, labels_N: Tensor, path: Path) -> Path:
    """Each image with its prediction, and next to it the attention rollout."""
    probabilities, heatmaps = predictor.probabilities(images_NCHW), rollout_heatmaps(predictor, images_NCHW)
    columns = min(4, len(images_NCHW))
    rows = -(-len(images_NCHW) // columns)
    H, W = images_NCHW.shape[2:] if isinstance(images_NCHW, Tensor) else (1, 1)  # native images have several shapes
    image_height = 1.25 * H / W  # inches
    height = (image_height + 0.35) * rows
    figure = Figure(figsize=(2.8 * columns, height))
    caption = "Left: image, predicted class and probability (orange: wrong)\nRight: attention rollout"
    figure.text(0, 1 + 0.1 / height, caption, fontsize=10, color=GRAY, va="bottom")
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1 - 0.25 / height, wspace=0.06, hspace=0.35 / image_height)
    width_ratios = [1, 1, 0.12] * columns  # the third column is a gap
    grid = figure.subplots(rows, 3 * columns, squeeze=False, gridspec_kw={"width_ratios": width_ratios})
    for axes in grid.flat:
        axes.axis("off")
    for index, (image, label, p_K) in enumerate(zip(images_NCHW, labels_N.tolist(), probabilities, strict=True)):
        image_axes, attention_axes = grid[index // columns, 3 * (index % columns) :][:2]
        predicted = int(p_K.argmax())
        correct = predicted == label
        title = f"{shorten(predictor.classes[predicted], 13)} ({p_K[predicted]:.0%})"
        if not correct:
            title += f", true: {shorten(predictor.classes[label], 13)}"
        draw_image(image_axes, to_rgb(image))
        colour = "black" if correct else ORANGE
        image_axes.set_title(title, fontsize=10, color=colour, loc="left", pad=3, parse_math=False)
        draw_image(attention_axes, overlay_heatmap(to_rgb(image), heatmaps[index]))
    return save(figure, path)


def plot_attention_overview(predictor: Predictor, image: ImageInput | Tensor, path: Path) -> Path:
    """One row: an image, its patches, the attention rollout and the predicted classes.

    image: anything `decode_pixels` reads, or a tensor (C, H, W) of the model's input size.
    """
    preprocessing = predictor.model_config.preprocessing
    pixels = image if isinstance(image, Tensor) else preprocessing.load(image)
    H, W = pixels.shape[1:]
    figure = Figure(figsize=(6.5 * W / H + 3.5, 2.5), layout=ConstrainedLayoutEngine(w_pad=0.07))
    width_ratios = [W / H, W / H, W / H, 1]
    image_axes, patch_axes, attention_axes, class_axes = figure.subplots(
        1, 4, gridspec_kw={"width_ratios": width_ratios}
    )
    config = predictor.model.config
    rows, columns = config.grid_for(H, W)
    draw_image(image_axes, to_rgb(pixels))
    draw_image(patch_axes, patch_mosaic(to_rgb(pixels), config.patch_size, config.margin_for(H, W)))
    draw_image(attention_axes, overlay_heatmap(to_rgb(pixels), rollout_heatmaps(predictor, pixels[None])[0]))
    titles = ("Image", f"{rows} × {columns} patches", "Attention rollout", "Prediction")
    for axes, title in zip((image_axes, patch_axes, attention_axes, class_axes), titles, strict=True):
        axes.set_title(title, fontsize=11, color=GRAY, pad=7)
        axes.axis("off")
    _draw_class_bars(class_axes, predictor.probabilities(pixels[None])[0], predictor.classes)
    return save(figure, path)


def _draw_class_bars(axes: Axes, p_K: Tensor, classes: Sequence[str]) -> None:
    top = p_K.topk(min(TOP_CLASSES, len(p_K)))
    for rank, (probability, index) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True)):
        style: dict[str, Any] = {"color": BLUE, "weight": "bold"} if rank == 0 else {"color": "black"}
        axes.barh(rank, 1, height=0.62, color="#EEF1F5")
        axes.barh(rank, probability, height=0.62, color=BLUE if rank == 0 else PALE_BLUE)
        name = shorten(classes[index], 14)
        axes.text(-0.06, rank, name, ha="right", va="center", fontsize=12, parse_math=False, **style)
        axes.text(1.06, rank, format_percent(probability), ha="left", va="center", fontsize=11, **style)
    axes.set(xlim=(0, 1), ylim=(TOP_CLASSES - 0.6, -0.4), box_aspect=1)


def select_examples(probabilities_NK: Tensor, labels_N: Tensor, count: int = 12) -> Tensor:
    """Indices of images to show: one correct prediction per class, then the most confident errors."""
    predicted = probabilities_NK.argmax(dim=1)
    errors = (predicted != labels_N).nonzero().flatten()
    most_confident = errors[probabilities_NK[errors].amax(dim=1).argsort(descending=True)]
    shown_errors = most_confident[: max(count // 4, count - int(labels_N.max()) - 1)]
    correct: list[int] = []
    for label in labels_N.unique().tolist():
        matches = ((labels_N == label) & (predicted == labels_N)).nonzero().flatten()
        correct += matches[:1].tolist()
    return torch.cat([torch.tensor(correct[: count - len(shown_errors)], dtype=torch.long), shown_errors])
