"""Are the maps any good? Measured for one model, method by method, against maps drawn at random.

deletion    the patches that a map marks are covered first: the answer's probability should fall at once. Area under
            the curve over the share covered; low is good (arXiv 1806.07421).
insertion   they are uncovered first: it should rise at once. High is good.
pointing    two pictures of different classes, side by side; asked for either class, is its half marked more? Every
            pair is asked both ways, so that a map that does not know the class gets one half. The model sees twice
            its width (beside.py); pairs count where it knows either picture with the other covered.

Covered means painted in the mean colour. Shapes:  B images   N patches   S steps   H, W pixels
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.datasets import Split
from vitral.errors import VitralError
from vitral.explain.method import Model, grid_of
from vitral.explain.occlusion import nearest_pixels
from vitral.explain.pair import beside
from vitral.explain.registry import METHODS
from vitral.inference.predictor import Predictor
from vitral.models.vit import Grid, ViT

AT_ONCE = 128  # images in one forward pass
MAPS_AT_ONCE = 16  # images explained together: their attention and its gradients are held
STEPS = 16  # points of a curve, at most
MOST_FOR_SLOW = 64  # patches: a method that asks about each of them is not tested with more
RESAMPLES = 2000
RANDOM = "random"  # the name of the baseline's row

Maps = Callable[[Tensor, Tensor], Tensor]  # normalised images B C H W, targets B → heat B H W


@dataclass(frozen=True, kw_only=True)
class Score:
    """A mean over images or pairs, with a 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """How faithful one method's maps are."""

    method: str
    deletion: Score
    insertion: Score
    pointing: Score | None  # None where no pair could be made
    seconds: float  # for one map
    deleted: tuple[float, ...]  # the mean curves, from nothing covered to all, and the other way round
    inserted: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Faithfulness:
    """What the tests found, the random baseline last."""

    rows: tuple[Row, ...]
    images: int
    pairs: int
    best: str  # first on average over the three tests; RANDOM where nothing beats it

    def why(self) -> str:
        row = next(row for row in self.rows if row.method == self.best)
        if self.best == RANDOM:
            return "no method does better than chance on this model"
        said = f"insertion {row.insertion.mean:.2f}, deletion {row.deletion.mean:.2f}"
        return said if row.pointing is None else f"{said}, the right half {row.pointing.mean:.0%} of the time"


def measure(
    predictor: Predictor,
    split: Split,
    methods: Sequence[str],
    *,
    images: int = 64,
    pairs: int = 64,
    seed: int = 0,
    watch: Callable[[str], None] = lambda name: None,
) -> Faithfulness:
    """All tests for all methods on images of `split`, drawn at random; `split` has them as the model wants them."""
    if not len(split):
        raise VitralError("there are no images to test the maps with", "name a set or folder with images")
    if images < 1 or pairs < 0:
        raise VitralError(
            f"images must be at least 1 and pairs at least 0, not {images} and {pairs}", "leave them out for 64"
        )
    model, draws = predictor.model, torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(split), generator=draws)[:images]
    asked = normalised(predictor, split.images[chosen])
    said = in_batches(model, asked).argmax(dim=1)
    wide = beside(model)
    pasted, halves = known_pairs(predictor, wide, split, pairs, draws)
    found: list[Row] = []
    for name in (*methods, RANDOM):
        watch(name)
        began = time.perf_counter()
        heat = maps_of(model, name, draws)(asked, said)
        seconds = (time.perf_counter() - began) / len(asked)
        down, up = curves(model, asked, said, heat)
        hits = pointing(maps_of(wide, name, draws), pasted, halves) if len(pasted) else None
        found.append(
            Row(
                method=name,
                deletion=bootstrap(area(down)),
                insertion=bootstrap(area(up)),
                pointing=None if hits is None else bootstrap(hits),
                seconds=seconds,
                deleted=tuple(down.mean(dim=0).tolist()),
                inserted=tuple(up.mean(dim=0).tolist()),
            )
        )
    return Faithfulness(rows=tuple(found), images=len(asked), pairs=len(pasted), best=recommend(found))


def all_that_fit(model: ViT) -> list[str]:
    """Every method that can be tested here: captum's where it is installed, slow ones where there are few patches."""
    few, captum = math.prod(model.config.grid) <= MOST_FOR_SLOW, find_spec("captum") is not None
    return [m.name for m in METHODS.values() if (few or not m.slow) and (captum or not m.by_captum)]


def recommend(rows: Sequence[Row]) -> str:
    """The method with the best mean rank over the tests; the quicker of two equal ones."""
    tests: list[Mapping[str, float]] = [
        {row.method: row.deletion.mean for row in rows},
        {row.method: -row.insertion.mean for row in rows},
    ]
    if all(row.pointing is not None for row in rows):
        tests.append({row.method: -row.pointing.mean for row in rows if row.pointing is not None})
    ranks = {row.method: sum(sum(v < test[row.method] for v in test.values()) for test in tests) for row in rows}
    return min(rows, key=lambda row: (ranks[row.method], row.seconds)).method


# ── maps ─────────────────────────────────────────────────────────────────────────────────────────────────────


