"""Faithfulness of heatmaps, measured per method and compared with random heatmaps.

deletion    Cover the most important patches first; the predicted probability should fall quickly. Area under the curve
            over the covered share, lower is better (arXiv 1806.07421).
insertion   Reveal the most important patches first; the probability should rise quickly. Higher is better.
pointing    Two images of different classes side by side; the half of the target class should be marked more. Each pair
            is tested for both classes, so a heatmap that ignores the class scores one half. The model input is twice as
            wide (pair.py). Only pairs whose halves the model recognises, each with the other covered, are counted.

A method is recommended only if it beats random heatmaps in every test: the 95% bootstrap interval of the difference,
paired by image, is above 0. Random scores are the mean over several random heatmaps of each image.

Covered patches have the mean colour. Shapes:  B images   N patches   S steps   H, W pixels
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.datasets import Split
from vitral.data.preprocess import to_one_size
from vitral.data.variable_images import VariableSizeImages
from vitral.errors import VitralError
from vitral.explain.method import Model, patch_grid
from vitral.explain.occlusion import patch_masks_to_pixels
from vitral.explain.pair import widen_for_pair
from vitral.explain.registry import METHODS
from vitral.inference.predictor import Predictor
from vitral.models.vit import Grid, ViT
from vitral.utils.intervals import Interval

MAX_BATCH_SIZE = 128  # images per forward pass
MAP_BATCH_SIZE = 16  # images per heatmap batch, limited by attention and its gradients
MAX_CURVE_POINTS = 16
MAX_PATCHES_FOR_SLOW = 64  # methods with one forward pass per patch are not tested on larger grids
NUM_RESAMPLES = 2000
RANDOM = "random"  # name of the baseline
NUM_RANDOM_MAPS = 4  # random heatmaps per image
PAIRS_TO_TRY = 4  # per pair that is counted
MIN_IMAGES = 10  # for a recommendation; the bootstrap interval of fewer images or pairs is too narrow
Test = Literal["deletion", "insertion", "pointing"]

HeatmapFn = Callable[[Tensor, Tensor], Tensor]  # normalised images (B, C, H, W), targets (B,) -> heatmaps (B, H, W)


@dataclass(frozen=True, kw_only=True)
class MethodScore:
    """Faithfulness of one method: means over images or pairs, with 95% bootstrap intervals."""

    method: str
    deletion: Interval
    insertion: Interval
    pointing: Interval | None  # None if no pair was recognised
    gains: Mapping[Test, Interval]  # over random heatmaps, paired by image; positive is better
    seconds: float  # per heatmap
    deletion_curve: tuple[float, ...]  # mean probability, from nothing covered to everything
    insertion_curve: tuple[float, ...]

    def beats_random(self, test: Test) -> bool:
        return test in self.gains and self.gains[test].low > 0


@dataclass(frozen=True, kw_only=True)
class FaithfulnessResult:
    """Scores of all methods, the random baseline last."""

    rows: tuple[MethodScore, ...]
    images: int
    pairs: int
    best: str | None  # best mean rank of the methods that beat random heatmaps in every test; None if there are none

    def recommendation(self) -> str:
        """The recommended method and its scores, or why there is none."""
        if self.best is None:
            few = f"{min(self.images, self.pairs or self.images)} images are too few"
            none = "no method beats random heatmaps in every test"
            is_small = min(self.images, self.pairs or self.images) < MIN_IMAGES
            return f"No method can be recommended for this model: {few if is_small else none}"
        row = next(row for row in self.rows if row.method == self.best)
        scores = [f"insertion {row.insertion.value:.2f}", f"deletion {row.deletion.value:.2f}"]
        if row.pointing is not None:
            scores.append(f"pointing {row.pointing.value:.0%}")
        return f"Recommended for this model: {self.best} ({', '.join(scores)}), better than random in every test"


def max_images(num_images: int, num_pairs: int) -> int:
    """How many different images the tests use at most."""
    return num_images + 2 * PAIRS_TO_TRY * num_pairs


def measure_faithfulness(
    predictor: Predictor,
    split: Split,
    methods: Sequence[str],
    *,
    num_images: int = 64,
    num_pairs: int = 64,
    log: Callable[[str], None] = lambda name: None,
    on_estimate: Callable[[float], None] | None = None,
) -> FaithfulnessResult:
    """Run all tests for all methods on random images of `split`, which must have the model's input size.

    `on_estimate` receives the expected duration before the tests, `log` the name of each method.
    """
    if not len(split):
        raise VitralError("no images to measure faithfulness on", "Pass a dataset or a folder with images")
    if num_images < 1 or num_pairs < 0:
        raise VitralError(
            f"expected at least 1 image and 0 pairs, got {num_images} and {num_pairs}", "Omit them for 64 each"
        )
    if isinstance(split.images, VariableSizeImages):
        split = replace(split, images=to_one_size(split.images, predictor.model_config.preprocessing))
    model, rng = predictor.model, torch.Generator().manual_seed(0)
    indices = torch.randperm(len(split), generator=rng)[:num_images]
    images = normalise_images(predictor, split.images[indices])
    started = time.perf_counter()
    predicted = batched_logits(model, images).argmax(dim=1)
    seconds_per_image = (time.perf_counter() - started) / len(images)
    pair_model = widen_for_pair(model)
    heatmaps = {name: (heatmap_fn(model, name, rng), heatmap_fn(pair_model, name, rng)) for name in methods}
    if on_estimate is not None:
        first = images[:1], predicted[:1]
        on_estimate(expected_seconds(model, heatmaps, *first, seconds_per_image, len(images), num_pairs))
    heatmaps[RANDOM] = heatmap_fn(model, RANDOM, rng), heatmap_fn(pair_model, RANDOM, rng)
    pair_images, pair_classes = recognised_pairs(predictor, pair_model, split, num_pairs, rng)
    scores: dict[str, _Scores] = {}
    for name in (*methods, RANDOM):
        log(name)
        scores[name] = _score_method(
            heatmaps[name],
            model,
            (images, predicted),
            (pair_images, pair_classes),
            repeats=NUM_RANDOM_MAPS if name == RANDOM else 1,
        )
    rows = tuple(method_score(name, each, scores[RANDOM]) for name, each in scores.items())
    best = recommend(rows, len(images), len(pair_images))
    return FaithfulnessResult(rows=rows, images=len(images), pairs=len(pair_images), best=best)


def expected_seconds(
    model: ViT, heatmaps: Mapping[str, tuple[HeatmapFn, HeatmapFn]], image_1CHW: Tensor, target_1: Tensor,
    seconds_per_image: float, num_images: int, num_pairs: int,
) -> float:  # fmt: skip
    """Expected duration of all tests, from the time of a forward pass and of two heatmaps of each method."""

    def seconds(functions: Iterable[HeatmapFn], images: Tensor) -> float:
        started = time.perf_counter()
        for function in functions:
            function(images, target_1)
        return time.perf_counter() - started

    of_images, of_pairs = ([pair[i] for pair in heatmaps.values()] for i in (0, 1))
    curve_points = min(math.prod(model.config.grid), MAX_CURVE_POINTS) + 1
    forward_passes = (len(heatmaps) + NUM_RANDOM_MAPS) * 2 * curve_points * num_images
    forward_passes += 2 * PAIRS_TO_TRY * num_pairs * 2  # a pair has twice as many tokens
    total = forward_passes * seconds_per_image + num_images * seconds(of_images, image_1CHW)
    if num_pairs:
        total += 2 * num_pairs * seconds(of_pairs, torch.cat([image_1CHW, image_1CHW], dim=3))
    return total


@dataclass(frozen=True, kw_only=True, eq=False)
class _Scores:
    """Scores of one method per image and per pair, averaged over repetitions."""

    deletion_curves: Tensor  # (B, S)
    insertion_curves: Tensor  # (B, S)
    hits: Tensor  # (pairs,); empty without pairs
    seconds: float

    def values(self) -> dict[Test, Tensor]:
        """Scores (B,) of each test; higher is better."""
        values: dict[Test, Tensor] = {
            "deletion": -area_under_curve(self.deletion_curves),
            "insertion": area_under_curve(self.insertion_curves),
        }
        return values | ({"pointing": self.hits} if len(self.hits) else {})


def _score_method(
    heatmaps: tuple[HeatmapFn, HeatmapFn],
    model: Model,
    images_and_targets: tuple[Tensor, Tensor],
    pairs_and_classes: tuple[Tensor, Tensor],
    repeats: int,
) -> _Scores:
    """Run all tests. `heatmaps` are those of single images and of pairs."""
    images, targets = images_and_targets
    start = time.perf_counter()
    maps = [heatmaps[0](images, targets) for _ in range(repeats)]
    seconds = (time.perf_counter() - start) / (len(images) * repeats)
    curves = [deletion_insertion_curves(model, images, targets, heat) for heat in maps]
    hits = torch.zeros(0, dtype=torch.float64)
    if len(pairs_and_classes[0]):
        hits = torch.stack([pointing_scores(heatmaps[1], *pairs_and_classes) for _ in range(repeats)]).mean(dim=0)
    return _Scores(
        deletion_curves=torch.stack([deletion for deletion, _ in curves]).mean(dim=0),
        insertion_curves=torch.stack([insertion for _, insertion in curves]).mean(dim=0),
        hits=hits,
        seconds=seconds,
    )


def method_score(name: str, scores: _Scores, random: _Scores) -> MethodScore:
    """Means with intervals, and the gains over random heatmaps."""
    baseline = random.values()
    gains = {test: bootstrap_mean(values - baseline[test]) for test, values in scores.values().items()}
    return MethodScore(
        method=name,
        deletion=bootstrap_mean(area_under_curve(scores.deletion_curves)),
        insertion=bootstrap_mean(area_under_curve(scores.insertion_curves)),
        pointing=bootstrap_mean(scores.hits) if len(scores.hits) else None,
        gains={} if name == RANDOM else gains,
        seconds=scores.seconds,
        deletion_curve=tuple(scores.deletion_curves.mean(dim=0).tolist()),
        insertion_curve=tuple(scores.insertion_curves.mean(dim=0).tolist()),
    )


def applicable_methods(model: ViT) -> list[str]:
    """Methods that can be tested: captum's if it is installed, slow ones if there are few patches."""
    has_few_patches, has_captum = math.prod(model.config.grid) <= MAX_PATCHES_FOR_SLOW, find_spec("captum") is not None
    return [
        m.name for m in METHODS.values() if (has_few_patches or not m.is_slow) and (has_captum or not m.needs_captum)
    ]


