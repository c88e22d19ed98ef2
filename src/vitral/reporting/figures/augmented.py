"""A figure of augmented training images with their targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor

from vitral.data.targets import TaskName
from vitral.reporting.figures.images import draw_image, to_rgb
from vitral.reporting.figures.style import GRAY, save, shorten

COLUMNS = 8


def plot_augmented(
    images_BCHW: Tensor, targets_BK: Tensor, classes: Sequence[str], path: Path, task: TaskName = "classification"
) -> Path:
    """A grid of images as the model sees them, each with its class or the classes it is mixed from."""
    columns = min(COLUMNS, len(images_BCHW))
    rows = -(-len(images_BCHW) // columns)
    H, W = images_BCHW.shape[2:]
    figure = Figure(figsize=(1.4 * columns, (1.4 * H / W + 0.4) * rows), layout="constrained")
    figure.suptitle("Augmented training images and their targets", fontsize=10, color=GRAY, x=0, ha="left")
    for axes in (grid := figure.subplots(rows, columns, squeeze=False)).flat:
        axes.axis("off")
    for axes, image, target_K in zip(grid.flat, images_BCHW, targets_BK, strict=False):
        draw_image(axes, to_rgb(image))
        axes.set_title(
            target_text(target_K, classes, task), fontsize=8, loc="left", pad=2, y=-0.04, va="top", parse_math=False
        )
    return save(figure, path)


def target_text(target_K: Tensor, classes: Sequence[str], task: TaskName = "classification") -> str:
    """`ants`, or one line per class of a mixed image: `ants 62%`, `bees 38%`.

    Of several labels `cat, dog`, and of real values `age 37.5`.
    """
    if task == "regression":
        return "\n".join(f"{shorten(name, 12)} {v:.4g}" for name, v in zip(classes, target_K.tolist(), strict=True))
    if task == "multilabel":
        present = [(shorten(name, 12), p) for name, p in zip(classes, target_K.tolist(), strict=True) if p >= 0.005]
        return "\n".join(name if p > 0.995 else f"{name} {p:.0%}" for name, p in present[:4]) or "no label"
    top = target_K.topk(min(2, len(target_K)))
    parts = [
        (shorten(classes[index], 16), p) for index, p in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    mixed = [(name, p) for name, p in parts if p >= 0.005]
    return mixed[0][0] if len(mixed) == 1 else "\n".join(f"{name} {p:.0%}" for name, p in mixed)
