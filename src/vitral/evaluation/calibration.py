"""Fit the calibration of a model: temperature scaling, the OOD threshold and prediction sets.

Shapes:  N images   K classes
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from vitral.errors import VitralError
from vitral.evaluation.conformal import DEFAULT_COVERAGE, fit_prediction_sets
from vitral.models.calibration import Calibration, LogitScore, id_score

FALSE_POSITIVE_RATE = 0.01  # share of in-distribution images that may be flagged as OOD
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
MIN_IMAGES = 20  # for fitting a temperature; the optimum of fewer images is noise


def fit_calibration(
    logits_NK: Tensor,
    labels_N: Tensor,
    *,
    score: LogitScore = "energy",
    false_positive_rate: float = FALSE_POSITIVE_RATE,
    coverage: float = DEFAULT_COVERAGE,
    engine: str = "fp32",
) -> Calibration:
    """Fit temperature, OOD threshold and prediction sets on validation images, which must not be training images.

    With few images the temperature stays 1, and there is no OOD threshold and no prediction set. `engine` names the
    engine of the logits.
    """
    logits_NK, labels_N = logits_NK.detach().double().cpu(), labels_N.cpu()
    calibration = Calibration(
        temperature=fit_temperature(logits_NK, labels_N) if len(logits_NK) >= MIN_IMAGES else 1.0,
        ood_score=score,
        ood_threshold=fit_ood_threshold(id_score(logits_NK, score), false_positive_rate),
        engine=engine,
    )
    sets = fit_prediction_sets(calibration.probabilities(logits_NK), labels_N, coverage)
    return replace(calibration, prediction_sets=sets)


def fit_temperature(logits_NK: Tensor, labels_N: Tensor) -> float:
    """The temperature T that minimises the mean cross-entropy of softmax(logits / T) (arXiv 1706.04599).

    The cross-entropy is convex in β = 1/T, so its minimum is where the slope is zero: Newton steps, with bisection
    where they leave the bracket. Without a single error the slope is negative down to T = 0; the labels are then
    smoothed by 1/(N+2) (Platt, 1999), because the next image may be the first error.
    """
    N, K = logits_NK.shape
    z = logits_NK.double() - logits_NK.double().amax(dim=1, keepdim=True)
    all_correct = bool((z.argmax(dim=1) == labels_N).all())
    smoothing = 1 / (N + 2) if all_correct else 0.0
    targets = F.one_hot(labels_N, K).double() * (1 - smoothing) + smoothing / K
    target_mean = (targets * z).sum(dim=1).mean()
    low, high, beta = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE, 1.0
    for _ in range(100):
        p = (beta * z).softmax(dim=1)
        mean_N = (p * z).sum(dim=1)
        slope = (mean_N.mean() - target_mean).item()
        low, high = (beta, high) if slope < 0 else (low, beta)
        curvature = ((p * z.square()).sum(dim=1) - mean_N.square()).mean().item()
        newton = beta - slope / curvature if curvature > 0 else math.nan
        next_beta = newton if low < newton < high else (low + high) / 2
        if abs(next_beta - beta) <= 1e-10 * beta:
            break
        beta = next_beta
    return 1 / beta


def min_validation_images(false_positive_rate: float = FALSE_POSITIVE_RATE) -> int:
    """Number of validation images from which on `fit_ood_threshold` finds a threshold."""
    return math.ceil(1 / false_positive_rate) - 1


def fit_ood_threshold(scores_N: Tensor, false_positive_rate: float) -> float | None:
    """The in-distribution score below which an image is flagged as OOD.

    The next in-distribution image falls below the k-th smallest of N scores (k from 0) with probability
    (k+1)/(N+1), which must not exceed `false_positive_rate`. None if N is too small for any threshold.
    """
    if not 0 < false_positive_rate < 1:
        raise VitralError(
            f"the false-positive rate must be between 0 and 1, got {false_positive_rate}",
            "0.01 means one image in a hundred",
        )
    index = math.floor(false_positive_rate * (len(scores_N) + 1)) - 1
    return scores_N.sort().values[index].item() if index >= 0 else None
