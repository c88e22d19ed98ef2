"""The paper's figures 6 and 7, for any model: what its filters look like, what it knows of places, how far it looks.

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

from vitral.data.decode import decode, image_files
from vitral.errors import VitralError
from vitral.evaluation.evaluate import spread
from vitral.explain import METHODS, scaled
from vitral.inference.predictor import Predictor
from vitral.models.variants.hybrid import HybridEmbedding
from vitral.models.vit import Grid, ViT
from vitral.reporting.figures.training import BLUE, GRAY, Array, glowing, percent, save, shortened, show, shown

COMPONENTS = 28  # as many as the paper shows
AT_ONCE = 16  # images traced together
MOST_SIDE = 16  # rows or columns of places in the grid of grids: beyond it, every second, third, …


KINDS = ("png", "svg")


def draw(predictor: Predictor, folder: Path, images_NCHW: Tensor | None = None) -> tuple[list[Path], list[str]]:
    """Every figure that this model and these images allow, as PNG and SVG; and why one is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    model, missing = predictor.model, []
    figures: dict[str, Figure] = {"filters": filters(model)}
    if (places := positions(model)) is not None:
        figures["positions"] = places
    else:
        missing.append("positions: this model has none")
    if images_NCHW is not None and len(images_NCHW):
        normalised = predictor.card.preprocessing.normalise(images_NCHW.to(predictor.hardware.device))
        figures["distance"] = distance(model, normalised)
        figures["attention"] = examples(predictor, images_NCHW[spread(len(images_NCHW), 12)])
    else:
        missing.append("distance and attention: they need images, --images FILES")
    written = [save(figure, folder / f"paper-{name}.{kind}") for name, figure in figures.items() for kind in KINDS]
    return written, missing


# ── filters ──────────────────────────────────────────────────────────────────────────────────────────────────


def components(filters_DE: Tensor, count: int = COMPONENTS) -> tuple[Tensor, Tensor]:
    """The first principal components of D filters, each of length 1, and the share of the variance that each has."""
    centred = filters_DE.double() - filters_DE.double().mean(dim=0)
    _, values, directions = torch.linalg.svd(centred, full_matrices=False)
    share = values**2 / (values**2).sum().clamp_min(1e-30)
    return directions[:count].float(), share[:count].float()


def filters_of(model: ViT) -> tuple[Tensor, str]:
    """D C P P, and what they are: a hybrid's first filters are its stem's."""
    embedding = model.patch_embedding
    if isinstance(embedding, HybridEmbedding):
        first = next(parameter for parameter in embedding.stem.parameters() if parameter.ndim == 4)
        return first.detach().cpu(), "the stem's first convolution"
    weight = embedding.project.weight.detach().cpu()
    return weight.unflatten(1, (model.config.channels, *(model.config.patch_size,) * 2)), "the patch embedding"


def filters(model: ViT) -> Figure:
    """Principal components of the filters (figure 7, left): of natural pictures, like a basis of their patches."""
    weight_DCPP, what = filters_of(model)
    found, share = components(weight_DCPP.flatten(1))
    columns = 7 if len(found) > 7 else max(len(found), 1)
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(1.05 * columns, 1.05 * rows + 0.9), layout="constrained")
    for axes in figure.subplots(rows, columns, squeeze=False).flat:
        axes.axis("off")
    for index, (axes, component) in enumerate(zip(figure.axes, found, strict=False)):
        picture = component.unflatten(0, weight_DCPP.shape[1:])
        axes.imshow(as_picture(picture), cmap="gray", interpolation="nearest")
        axes.set_title(f"{index + 1}", fontsize=7, color=GRAY, pad=2)
    P = weight_DCPP.shape[-1]
    figure.suptitle(
        f"Principal components of the {len(weight_DCPP)} filters of {what}, {P}×{P} pixels\n"
        f"the first {len(found)} hold {float(share.sum()):.0%} of their variance",
        fontsize=10,
    )
    return figure


def as_picture(component_CPP: Tensor) -> Array:
    """P P 3 or P P, 0…1 with gray for zero."""
    most = component_CPP.abs().max().clamp_min(1e-12)
    picture = (component_CPP / most / 2 + 0.5)[: 3 if len(component_CPP) >= 3 else 1]
    array: Array = picture.permute(1, 2, 0).squeeze(-1).numpy()
    return array


# ── positions ────────────────────────────────────────────────────────────────────────────────────────────────


def similarity(rows_ND: Tensor) -> Tensor:
    """N N: the cosine of each row with each."""
    unit = F.normalize(rows_ND.float(), dim=-1)
    return unit @ unit.T


def turned_alike(turn_2Ne: Tensor) -> Tensor:
    """N N: what two equal vectors, turned to two places, still have in common: the mean cosine of their angles'
    differences, 1 for the same place."""
    cos, sin = turn_2Ne.float()
    return (cos @ cos.T + sin @ sin.T) / cos.shape[1]