def recommend(rows: Sequence[MethodScore], images: int, pairs: int) -> str | None:
    """The method with the best mean rank over the tests among those that beat random in all of them.

    The faster one on ties. Without pairs there is no pointing test. None if there are too few images.
    """
    if images < MIN_IMAGES or 0 < pairs < MIN_IMAGES:
        return None
    candidates = [row for row in rows if row.gains and all(row.beats_random(test) for test in row.gains)]
    ranks = {
        row.method: sum(
            sum(other.gains[test].value > gain.value for other in candidates) for test, gain in row.gains.items()
        )
        for row in candidates
    }
    best = min(candidates, key=lambda row: (ranks[row.method], row.seconds), default=None)
    return None if best is None else best.method


# ── heatmaps ─────────────────────────────────────────────────────────────────────────────────────────────────────


def heatmap_fn(model: Model, name: str, rng: torch.Generator) -> HeatmapFn:
    """A function that computes a method's heatmaps in batches; for the baseline, random ones."""

    def maps(images_BCHW: Tensor, targets_B: Tensor) -> Tensor:
        batches = zip(images_BCHW.split(MAP_BATCH_SIZE), targets_B.split(MAP_BATCH_SIZE), strict=True)
        return torch.cat([METHODS[name](model, images, targets) for images, targets in batches])

    def noise(images_BCHW: Tensor, targets_B: Tensor) -> Tensor:
        shape = images_BCHW.shape
        return torch.rand(shape[0], *shape[2:], generator=rng).to(images_BCHW.device)

    return noise if name == RANDOM else maps


