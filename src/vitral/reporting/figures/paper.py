"""Figures 6 and 7 of the ViT paper for any model: filters, position embeddings, attention distance, rollout.

Shapes:  B images   N patches   T tokens   h heads   L blocks   D width   P patch side   C channels
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from vitral.data.preprocess import to_one_size
from vitral.data.variable_images import stack_images
from vitral.evaluation.data import evenly_spaced_indices
from vitral.inference.predictor import Predictor
from vitral.models.variants.hybrid import HybridEmbedding
from vitral.models.vit import Grid, ViT
from vitral.reporting.figures.images import draw_image, overlay_heatmap, rollout_heatmaps, to_rgb
from vitral.reporting.figures.style import BLUE, GRAY, Array, format_percent, save, shorten, style_axes

NUM_COMPONENTS = 28  # as in the paper
NUM_EXAMPLES = 12
TRACE_BATCH = 16
MAX_PANELS = 16  # per side of the grid of similarity maps; larger grids are subsampled
FILE_TYPES = ("png", "svg")


def plot_paper_figures(
    predictor: Predictor, folder: Path, images_NCHW: Tensor | None = None
) -> tuple[list[Path], list[str]]:
    """Draw every figure that the model and the images allow, as PNG and SVG.

    Returns the files, and the figures that were skipped with the reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model, skipped = predictor.model, []
    figures: dict[str, Figure] = {"filters": plot_filters(model)}
    if (position_figure := plot_position_similarity(model)) is not None:
        figures["positions"] = position_figure
    else:
        skipped.append("positions: the model has no position embeddings")
    if images_NCHW is not None and len(images_NCHW):
        normalised = predictor.model_config.preprocessing.normalise(images_NCHW.to(predictor.hardware.device))
        figures["distance"] = plot_attention_distance(model, normalised)
        examples = images_NCHW[evenly_spaced_indices(len(images_NCHW), NUM_EXAMPLES)]
        figures["attention"] = plot_rollout_examples(predictor, examples)
    else:
        skipped.append("distance and attention: no images (pass --images FILES)")
    paths = [save(figure, folder / f"paper-{name}.{kind}") for name, figure in figures.items() for kind in FILE_TYPES]
    return paths, skipped


# ── filters ──────────────────────────────────────────────────────────────────────────────────────────────────


def principal_components(filters_DE: Tensor, count: int = NUM_COMPONENTS) -> tuple[Tensor, Tensor]:
    """The first principal components of D filters (unit length), and the fraction of the variance of each."""
    centred = filters_DE.double() - filters_DE.double().mean(dim=0)
    _, singular_values, directions = torch.linalg.svd(centred, full_matrices=False)
    variance = singular_values**2 / (singular_values**2).sum().clamp_min(1e-30)
    return directions[:count].float(), variance[:count].float()


def embedding_filters(model: ViT) -> tuple[Tensor, str]:
    """The filters that see the pixels, (D, C, P, P), and the name of their layer."""
    embedding = model.patch_embedding
    if isinstance(embedding, HybridEmbedding):
        first_conv = next(parameter for parameter in embedding.stem.parameters() if parameter.ndim == 4)
        return first_conv.detach().cpu(), "first convolution of the stem"
    weight = embedding.project.weight.detach().cpu()
    return weight.unflatten(1, (model.config.channels, *(model.config.patch_size,) * 2)), "patch embedding"