def positions(model: ViT) -> Figure | None:
    """Similarity of places in a grid of grids (figure 7, middle), one panel a place, each over all places."""
    drawn: list[tuple[str, Tensor]] = []
    if (table := model.position_embedding) is not None:
        kind = "fixed sine-cosine" if table.fixed else "learned"
        drawn.append(
            (f"cosine similarity of the {kind} position embeddings", similarity(table.table[0, table.front :]))
        )
    if (rotary := model.encoder.rotary_position) is not None:
        told = "rotary positions: what two equal queries and keys\nhave in common at two places"
        drawn.append((told, turned_alike(rotary.turn[:, rotary.prefix :])))
    if not drawn:
        return None
    gh, gw = model.config.grid
    figure = Figure(figsize=(5.6 * len(drawn) + 0.6, 5.2 * max(gh / gw, 0.5) + 0.9), layout="constrained")
    for axes, (title, alike_NN) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        mosaic, rows, columns = grid_of_grids(alike_NN.detach().cpu().numpy(), model.config.grid)
        image = axes.imshow(mosaic, vmin=min(-0.0, float(np.nanmin(mosaic))), vmax=1, interpolation="nearest")
        axes.set_title(title, fontsize=10)
        for set_ticks, side, places in ((axes.set_xticks, gw, columns), (axes.set_yticks, gh, rows)):
            middles = np.arange(len(places)) * (side + 1) + (side - 1) / 2
            set_ticks(middles, [str(place + 1) for place in places], fontsize=7)
        axes.set(xlabel="column of the patch", ylabel="row of the patch")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def grid_of_grids(alike_NN: Array, grid: Grid) -> tuple[Array, list[int], list[int]]:
    """One panel gh×gw for each place, NaN between them; of large grids some rows and columns of places."""
    gh, gw = grid
    rows, columns = (list(range(0, n, -(-n // MOST_SIDE))) for n in grid)
    mosaic: Array = np.full((len(rows) * (gh + 1) - 1, len(columns) * (gw + 1) - 1), np.nan)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            panel = alike_NN[row * gw + column].reshape(gh, gw)
            mosaic[i * (gh + 1) : i * (gh + 1) + gh, j * (gw + 1) : j * (gw + 1) + gw] = panel
    return mosaic, rows, columns


# ── distance ─────────────────────────────────────────────────────────────────────────────────────────────────


def attention_distance(looked_BhTT: Tensor, grid: Grid, patch_size: int) -> Tensor:
    """h: how far each head looks, in pixels, averaged over patches and images (figure 7, right).

    From each patch the distance to every patch, weighted by its attention; what goes to class token and registers
    has no distance and is left out.
    """
    y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float32) for n in grid), indexing="ij")
    places = torch.stack([y.flatten(), x.flatten()], dim=1) * patch_size
    apart_NN = torch.cdist(places, places).to(looked_BhTT.device)
    between = looked_BhTT[..., -len(places) :, -len(places) :].float()
    between = between / between.sum(dim=-1, keepdim=True).clamp_min(1e-12)
    return (between * apart_NN).sum(dim=-1).mean(dim=(0, 2)).cpu()


@torch.no_grad()
def distances(model: ViT, images_BCHW: Tensor) -> Tensor:
    """L h: mean attention distance in pixels."""
    total, P = torch.zeros(model.config.depth, model.config.heads), model.config.patch_size
    for images in images_BCHW.split(AT_ONCE):
        trace = model.trace(images)
        total += len(images) * torch.stack([attention_distance(A, trace.grid, P) for A in trace.attention])
    return total / len(images_BCHW)


def distance(model: ViT, images_BCHW: Tensor) -> Figure:
    found = distances(model, images_BCHW).numpy()
    L, _ = found.shape
    H, W = model.config.image_size
    figure = Figure(figsize=(min(max(0.45 * L, 4.5), 12), 3.8), layout="constrained")
    axes = figure.subplots()
    depth = np.arange(1, L + 1)
    for head, far in enumerate(found.T):
        axes.plot(depth, far, "o", color=BLUE, ms=5, alpha=0.55, mec="none", label="one head" if head == 0 else None)
    axes.plot(depth, found.mean(axis=1), color="black", lw=1.2, label="mean of the heads")
    N = int(np.prod(model.config.grid))
    even = float(attention_distance(torch.ones(1, 1, N, N), model.config.grid, model.config.patch_size))
    axes.axhline(even, color=GRAY, ls=":", lw=1, label="looking everywhere alike")
    axes.set(xlabel="block", ylabel=f"mean attention distance, pixels (of {H}×{W})", ylim=(0, None))
    axes.set_xticks(depth if L <= 24 else depth[:: L // 12])
    axes.set_title(f"How far each head looks · {len(images_BCHW)} images", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


# ── examples ─────────────────────────────────────────────────────────────────────────────────────────────────


def examples(predictor: Predictor, images_NCHW: Tensor) -> Figure:
    """Pictures and, beside each, what reached the answer (figure 6: attention rollout)."""
    images = predictor.card.preprocessing.normalise(images_NCHW.to(predictor.hardware.device))
    heat = scaled(METHODS["rollout"](predictor.model, images)).cpu().numpy()
    chances = predictor.probabilities(images_NCHW)
    N, (H, W) = len(images_NCHW), images_NCHW.shape[2:]
    columns = min(3, N)
    rows = -(-N // columns)
    figure = Figure(figsize=(3.5 * columns, (1.7 * H / W + 0.3) * rows), layout="constrained")
    grid: Any = figure.subplots(rows, 2 * columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for index in range(N):
        plain, seen = grid[index // columns, 2 * (index % columns) :][:2]
        picture = shown(images_NCHW[index])
        show(plain, picture)
        show(seen, glowing(picture, heat[index]))
        best = int(chances[index].argmax())
        name = f"{shortened(predictor.classes[best], 18)} · {percent(float(chances[index, best]))}"
        plain.set_title(name, fontsize=8, loc="left", pad=3, parse_math=False)
    return figure


def pictures(predictor: Predictor, files: Sequence[Path], most: int) -> Tensor:
    """uint8 N C H W, as the model wants them."""
    found = image_files(list(files))
    if not found:
        raise VitralError(f"no images in {', '.join(map(str, files))}", "JPEG, PNG, WebP, BMP, GIF and TIFF are read")
    chosen = [found[int(place)] for place in spread(len(found), most)]
    return torch.stack([predictor.card.preprocessing.pixels(decode(file)) for file in chosen])
