"""What are frozen features worth? Three simple classifiers on them, each with its uncertainty.

    nearest neighbours   the k most similar training images vote (cosine)
    linear               logistic regression, regularised
    least squares        from few images a class: the paper's quick measure (section 4.1), in closed form

Whatever is chosen is chosen without the test set.

Shapes:  N images   M images asked about   D features   K classes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.lazy_images import Pixels
from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.errors import VitralError
from vitral.evaluation.metrics import wilson
from vitral.models.vit import ViT

Method = Literal["nearest neighbours", "linear", "least squares"]
Labelled = tuple[Tensor, Tensor]  # features N D, labels N
Trial = tuple[Tensor, Tensor]  # which images to learn from, and which to judge the choice on

NEIGHBOURS = (1, 3, 5, 10, 20, 50, 100)
INVERSE_PENALTIES = tuple(10 ** (half / 2) for half in range(-8, 3))  # C from 0.0001 to 10, in half decades
PENALTY = 2.0**10  # of least squares: the constant of the paper's authors (big_vision, common_fewshot.py)
FOLDS = 5
FOLDS_SEED = 2010_11929


@torch.no_grad()
def features_of(
    model: ViT, images_NCHW: Pixels, preprocessing: Preprocessing, hardware: Hardware, batch: int = 64
) -> Tensor:
    """What the model's head would see of uint8 images: N D, fp32, in main memory."""
    if not len(images_NCHW):
        raise VitralError(
            "there are no images to compute features of",
            "of very few or very similar images none is held out: add some, or make a folder val",
        )
    found, was_training = [], model.training
    model.eval()
    try:
        for images in images_NCHW.split(batch):
            with hardware.autocast():
                features = model.features(preprocessing.normalise(images.to(hardware.device)))
            found.append(features.float().cpu())
    finally:
        model.train(was_training)
    return torch.cat(found)