def plot_filters(model: ViT) -> Figure:
    """Principal components of the filters (figure 7, left)."""
    weight_DCPP, layer = embedding_filters(model)
    components, variance = principal_components(weight_DCPP.flatten(1))
    columns = 7 if len(components) > 7 else max(len(components), 1)
    rows = -(-len(components) // columns)
    figure = Figure(figsize=(1.05 * columns, 1.05 * rows + 0.9), layout="constrained")
    for axes in figure.subplots(rows, columns, squeeze=False).flat:
        axes.axis("off")
    for index, (axes, component) in enumerate(zip(figure.axes, components, strict=False)):
        image = filter_to_image(component.unflatten(0, weight_DCPP.shape[1:]))
        axes.imshow(image, cmap="gray", interpolation="nearest")
        axes.set_title(f"{index + 1}", fontsize=7, color=GRAY, pad=2)
    P = weight_DCPP.shape[-1]
    figure.suptitle(
        f"Principal components of the {len(weight_DCPP)} filters, {P}×{P} pixels\n{layer}; the first "
        f"{len(components)} explain {float(variance.sum()):.0%} of the variance",
        fontsize=10,
    )
    return figure


def filter_to_image(filter_CPP: Tensor) -> Array:
    """(P, P, 3) or (P, P) in [0, 1], with zero as medium grey."""
    magnitude = filter_CPP.abs().max().clamp_min(1e-12)
    image = (filter_CPP / magnitude / 2 + 0.5)[: 3 if len(filter_CPP) >= 3 else 1]
    array: Array = image.permute(1, 2, 0).squeeze(-1).numpy()
    return array


# ── positions ────────────────────────────────────────────────────────────────────────────────────────────────


def cosine_similarity(rows_ND: Tensor) -> Tensor:
    """Cosine similarity of all pairs of rows: (N, N)."""
    unit = F.normalize(rows_ND.float(), dim=-1)
    return unit @ unit.T


def rope_similarity(rope_2Ne: Tensor) -> Tensor:
    """Similarity of two equal vectors after rotation to two positions: (N, N), 1 on the diagonal.

    This is the mean cosine of the differences between their rotation angles.
    """
    cos, sin = rope_2Ne.float()
    return (cos @ cos.T + sin @ sin.T) / cos.shape[1]


def plot_position_similarity(model: ViT) -> Figure | None:
    """Similarity of each position to all others (figure 7, middle); None for a model without positions."""
    panels: list[tuple[str, Tensor]] = []
    if (embedding := model.position_embedding) is not None:
        kind = "Fixed sine-cosine" if embedding.fixed else "Learned"
        similarity = cosine_similarity(embedding.table[0, embedding.num_prefix_rows :])
        panels.append((f"{kind} position embeddings: cosine similarity", similarity))
    if (rotary := model.encoder.rotary_position) is not None:
        similarity = rope_similarity(rotary.rope[:, rotary.num_prefix_tokens :])
        panels.append(("Rotary positions: similarity of equal queries\nand keys at two positions", similarity))
    if not panels:
        return None
    gh, gw = model.config.grid
    figure = Figure(figsize=(5.6 * len(panels) + 0.6, 5.2 * max(gh / gw, 0.5) + 0.9), layout="constrained")
    for axes, (title, similarity_NN) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        mosaic, rows, columns = grid_of_grids(similarity_NN.detach().cpu().numpy(), model.config.grid)
        image = axes.imshow(mosaic, vmin=min(-0.0, float(np.nanmin(mosaic))), vmax=1, interpolation="nearest")
        axes.set_title(title, fontsize=10)
        for set_ticks, side, positions in ((axes.set_xticks, gw, columns), (axes.set_yticks, gh, rows)):
            centres = np.arange(len(positions)) * (side + 1) + (side - 1) / 2
            set_ticks(centres, [str(position + 1) for position in positions], fontsize=7)
        axes.set(xlabel="Patch column", ylabel="Patch row")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def grid_of_grids(similarity_NN: Array, grid: Grid) -> tuple[Array, list[int], list[int]]:
    """One gh×gw panel per position, separated by NaN, and the rows and columns shown. Large grids are subsampled."""
    gh, gw = grid
    rows, columns = (list(range(0, n, -(-n // MAX_PANELS))) for n in grid)
    mosaic: Array = np.full((len(rows) * (gh + 1) - 1, len(columns) * (gw + 1) - 1), np.nan)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            panel = similarity_NN[row * gw + column].reshape(gh, gw)
            mosaic[i * (gh + 1) : i * (gh + 1) + gh, j * (gw + 1) : j * (gw + 1) + gw] = panel
    return mosaic, rows, columns


# ── attention distance ───────────────────────────────────────────────────────────────────────────────────────


def attention_distance(attention_BhTT: Tensor, grid: Grid, patch_size: int) -> Tensor:
    """Mean attention distance of each head in pixels: (h,) (figure 7, right).

    The distances from each patch to every patch are weighted by the attention, then averaged over patches and images.
    Attention to the class token and registers has no distance and is ignored.
    """
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float32) for n in grid), indexing="ij")
    positions = torch.stack([y.flatten(), x.flatten()], dim=1) * patch_size
    distance_NN = torch.cdist(positions, positions).to(attention_BhTT.device)
    weights = attention_BhTT[..., -len(positions) :, -len(positions) :].float()
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(1e-12)
    return (weights * distance_NN).sum(dim=-1).mean(dim=(0, 2)).cpu()


@torch.no_grad()
def attention_distances(model: ViT, images_BCHW: Tensor) -> Tensor:
    """Mean attention distance of all blocks and heads in pixels: (L, h)."""
    total, P = torch.zeros(model.config.depth, model.config.heads), model.config.patch_size
    for images in images_BCHW.split(TRACE_BATCH):
        trace = model.trace(images)
        total += len(images) * torch.stack([attention_distance(A, trace.grid, P) for A in trace.attention])
    return total / len(images_BCHW)


def plot_attention_distance(model: ViT, images_BCHW: Tensor) -> Figure:
    distances_Lh = attention_distances(model, images_BCHW).numpy()
    L, _ = distances_Lh.shape
    H, W = model.config.image_size
    figure = Figure(figsize=(min(max(0.45 * L, 4.5), 12), 3.8), layout="constrained")
    axes = figure.subplots()
    blocks = np.arange(1, L + 1)
    for head, distances in enumerate(distances_Lh.T):
        label = "head" if head == 0 else None
        axes.plot(blocks, distances, "o", color=BLUE, ms=5, alpha=0.55, mec="none", label=label)
    axes.plot(blocks, distances_Lh.mean(axis=1), color="black", lw=1.2, label="mean over heads")
    N = int(np.prod(model.config.grid))
    uniform = float(attention_distance(torch.ones(1, 1, N, N), model.config.grid, model.config.patch_size))
    axes.axhline(uniform, color=GRAY, ls=":", lw=1, label="uniform attention")
    axes.set(xlabel="Block", ylabel=f"Mean attention distance in pixels (of {H}×{W})", ylim=(0, None))
    axes.set_xticks(blocks if L <= 24 else blocks[:: L // 12])
    axes.set_title(f"Attention distance, {len(images_BCHW)} images", fontsize=10)
    style_axes(axes)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


# ── examples ─────────────────────────────────────────────────────────────────────────────────────────────────


def plot_rollout_examples(predictor: Predictor, images_NCHW: Tensor) -> Figure:
    """Images and their attention rollout (figure 6)."""
    heatmaps, titles = rollout_heatmaps(predictor, images_NCHW), prediction_titles(predictor, images_NCHW)
    N, (H, W) = len(images_NCHW), images_NCHW.shape[2:]
    columns = min(3, N)
    rows = -(-N // columns)
    figure = Figure(figsize=(3.5 * columns, (1.7 * H / W + 0.3) * rows), layout="constrained")
    grid: Any = figure.subplots(rows, 2 * columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for index in range(N):
        image_axes, attention_axes = grid[index // columns, 2 * (index % columns) :][:2]
        image = to_rgb(images_NCHW[index])
        draw_image(image_axes, image)
        draw_image(attention_axes, overlay_heatmap(image, heatmaps[index]))
        image_axes.set_title(titles[index], fontsize=8, loc="left", pad=3, parse_math=False)
    return figure


def prediction_titles(predictor: Predictor, images_NCHW: Tensor) -> list[str]:
    """`bee (97.1%)`, or `age 31.4` for a regression; empty for a model without a classifier."""
    if not predictor.has_head:
        return [""] * len(images_NCHW)
    if predictor.is_regression:
        name = shorten(predictor.classes[0], 18)
        return [f"{name} {value:.4g}" for value in predictor.values(images_NCHW)[:, 0].tolist()]
    rows = predictor.probabilities(images_NCHW)
    return [f"{shorten(predictor.classes[int(p.argmax())], 18)} ({format_percent(p.max().item())})" for p in rows]


def load_sample_images(predictor: Predictor, files: Sequence[Path], max_count: int) -> Tensor:
    """Up to `max_count` evenly spaced images of the files, as model input (N, C, H, W)."""
    selected = [files[int(index)] for index in evenly_spaced_indices(len(files), max_count)]
    preprocessing = predictor.model_config.preprocessing
    return to_one_size(stack_images([preprocessing.load(file) for file in selected]), preprocessing)
