"""Classifiers on frozen features: k-nearest neighbours, logistic regression and least squares.

All of them compute on the device of the features.

Shapes:  N training images   M evaluated images   D features   K classes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.utils.eager_optimizer import LBFGS

LabelledFeatures = tuple[Tensor, Tensor]  # features (N, D), labels (N,)
ScaleFn = Callable[..., tuple[Tensor, ...]]  # features to fit on, and others: both scaled by the former
Fold = tuple[Tensor, Tensor]  # indices of the images to fit on, and of those to evaluate on

NEIGHBOUR_COUNTS = (1, 3, 5, 10, 20, 50, 100)
INVERSE_PENALTIES = tuple(10 ** (half / 2) for half in range(-8, 3))  # C from 0.0001 to 10, in half decades
NUM_FOLDS = 5
FOLDS_SEED = 2010_11929
MAX_SIMILARITIES = 2**25  # computed at a time, 128 MB
MAX_FOLD_IMAGES = 10_000  # with more, hyperparameters are cross-validated on a part of the images


def stratified_folds(labels_N: Tensor) -> list[Fold]:
    """Cross-validation folds: each image is evaluated in one fold, and every class is spread evenly over them.

    Of more than MAX_FOLD_IMAGES images, an even share of every class is used and the others are in no fold.
    """
    N, labels = len(labels_N), labels_N.cpu()
    shuffled = torch.from_numpy(np.random.RandomState(FOLDS_SEED).permutation(N))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]  # class by class, each in random order
    if N > MAX_FOLD_IMAGES:
        by_class = by_class[torch.arange(MAX_FOLD_IMAGES) * N // MAX_FOLD_IMAGES]
    fold_N = torch.full((N,), -1)
    fold_N[by_class] = torch.arange(len(by_class)) % NUM_FOLDS
    folds = range(min(NUM_FOLDS, N))
    rows = [((fold_N >= 0) & (fold_N != fold), fold_N == fold) for fold in folds]
    return [
        (fitted.nonzero().flatten().to(labels_N.device), evaluated.nonzero().flatten().to(labels_N.device))
        for fitted, evaluated in rows
    ]


def standardise(fitted_ND: Tensor, *others_MD: Tensor) -> tuple[Tensor, ...]:
    """Scale to mean 0 and standard deviation 1 per feature of `fitted_ND`. Constant features are not scaled."""
    exact = fitted_ND.double()
    mean, std = exact.mean(dim=0), exact.std(dim=0, correction=0)
    scale = torch.where(std > 1e-6 * std.max(), std, 1.0)
    return tuple(((features - mean) / scale).to(features.dtype) for features in (fitted_ND, *others_MD))


def centre_and_scale(fitted_ND: Tensor, *others_MD: Tensor) -> tuple[Tensor, ...]:
    """Centre each feature of `fitted_ND` and scale all features by one factor to a mean square of 1.

    The paper's authors divide each feature by its own standard deviation. That works with a thousand classes, but with
    one image per class the deviations are meaningless: ants and bees reached 53% instead of 91%, CIFAR-10 54% instead
    of 59%. From 10 images per class on, both methods differed by less than 1% (ImageNet Ti/16, 20 draws).
    """
    mean = fitted_ND.mean(dim=0)
    scale = (fitted_ND - mean).square().mean().sqrt()
    return tuple((features - mean) / (scale if scale > 0 else 1.0) for features in (fitted_ND, *others_MD))


# k-nearest neighbours


def select_neighbour_count(data: LabelledFeatures, folds: Sequence[Fold], K: int) -> int:
    """The k with the most correct predictions over the folds; the smallest of equals."""
    features, labels = data
    candidates = [k for k in NEIGHBOUR_COUNTS if k <= min(len(fitted) for fitted, _ in folds)]
    num_correct = dict.fromkeys(candidates, 0)
    for fitted, evaluated in folds:
        similarity, index = neighbours(features[fitted], features[evaluated], candidates[-1])
        for k in candidates:
            predicted = vote(similarity[:, :k], labels[fitted][index[:, :k]], K)
            num_correct[k] += int((predicted == labels[evaluated]).sum())
    return max(candidates, key=lambda k: num_correct[k])


def leave_one_out_accuracy(features_ND: Tensor, labels_N: Tensor, K: int, k: int = 20) -> float:
    """Accuracy of k-NN if each image is classified by its k most similar other images, on the CPU."""
    N = len(labels_N)
    k = min(k, N - 1)
    similarity, index = neighbours(features_ND, features_ND, k + 1)
    is_self = index == torch.arange(N)[:, None]
    is_self[~is_self.any(dim=1), -1] = True  # an image with k + 1 exact copies may not be among its own neighbours
    others = (~is_self).nonzero()[:, 1].view(N, k)
    predicted = vote(similarity.gather(1, others), labels_N[index.gather(1, others)], K)
    return (predicted == labels_N).double().mean().item()


def neighbours(bank_ND: Tensor, queries_MD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Cosine similarity and index of the k most similar rows of the bank, most similar first, (M, k) each."""
    bank, queries = F.normalize(bank_ND, dim=1), F.normalize(queries_MD, dim=1)
    rows = max(MAX_SIMILARITIES // len(bank), 1)
    results = [(batch @ bank.T).topk(k, dim=1) for batch in queries.split(rows)]
    return torch.cat([values for values, _ in results]), torch.cat([index for _, index in results])


def vote(similarity_Mk: Tensor, labels_Mk: Tensor, K: int) -> Tensor:
    """Majority vote (M,); the similarity decides between classes with equally many votes."""
    k = labels_Mk.shape[1]
    weights = 1 + similarity_Mk.double() / (3 * k)  # similarities are in [-1, 1]: together they never outweigh a vote
    return weights.new_zeros(len(labels_Mk), K).scatter_add_(1, labels_Mk, weights).argmax(dim=1)


# Logistic regression


def fit_linear_head(data: LabelledFeatures, K: int) -> tuple[Tensor, Tensor]:
    """Weight (K, D) and bias (K,) of a linear layer on raw features. C is chosen by cross-validation."""
    features, labels = data
    C = select_penalty(data, stratified_folds(labels), K)
    weights = fit_logistic_regression(standardise(features)[0], labels, K, C)
    # Standardisation is affine: its values at zero and at the unit vectors determine shift and scale.
    units = torch.eye(features.shape[1], dtype=torch.float64, device=features.device)
    _, shift, scaled = standardise(features, torch.zeros_like(units[:1]), units)
    scale = (scaled - shift).diagonal()
    exact = weights.double()
    return (scale[:, None] * exact[:-1]).T.float(), (shift @ exact[:-1] + exact[-1])[0].float()


def select_penalty(data: LabelledFeatures, folds: Sequence[Fold], K: int, scale: ScaleFn = standardise) -> float:
    """The C with the most correct predictions over the folds; of equals, the one with the lowest cross-entropy.

    Goes from strong to weak regularisation, each fit starting from the previous one. Stops when two values in a row
    have fewer correct predictions and a higher cross-entropy than the best.
    """
    features, labels = data
    scaled = [scale(features[fitted], features[evaluated]) for fitted, evaluated in folds]
    fitted_weights: list[Tensor | None] = [None for _ in folds]
    best, num_worse = (-1, -math.inf, 0.0), 0  # correct predictions, negative cross-entropy, C
    for C in INVERSE_PENALTIES:
        num_correct, cross_entropy = 0, 0.0
        for fold, (fitted, evaluated) in enumerate(folds):
            x_ND, x_MD = scaled[fold]
            weights = fit_logistic_regression(x_ND, labels[fitted], K, C, fitted_weights[fold])
            fitted_weights[fold] = weights
            logits = x_MD @ weights[:-1] + weights[-1]
            num_correct += int((logits.argmax(dim=1) == labels[evaluated]).sum())
            cross_entropy += F.cross_entropy(logits, labels[evaluated], reduction="sum").item()
        num_worse = num_worse + 1 if num_correct < best[0] and -cross_entropy < best[1] else 0
        best = max(best, (num_correct, -cross_entropy, C))
        if num_worse == 2:
            break
    return best[2]


def fit_logistic_regression(x_ND: Tensor, labels_N: Tensor, K: int, C: float, start: Tensor | None = None) -> Tensor:
    """Minimise C·Σ cross-entropy + ½‖W‖². Returns (D+1, K) with the unregularised bias in the last row."""
    N, D = x_ND.shape
    initial = x_ND.new_zeros(D + 1, K) if start is None else start
    # As (K, D), autograd computes the gradient as Gᵀ·X, which a CPU does 8 times as fast as Xᵀ·G for few classes.
    weight, bias = initial[:-1].T.clone(memory_format=torch.contiguous_format), initial[-1].clone()
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    optimizer = LBFGS(
        parameters, max_iter=1000, tolerance_grad=1e-5, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        with torch.enable_grad():
            loss = F.cross_entropy(F.linear(x_ND, weight, bias), labels_N) + weight.square().sum() / (2 * C * N)
            weight.grad, bias.grad = torch.autograd.grad(loss, parameters)
        return loss.item()

    optimizer.step(closure)
    return torch.cat([weight.detach().T, bias.detach()[None]])


# Least squares


def sample_shots(labels_N: Tensor, shots: int, seed: int) -> Tensor:
    """Indices of `shots` images per class that has images. The 5 of a seed are among its 10, and so on."""
    random = np.random.RandomState(seed)
    labels = labels_N.cpu().numpy()
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    drawn = np.concatenate([random.permutation(of_class)[:shots] for of_class in members])
    return torch.from_numpy(drawn).to(labels_N.device)


def least_squares(x_ND: Tensor, labels_N: Tensor, K: int, penalty: float) -> tuple[Tensor, Tensor]:
    """Minimise ‖X·W + b − Y‖² + λ‖W‖² with Y = ±1, in closed form. Returns W (D, K) and the unregularised b (K,).

    W = (XᵀX + λI)⁻¹XᵀY = Xᵀ(XXᵀ + λI)⁻¹Y for centred X and Y: D or N equations, whichever are fewer.
    """
    N, D = x_ND.shape
    y_NK = 2 * F.one_hot(labels_N, K).to(x_ND) - 1
    x_mean, y_mean = x_ND.mean(dim=0), y_NK.mean(dim=0)
    x, y = x_ND - x_mean, y_NK - y_mean
    ridge = penalty * torch.eye(min(N, D), dtype=x.dtype, device=x.device)
    weights = torch.linalg.solve(x.T @ x + ridge, x.T @ y) if D <= N else x.T @ torch.linalg.solve(x @ x.T + ridge, y)
    return weights, y_mean - x_mean @ weights