@dataclass(frozen=True, kw_only=True)
class ProbeRow:
    """One classifier's result."""

    method: Method
    shots: int | None  # labelled images a class; None: all that there are
    images: int  # labelled images that it learned from
    accuracy: float  # on the test images; of least squares the mean over draws
    low: float  # 95 % interval: Wilson's over the test images; of least squares Student's over the draws
    high: float
    parameter: Literal["k", "C", "λ"]
    value: float

    @property
    def chosen(self) -> str:
        return f"{self.parameter} = {self.value:.3g}" if self.value < 1000 else f"{self.parameter} = {self.value:.0f}"


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What `probe` found: rows from the fewest images to the most."""

    rows: tuple[ProbeRow, ...]
    classes: tuple[str, ...]
    test_images: int
    seeds: int  # draws of each few-shot row
    chosen_on: Literal["validation", "cross-validation"]
    notes: tuple[str, ...] = ()  # what was left out, and why
    judged_on: Literal["test", "validation"] = "test"

    def as_dict(self) -> dict[str, Any]:
        from vitral.utils.serialization import to_plain

        plain: dict[str, Any] = to_plain(self)
        return plain


def probe(
    train: Labelled,
    validation: Labelled | None,
    test: Labelled,
    classes: tuple[str, ...],
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: int = 100,
) -> ProbeResult:
    """Nearest neighbours and a linear probe on all labelled images; least squares on a few of them, drawn anew by seed.

    k and C are chosen on `validation`, which is then learned from as well. Where a set has no images beyond training
    and test, `validation=None`: they are chosen by cross-validation inside `train`.
    """
    if seeds < 2:
        raise VitralError(f"seeds is {seeds}; an interval over draws needs at least 2", "leave it out for 100")
    if not shots or min(shots) < 1:
        raise VitralError(
            f"shots must be numbers of images a class, at least 1 each, not {tuple(shots)}",
            "leave it out for 1, 5, 10 and 25",
        )
    train = checked("training", train, classes, None)
    test = checked("test", test, classes, train[0].shape[1])
    if validation is None:
        known, trials = train, folds(train[1])
    else:
        validation = checked("validation", validation, classes, train[0].shape[1])
        known = torch.cat([train[0], validation[0]]), torch.cat([train[1], validation[1]])
        index = torch.arange(len(known[1]))
        trials = [(index[: len(train[1])], index[len(train[1]) :])]
    counts = torch.bincount(train[1], minlength=len(classes))
    if int((counts > 0).sum()) < 2:
        raise VitralError(
            "features can be probed with training images of two classes or more; here there is one",
            "one folder a class, two or more of them",
        )
    notes = [f"{classes[k]}: no training images" for k in (counts == 0).nonzero().flatten().tolist()]

    rows = []
    present = counts[counts > 0]
    rarest = classes[int(torch.where(counts > 0, counts, counts.max() + 1).argmin())]
    for n in sorted(set(shots)):
        if n > present.min():
            notes.append(f"{_a_class(n)}: left out, {rarest} has only {int(present.min())} in training")
            continue
        if n == present.max():
            notes.append(f"{_a_class(n)}: these are all, so that every draw is the same")
        rows.append(few_shots(train, test, len(classes), n, seeds))
    rows.append(nearest_neighbours(known, trials, test, len(classes)))
    rows.append(linear(known, trials, test, len(classes)))
    return ProbeResult(
        rows=tuple(rows),
        classes=classes,
        test_images=len(test[1]),
        seeds=seeds,
        chosen_on="cross-validation" if validation is None else "validation",
        notes=tuple(notes),
    )


def checked(split: str, data: Labelled, classes: tuple[str, ...], width: int | None) -> Labelled:
    """Features as fp32 and labels in main memory, or a sentence about what is wrong with them."""
    features, labels = data[0].detach().cpu().float(), data[1].detach().cpu().long()
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        shapes = f"{tuple(features.shape)} and {tuple(labels.shape)}"
        raise VitralError(
            f"{split}: features must be images × width with one label an image, not {shapes}",
            "Predictor.features makes them",
        )
    if not len(labels):
        raise VitralError(f"there are no {split} images", "vitral doctor FOLDER says what is there")
    if width is not None and features.shape[1] != width:
        raise VitralError(
            f"{split} features have width {features.shape[1]}, training features {width}",
            "take all of them from one model",
        )
    if not features.isfinite().all():
        raise VitralError(f"some {split} features are not finite numbers", "The model's weights may be damaged")
    if strange := labels[(labels < 0) | (labels >= len(classes))].unique().tolist():
        raise VitralError(
            f"there are {split} labels outside the {len(classes)} classes: {', '.join(map(str, strange[:5]))}",
            "labels are counted from 0",
        )
    return features, labels


def folds(labels_N: Tensor) -> list[Trial]:
    """Each image is judged in one trial and learned from in the others; every class is dealt out evenly."""
    N = len(labels_N)
    shuffled = torch.from_numpy(np.random.RandomState(FOLDS_SEED).permutation(N))
    dealt = shuffled[labels_N[shuffled].argsort(stable=True)]  # class by class, each in random order
    fold_N = torch.empty_like(dealt)
    fold_N[dealt] = torch.arange(N) % FOLDS
    held_out = [fold_N == fold for fold in range(min(FOLDS, N))]
    return [((~held).nonzero().flatten(), held.nonzero().flatten()) for held in held_out]


def standardised(fitted_ND: Tensor, *others_MD: Tensor) -> tuple[Tensor, ...]:
    """Mean 0 and deviation 1 of each feature over the first of them; a feature that does not vary is left unscaled."""
    exact = fitted_ND.double()
    mean, deviation = exact.mean(dim=0), exact.std(dim=0, correction=0)
    scale = torch.where(deviation > 1e-6 * deviation.max(), deviation, 1.0)
    return tuple(((features - mean) / scale).to(features.dtype) for features in (fitted_ND, *others_MD))


def centred(fitted_ND: Tensor, *others_MD: Tensor) -> tuple[Tensor, ...]:
    """Mean 0 of each feature over the first of them, mean square 1 over all features together.

    The paper's authors divide each feature by its own deviation: fine with a thousand classes, but over two images it
    says nothing. One ant and one bee then gave 53 % instead of 91 %, one image of each class of CIFAR-10 54 % instead
    of 59 %; from 10 images a class on, the two ways differed by less than 1 % (an ImageNet Ti/16, 20 draws).
    """
    mean = fitted_ND.mean(dim=0)
    size = (fitted_ND - mean).square().mean().sqrt()
    return tuple((features - mean) / (size if size > 0 else 1.0) for features in (fitted_ND, *others_MD))


# Nearest neighbours


def nearest_neighbours(known: Labelled, trials: Sequence[Trial], test: Labelled, K: int) -> ProbeRow:
    """The k that is right most often in the trials (of equals the smallest), then asked about the test images."""
    features, labels = known
    candidates = [k for k in NEIGHBOURS if k <= min(len(learned) for learned, _ in trials)]
    right = dict.fromkeys(candidates, 0)
    for learned, judged in trials:
        similar, index = neighbours(features[learned], features[judged], candidates[-1])
        for k in candidates:
            said = vote(similar[:, :k], labels[learned][index[:, :k]], K)
            right[k] += int((said == labels[judged]).sum())
    best = max(candidates, key=lambda k: right[k])
    similar, index = neighbours(features, test[0], best)
    return whole("nearest neighbours", vote(similar, labels[index], K), known, test, "k", best)


def neighbours(bank_ND: Tensor, asked_MD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Cosine similarity and index of the k most similar rows of the bank, the most similar first: M k each."""
    bank, asked = F.normalize(bank_ND, dim=1), F.normalize(asked_MD, dim=1)
    rows = max(2**25 // len(bank), 1)  # at most 128 MB of similarities at a time
    found = [(part @ bank.T).topk(k, dim=1) for part in asked.split(rows)]
    return torch.cat([values for values, _ in found]), torch.cat([index for _, index in found])


def vote(similar_Mk: Tensor, labels_Mk: Tensor, K: int) -> Tensor:
    """One vote a neighbour; between classes with as many votes the similarity decides."""
    k = labels_Mk.shape[1]
    weights = 1 + similar_Mk.double() / (3 * k)  # similarities are in -1…1: together they never outweigh a vote
    return torch.zeros(len(labels_Mk), K, dtype=weights.dtype).scatter_add_(1, labels_Mk, weights).argmax(dim=1)


# Linear


def linear(known: Labelled, trials: Sequence[Trial], test: Labelled, K: int) -> ProbeRow:
    """Logistic regression with the C that the trials chose, fitted to all known images."""
    C = best_penalty(known, trials, K)
    x_ND, x_MD = standardised(known[0], test[0])
    weights = logistic(x_ND, known[1], K, C)
    return whole("linear", (x_MD @ weights[:-1] + weights[-1]).argmax(dim=1), known, test, "C", C)


def linear_head(known: Labelled, K: int) -> tuple[Tensor, Tensor]:
    """The same as a layer on the features as they are: K D and K. C is chosen by cross-validation inside `known`."""
    features, labels = known
    C = best_penalty(known, folds(labels), K)
    weights = logistic(standardised(features)[0], labels, K, C)
    # x ↦ (x − mean) / deviation is affine: what it does to nothing and to each unit vector says which.
    units = torch.eye(features.shape[1], dtype=torch.float64)
    _, shift, scaled = standardised(features, torch.zeros_like(units[:1]), units)
    scale = (scaled - shift).diagonal()
    exact = weights.double()
    return (scale[:, None] * exact[:-1]).T.float(), (shift @ exact[:-1] + exact[-1])[0].float()


def best_penalty(known: Labelled, trials: Sequence[Trial], K: int) -> float:
    """The C that is right most often in the trials; of equals the least surprised.

    From strong to weak regularisation, each fit starts where the one before ended; the sweep ends where two in a row
    were both less often right and more surprised than the best before them.
    """
    features, labels = known
    found: list[Tensor | None] = [None for _ in trials]
    best, past = (-1, -math.inf, 0.0), 0  # how many right, minus the surprise, C
    for C in INVERSE_PENALTIES:
        right, surprise = 0, 0.0
        for trial, (learned, judged) in enumerate(trials):
            x_ND, x_MD = standardised(features[learned], features[judged])
            found[trial] = weights = logistic(x_ND, labels[learned], K, C, found[trial])
            logits = x_MD @ weights[:-1] + weights[-1]
            right += int((logits.argmax(dim=1) == labels[judged]).sum())
            surprise += F.cross_entropy(logits, labels[judged], reduction="sum").item()
        past = past + 1 if right < best[0] and -surprise < best[1] else 0
        best = max(best, (right, -surprise, C))
        if past == 2:
            break
    return best[2]


def logistic(x_ND: Tensor, labels_N: Tensor, K: int, C: float, start: Tensor | None = None) -> Tensor:
    """The minimum of C·Σ cross-entropy + ½‖W‖²: D+1 K, the bias, which is not regularised, in the last row."""
    N, D = x_ND.shape
    weights = (x_ND.new_zeros(D + 1, K) if start is None else start.clone()).requires_grad_()
    search = torch.optim.LBFGS(
        [weights], max_iter=1000, tolerance_grad=1e-5, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )

    def loss() -> float:
        with torch.enable_grad():
            mistakes = F.cross_entropy(x_ND @ weights[:-1] + weights[-1], labels_N)
            total = mistakes + weights[:-1].square().sum() / (2 * C * N)
            (weights.grad,) = torch.autograd.grad(total, weights)
        return total.item()

    search.step(loss)
    return weights.detach()


# Least squares


def few_shots(train: Labelled, test: Labelled, K: int, shots: int, seeds: int) -> ProbeRow:
    """Regularised least squares from a few images a class, over several draws of them."""
    accuracies = []
    for seed in range(seeds):
        drawn = draw(train[1], shots, seed)
        x_ND, x_MD = centred(train[0][drawn].double(), test[0].double())
        weights, bias = least_squares(x_ND, train[1][drawn], K, PENALTY)
        accuracies.append(share_right((x_MD @ weights + bias).argmax(dim=1), test[1]))
    accuracy, low, high = over_draws(accuracies)
    return ProbeRow(
        method="least squares",
        shots=shots,
        images=len(drawn),
        accuracy=accuracy,
        low=low,
        high=high,
        parameter="λ",
        value=PENALTY,
    )


def draw(labels_N: Tensor, shots: int, seed: int) -> Tensor:
    """Which images: `shots` of each class that has images. The 5 of a seed are among its 10, and so on."""
    random = np.random.RandomState(seed)
    members = [np.flatnonzero(labels_N.numpy() == label) for label in labels_N.unique().tolist()]
    return torch.from_numpy(np.concatenate([random.permutation(of_class)[:shots] for of_class in members]))


def least_squares(x_ND: Tensor, labels_N: Tensor, K: int, penalty: float) -> tuple[Tensor, Tensor]:
    """The minimum of ‖X·W + b − Y‖² + λ‖W‖² with Y = ±1, exactly: W, D K, and b, K, which is not regularised.

    W = (XᵀX + λI)⁻¹XᵀY = Xᵀ(XXᵀ + λI)⁻¹Y of centred X and Y: D or N equations, whichever are fewer.
    """
    N, D = x_ND.shape
    y_NK = 2 * F.one_hot(labels_N, K).to(x_ND) - 1
    x_mean, y_mean = x_ND.mean(dim=0), y_NK.mean(dim=0)
    x, y = x_ND - x_mean, y_NK - y_mean
    ridge = penalty * torch.eye(min(N, D), dtype=x.dtype)
    weights = torch.linalg.solve(x.T @ x + ridge, x.T @ y) if D <= N else x.T @ torch.linalg.solve(x @ x.T + ridge, y)
    return weights, y_mean - x_mean @ weights


def over_draws(accuracies: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the 95 % interval of it (Student, 1908)."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    n = len(accuracies)
    mean = math.fsum(accuracies) / n
    half = float(stdtrit(n - 1, 0.975)) * float(np.std(accuracies, ddof=1)) / math.sqrt(n)
    return mean, max(mean - half, 0.0), min(mean + half, 1.0)


# Rows


def whole(
    method: Method, said_M: Tensor, known: Labelled, test: Labelled, parameter: Literal["k", "C"], value: float
) -> ProbeRow:
    """The row of a classifier that learned from all known images."""
    accuracy = share_right(said_M, test[1])
    low, high = wilson(accuracy, len(said_M))
    return ProbeRow(
        method=method,
        shots=None,
        images=len(known[1]),
        accuracy=accuracy,
        low=low,
        high=high,
        parameter=parameter,
        value=value,
    )


def share_right(said_M: Tensor, labels_M: Tensor) -> float:
    return (said_M == labels_M).double().mean().item()


def _a_class(shots: int) -> str:
    return f"{shots} image{'s' if shots > 1 else ''} a class"
