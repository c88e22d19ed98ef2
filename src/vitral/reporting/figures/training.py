"""The pictures of a run: curves, confusion matrix, and what the model looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter
from PIL import Image
from torch import Tensor

from vitral.data.sequence import picture_of
from vitral.evaluation.metrics import Metrics
from vitral.evaluation.probe import ProbeResult
from vitral.explain import METHODS, scaled
from vitral.inference.predictor import Picture, Predictor
from vitral.reporting.figures.fonts import make_legible, quietly
from vitral.training.compare_strategies import Comparison

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"  # told apart by the colour-blind too (Okabe and Ito)
GRAY, PALE = "#6B7280", "#D5DBE3"
MISTAKES = LinearSegmentedColormap.from_list("mistakes", ["white", "#FDD0A2", "#F16913", "#8C2D04"])

Array = np.ndarray[Any, Any]


def save(figure: Figure, path: Path) -> Path:
    make_legible(figure)
    with quietly():
        figure.savefig(path, dpi=130, bbox_inches="tight")
    return path


def curves(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Loss and accuracy, epoch by epoch, training beside validation."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    epochs = [row["epoch"] for row in rows]
    for axes, what, name in ((loss, "loss", "loss"), (accuracy, "top1", "accuracy")):
        for split, color, label in (("train", ORANGE, "training (augmented)"), ("validation", BLUE, "validation")):
            if all(f"{split}_{what}" in row for row in rows):  # a run that holds nothing out has no validation
                axes.plot(epochs, [row[f"{split}_{what}"] for row in rows], "o-", color=color, ms=3, label=label)
        axes.set(xlabel="epoch", title=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if len(epochs) == 1:
            axes.set_xticks(epochs)
    if len(epochs) > 1 and all("validation_top1" in row for row in rows):
        best = max((row["epoch"] for row in rows if row["best"]), default=epochs[-1])
        accuracy.axvline(best, color=GRAY, ls=":", zorder=0, label=f"best epoch ({best})")
    accuracy.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    accuracy.legend(frameon=False)
    return save(figure, path)


def confusion(metrics: Metrics, path: Path, title: str = "") -> Path:
    """Rows: what it is. Columns: what it was called. Mistakes are coloured; right answers would drown them."""
    names = [shortened(figures.name, 24) for figures in metrics.per_class]
    counts = np.array(metrics.confusion)
    K = len(names)
    mistakes = counts.astype(float)
    np.fill_diagonal(mistakes, 0)
    size = min(max(0.55 * K, 4.0), 14)
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.subplots()
    axes.imshow(mistakes, cmap=MISTAKES, vmin=0, vmax=max(mistakes.max(), 1))
    if K <= 30:
        for true, said in zip(*counts.nonzero(), strict=True):
            dark = mistakes[true, said] > 0.6 * mistakes.max()
            color = BLUE if true == said else "white" if dark else "black"
            axes.text(said, true, f"{counts[true, said]}", ha="center", va="center", fontsize=9, color=color)
    ticks = list(range(0, K, 1 if K <= 30 else max(K // 20, 1)))
    shown = [names[i] for i in ticks]
    crowded = 0.1 * max(map(len, shown)) > size / len(ticks)  # 0.1 inch a letter
    axes.set_xticks(ticks, shown, rotation=90 if crowded else 0, parse_math=False)
    axes.set_yticks(ticks, shown, parse_math=False)
    axes.set_xlabel("the model said")
    axes.set_ylabel("it is")
    axes.set_title(title, parse_math=False)
    axes.tick_params(length=0)
    axes.spines[:].set_color(PALE)
    if K <= 30:
        axes.set_xticks(np.arange(K - 1) + 0.5, minor=True)
        axes.set_yticks(np.arange(K - 1) + 0.5, minor=True)
        axes.grid(which="minor", color=PALE, lw=0.5)
        axes.tick_params(which="minor", length=0)
    return save(figure, path)


def attention(predictor: Predictor, images_NCHW: Tensor, labels_N: Tensor, path: Path) -> Path:
    """Each image, with the answer and its probability, and beside it where the model looked."""
    probabilities, heat = predictor.probabilities(images_NCHW), looked_at(predictor, images_NCHW)
    columns = min(4, len(images_NCHW))
    rows = -(-len(images_NCHW) // columns)
    H, W = images_NCHW.shape[2:]
    side = 1.25 * H / W  # inches
    height = (side + 0.35) * rows
    figure = Figure(figsize=(2.8 * columns, height))
    caption = "left: the image, what the model said, how sure it was\nright: where it looked"
    figure.text(0, 1 + 0.1 / height, caption, fontsize=10, color=GRAY, va="bottom")
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1 - 0.25 / height, wspace=0.06, hspace=0.35 / side)
    ratios = [1, 1, 0.12] * columns
    grid = figure.subplots(rows, 3 * columns, squeeze=False, gridspec_kw={"width_ratios": ratios})
    for axes in grid.flat:
        axes.axis("off")
    for index, (image, label, chances) in enumerate(zip(images_NCHW, labels_N.tolist(), probabilities, strict=True)):
        plain, seen = grid[index // columns, 3 * (index % columns) :][:2]
        said = int(chances.argmax())
        answer = f"{shortened(predictor.classes[said], 13)} · {chances[said]:.0%}"
        if said != label:
            answer += f", is {shortened(predictor.classes[label], 13)}"
        show(plain, shown(image))
        plain.set_title(
            answer, fontsize=10, color="black" if said == label else ORANGE, loc="left", pad=3, parse_math=False
        )
        show(seen, glowing(shown(image), heat[index]))
    return save(figure, path)


def glass(predictor: Predictor, image: Picture | Tensor, path: Path) -> Path:
    """One row: an image, its patches, where the model looked, and its answer.

    `image` is a file, bytes or a picture, or a uint8 tensor C H W as the model wants it.
    """
    pixels = image if isinstance(image, Tensor) else predictor.card.preprocessing.pixels(picture_of(image))
    chances = predictor.probabilities(pixels[None])[0]
    H, W = pixels.shape[1:]
    figure = Figure(figsize=(6.5 * W / H + 3.5, 2.5), layout=ConstrainedLayoutEngine(w_pad=0.07))
    ratios = [W / H, W / H, W / H, 1]
    picture, patches, seen, answer = figure.subplots(1, 4, gridspec_kw={"width_ratios": ratios})
    show(picture, shown(pixels))
    config = predictor.model.config
    show(patches, with_gaps(shown(pixels), config.patch_size, config.margin_of(H, W)))
    show(seen, glowing(shown(pixels), looked_at(predictor, pixels[None])[0]))
    rows, columns = config.grid_of(H, W)
    titles = ("an image", f"its {rows} × {columns} patches", "where the model looked", "its answer")
    for axes, title in zip((picture, patches, seen, answer), titles, strict=True):
        axes.set_title(title, fontsize=11, color=GRAY, pad=7)
        axes.axis("off")
    best = chances.topk(min(5, len(chances)))
    for row, (chance, index) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
        first = {"color": BLUE, "weight": "bold"} if row == 0 else {"color": "black"}
        answer.barh(row, 1, height=0.62, color="#EEF1F5")
        answer.barh(row, chance, height=0.62, color=BLUE if row == 0 else "#9DB8CC")
        name = shortened(predictor.classes[index], 14)
        answer.text(-0.06, row, name, ha="right", va="center", fontsize=12, parse_math=False, **first)
        answer.text(1.06, row, percent(chance), ha="left", va="center", fontsize=11, **first)
    answer.set(xlim=(0, 1), ylim=(4.4, -0.4), box_aspect=1)
    return save(figure, path)


def percent(share: float) -> str:
    """Never 100 % for what is not certain, nor 0 % for what is not impossible."""
    return "> 99.9 %" if 0.9995 <= share < 1 else "< 0.1 %" if 0 < share < 0.0005 else f"{share:.1%}".replace("%", " %")


def shortened(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def shown(image_CHW: Tensor) -> Array:
    """H W 3, as it is drawn: gray in three equal channels, alpha left out."""
    pixels = image_CHW[:3] if len(image_CHW) >= 3 else image_CHW[:1].expand(3, -1, -1)
    array: Array = pixels.permute(1, 2, 0).cpu().numpy()
    return array


def show(axes: Axes, picture_HW3: Array) -> None:
    axes.imshow(picture_HW3, interpolation="nearest", extent=(0, 1, 0, picture_HW3.shape[0] / picture_HW3.shape[1]))


def with_gaps(picture_HW3: Array, patch_size: int, margin: int = 0) -> Array:
    """The picture cut into its patches, with a little white between them."""
    H, W, _ = picture_HW3.shape
    picture_HW3 = picture_HW3[margin : H - margin, margin : W - margin]
    H, W, _ = picture_HW3.shape
    enlarge = max(-(-420 // min(H, W)), 1)  # so that a gap can be thinner than a pixel of the picture
    P = patch_size * enlarge
    gap = max(P // 7, 2)
    rows, columns = H // patch_size, W // patch_size
    large = picture_HW3.repeat(enlarge, axis=0).repeat(enlarge, axis=1)
    cut: Array = np.full((rows * (P + gap) - gap, columns * (P + gap) - gap, 3), 255, dtype=np.uint8)
    for row in range(rows):
        for column in range(columns):
            top, left = row * (P + gap), column * (P + gap)
            cut[top : top + P, left : left + P] = large[row * P : (row + 1) * P, column * P : (column + 1) * P]
    return cut


def looked_at(predictor: Predictor, images_NCHW: Tensor) -> Array:
    """N H W in 0…1: attention rollout."""
    images = predictor.card.preprocessing.normalise(images_NCHW.to(predictor.hardware.device))
    heat: Array = scaled(METHODS["rollout"](predictor.model, images)).cpu().numpy()
    return heat


def glowing(picture_HW3: Array, heat_HW: Array) -> Array:
    """The picture, darker, with the heat's light added to it as by a second lamp: what lies under it stays visible."""
    glow = colormaps["inferno"](0.85 * heat_HW)[..., :3] * (1.5 * heat_HW[..., None]).clip(0, 1)
    lit: Array = 1 - (1 - 0.6 * picture_HW3 / 255) * (1 - 0.9 * glow)
    return (lit * 255).round().astype(np.uint8)


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