def maps_of(model: Model, name: str, draws: torch.Generator) -> Maps:
    """The maps of a method, some images at a time; of the baseline, noise."""

    def maps(images_BCHW: Tensor, targets_B: Tensor) -> Tensor:
        batches = zip(images_BCHW.split(MAPS_AT_ONCE), targets_B.split(MAPS_AT_ONCE), strict=True)
        return torch.cat([METHODS[name](model, images, targets) for images, targets in batches])

    def noise(images_BCHW: Tensor, targets_B: Tensor) -> Tensor:
        shape = images_BCHW.shape
        return torch.rand(shape[0], *shape[2:], generator=draws).to(images_BCHW.device)

    return noise if name == RANDOM else maps


# ── deletion and insertion ───────────────────────────────────────────────────────────────────────────────────


def curves(model: Model, images_BCHW: Tensor, targets_B: Tensor, heat_BHW: Tensor) -> tuple[Tensor, Tensor]:
    """The target's probability, B S, with more and more patches covered, and with more and more shown."""
    grid = grid_of(model, images_BCHW)
    marked_BSN = first_marked(patches_of(heat_BHW, grid))
    deleted: list[Tensor] = []
    inserted: list[Tensor] = []
    each = max(AT_ONCE // marked_BSN.shape[1], 1)
    for images, targets, marked in zip(
        images_BCHW.split(each), targets_B.split(each), marked_BSN.split(each), strict=True
    ):
        B, S, _ = marked.shape
        at_pixels = nearest_pixels(marked.flatten(0, 1), grid, images).unflatten(0, (B, S))[:, :, None]
        for kept, into in ((~at_pixels, deleted), (at_pixels, inserted)):
            shown = (images[:, None] * kept).flatten(0, 1)
            into.append(in_batches(model, shown).softmax(dim=1).unflatten(0, (B, S))[torch.arange(B), :, targets])
    return torch.cat(deleted).cpu(), torch.cat(inserted).cpu()


def patches_of(heat_BHW: Tensor, grid: Grid) -> Tensor:
    """B N: the mean over each patch."""
    return F.adaptive_avg_pool2d(heat_BHW[:, None], grid).flatten(1)


def first_marked(heat_BN: Tensor) -> Tensor:
    """B S N: ones on the patches marked most; none in the first step, all in the last."""
    N = heat_BN.shape[1]
    place_BN = heat_BN.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    counts_S = torch.linspace(0, N, min(N, STEPS) + 1).round().to(heat_BN.device)
    return (place_BN[:, None] < counts_S[:, None]).float()


def area(curve_BS: Tensor) -> Tensor:
    """Under each curve, its width taken as one."""
    return torch.trapezoid(curve_BS.double(), dx=1 / (curve_BS.shape[1] - 1), dim=1)


# ── pointing ─────────────────────────────────────────────────────────────────────────────────────────────────


def known_pairs(
    predictor: Predictor, wide: Model, split: Split, count: int, draws: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Up to `count` pairs of which the model knows either half when the other is covered: B C H 2W, classes B 2."""
    one, other = different(split.labels, 4 * count, draws)
    both = normalised(predictor, torch.cat([split.images[one], split.images[other]], dim=3))
    classes = torch.stack([split.labels[one], split.labels[other]], dim=1).to(both.device)
    on_the_right = torch.arange(both.shape[3], device=both.device) >= both.shape[3] // 2
    known = torch.ones(len(both), dtype=torch.bool, device=both.device)
    for side, shown in enumerate((~on_the_right, on_the_right)):
        if len(both):
            known &= in_batches(wide, both * shown).argmax(dim=1) == classes[:, side]
    return both[known][:count], classes[known][:count]


def different(labels_N: Tensor, count: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of up to `count` pairs of images with different labels."""
    one, other = torch.randint(len(labels_N), (2, 3 * count + 1), generator=draws)
    unlike = labels_N[one] != labels_N[other]
    return one[unlike][:count], other[unlike][:count]


def pointing(maps: Maps, pasted_BCHW: Tensor, classes_B2: Tensor) -> Tensor:
    """B: 1 where both classes' halves are marked more than the other, ½ where one is."""
    half, hits = pasted_BCHW.shape[3] // 2, torch.zeros(len(pasted_BCHW), dtype=torch.float64)
    for side in (0, 1):
        heat = maps(pasted_BCHW, classes_B2[:, side])
        halves = heat[..., :half].mean(dim=(1, 2)), heat[..., half:].mean(dim=(1, 2))
        more = (halves[side] - halves[1 - side]).sign().cpu()
        hits += (more + 1) / 4  # a tie is worth half of a hit
    return hits


# ── small tools ──────────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def in_batches(model: Model, images_BCHW: Tensor) -> Tensor:
    return torch.cat([model(images).float() for images in images_BCHW.split(AT_ONCE)])


def normalised(predictor: Predictor, images_BCHW: Tensor) -> Tensor:
    return predictor.card.preprocessing.normalise(images_BCHW.to(predictor.hardware.device))


def bootstrap(values_N: Tensor, seed: int = 0) -> Score:
    """The mean, and the interval that 95 % of the means of samples drawn from these values fall into."""
    values = values_N.numpy()
    drawn = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), [0.025, 0.975])
    return Score(mean=float(values.mean()), low=float(low), high=float(high))