# ── deletion and insertion ───────────────────────────────────────────────────────────────────────────────────


def deletion_insertion_curves(
    model: Model, images_BCHW: Tensor, targets_B: Tensor, heat_BHW: Tensor
) -> tuple[Tensor, Tensor]:
    """The target's probability (B, S) while patches are covered, and while they are revealed."""
    grid = patch_grid(model, images_BCHW)
    top_BSN = top_patches(mean_per_patch(heat_BHW, grid))
    deleted: list[Tensor] = []
    inserted: list[Tensor] = []
    chunk = max(MAX_BATCH_SIZE // top_BSN.shape[1], 1)
    for images, targets, marked in zip(
        images_BCHW.split(chunk), targets_B.split(chunk), top_BSN.split(chunk), strict=True
    ):
        B, S, _ = marked.shape
        at_pixels = patch_masks_to_pixels(marked.flatten(0, 1), grid, images).unflatten(0, (B, S))[:, :, None]
        for visible, curves in ((~at_pixels, deleted), (at_pixels, inserted)):
            shown = (images[:, None] * visible).flatten(0, 1)
            curves.append(batched_logits(model, shown).softmax(dim=1).unflatten(0, (B, S))[torch.arange(B), :, targets])
    return torch.cat(deleted).cpu(), torch.cat(inserted).cpu()


def mean_per_patch(heat_BHW: Tensor, grid: Grid) -> Tensor:
    """Mean over each patch, (B, N)."""
    return F.adaptive_avg_pool2d(heat_BHW[:, None], grid).flatten(1)


def top_patches(heat_BN: Tensor) -> Tensor:
    """Masks of the highest-ranked patches, (B, S, N): none in the first step, all in the last."""
    N = heat_BN.shape[1]
    rank_BN = heat_BN.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    counts_S = torch.linspace(0, N, min(N, MAX_CURVE_POINTS) + 1).round().to(heat_BN.device)
    return (rank_BN[:, None] < counts_S[:, None]).float()


def area_under_curve(curve_BS: Tensor) -> Tensor:
    """Area under each curve over the unit interval."""
    return torch.trapezoid(curve_BS.double(), dx=1 / (curve_BS.shape[1] - 1), dim=1)


# ── pointing ─────────────────────────────────────────────────────────────────────────────────────────────────


def recognised_pairs(
    predictor: Predictor, pair_model: Model, split: Split, count: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Up to `count` pairs (B, C, H, 2W) with classes (B, 2) whose halves are each recognised with the other covered."""
    left, right = pairs_of_different_classes(split.labels, PAIRS_TO_TRY * count, rng)
    images = normalise_images(predictor, torch.cat([split.images[left], split.images[right]], dim=3))
    classes = torch.stack([split.labels[left], split.labels[right]], dim=1).to(images.device)
    in_right_half = torch.arange(images.shape[3], device=images.device) >= images.shape[3] // 2
    recognised = torch.ones(len(images), dtype=torch.bool, device=images.device)
    for side, shown in enumerate((~in_right_half, in_right_half)):
        if len(images):
            recognised &= batched_logits(pair_model, images * shown).argmax(dim=1) == classes[:, side]
    return images[recognised][:count], classes[recognised][:count]


def pairs_of_different_classes(labels_N: Tensor, count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of up to `count` pairs of images with different labels."""
    left, right = torch.randint(len(labels_N), (2, 3 * count + 1), generator=rng)
    differs = labels_N[left] != labels_N[right]
    return left[differs][:count], right[differs][:count]


def pointing_scores(heatmaps: HeatmapFn, pairs_BCHW: Tensor, classes_B2: Tensor) -> Tensor:
    """Scores (B,): 1 if the half of each class is marked more than the other, 1/2 if only one is."""
    half, hits = pairs_BCHW.shape[3] // 2, torch.zeros(len(pairs_BCHW), dtype=torch.float64)
    for side in (0, 1):
        heat = heatmaps(pairs_BCHW, classes_B2[:, side])
        halves = heat[..., :half].mean(dim=(1, 2)), heat[..., half:].mean(dim=(1, 2))
        more = (halves[side] - halves[1 - side]).sign().cpu()
        hits += (more + 1) / 4  # a tie counts half
    return hits


# ── helpers ──────────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def batched_logits(model: Model, images_BCHW: Tensor) -> Tensor:
    return torch.cat([model(images).float() for images in images_BCHW.split(MAX_BATCH_SIZE)])


def normalise_images(predictor: Predictor, images_BCHW: Tensor) -> Tensor:
    return predictor.model_config.preprocessing.normalise(images_BCHW.to(predictor.hardware.device))


def bootstrap_mean(values_N: Tensor, seed: int = 0) -> Interval:
    """Mean and the percentile bootstrap interval of the mean (95%)."""
    values = values_N.numpy()
    drawn = np.random.default_rng(seed).integers(len(values), size=(NUM_RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), [0.025, 0.975])
    return Interval(value=float(values.mean()), low=float(low), high=float(high))