def probe(result: ProbeResult, path: Path) -> Path:
    """Accuracy against the labelled images a class: few of them, then all, with 95 % intervals."""
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    few = [row for row in result.rows if row.shots is not None]
    every = [row for row in result.rows if row.shots is None]
    ticks = {float(row.shots): str(row.shots) for row in few if row.shots is not None}
    if few:
        label = f"least squares, few images ({result.seeds} draws)"
        between = np.array([(row.accuracy - row.low, row.high - row.accuracy) for row in few]).T.clip(min=0)
        axes.errorbar(
            list(ticks), [row.accuracy for row in few], between, fmt="o-", color=BLUE, ms=5, capsize=3, label=label
        )
    most = max(row.images for row in every) / len(result.classes)
    styles = {
        "nearest neighbours": (0.94, "s", ORANGE),
        "linear": (1.06, "D", GREEN),
    }  # side by side, not on each other
    for row in every:
        aside, marker, color = styles[row.method]
        between = np.array([[row.accuracy - row.low], [row.high - row.accuracy]]).clip(min=0)
        label = f"{row.method}, all images ({row.chosen})"
        axes.errorbar([most * aside], [row.accuracy], between, fmt=marker, color=color, ms=6, capsize=3, label=label)
        axes.axhline(row.accuracy, color=color, lw=0.8, ls=":", alpha=0.6, zorder=0)
    ticks = {place: name for place, name in ticks.items() if not 0.8 < place / most < 1.25} | {
        most: f"all\n({most:.0f})"
    }
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set(xlabel="labelled images a class", ylabel=f"accuracy on {result.test_images:,} {result.judged_on} images")
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -0.004), min(high, 1.004))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1))  # above: inside it would cover something
    return save(figure, path)


def comparison(result: Comparison, path: Path) -> Path:
    """A line a way: the mean with its 95 % interval, and a dot a seed."""
    rows = result.verdict.rows
    figure = Figure(figsize=(6.5, 0.9 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(reversed(rows)):
        color = GREEN if row.name == result.verdict.take else BLUE
        between = np.array([[row.accuracy - row.low], [row.high - row.accuracy]]).clip(min=0)
        axes.errorbar([row.accuracy], [place], xerr=between, fmt="D", color=color, ms=6, capsize=4)
        if row.seeds > 1:
            axes.plot(row.accuracies, [place + 0.18] * row.seeds, ".", color=color, alpha=0.6, ms=6)
    labels = [f"{row.name}\n{row.seconds:,.0f} s" for row in reversed(rows)]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set(xlabel=f"accuracy on {result.judged_on.split(';')[0]}; bars: 95 % interval")
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.grid(alpha=0.3, axis="x")
    axes.spines[["top", "right"]].set_visible(False)
    return save(figure, path)
