"""Selective prediction: how the error rate falls when low-confidence images are rejected.

Shapes:  N images, sorted by descending confidence   R resamples
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.utils.intervals import Interval, proportion_interval

MAX_CURVE_POINTS = 100


@dataclass(frozen=True, kw_only=True)
class RiskCoverage:
    """Risk-coverage curve (arXiv 1705.08500)."""

    aurc: float  # area under the curve: mean error rate over all coverages
    optimal_aurc: float  # if every error had a lower confidence than every correct prediction
    coverage: tuple[float, ...]  # share of the images above the threshold
    risk: tuple[float, ...]  # error rate among them


@dataclass(frozen=True, kw_only=True)
class ConfidenceThreshold:
    """Confidence threshold for a maximum error rate, chosen on the validation images."""

    max_error: float
    confidence: float | None  # the threshold; None if no threshold reaches this error rate
    coverage: Interval | None  # on the evaluated images
    error_rate: Interval | None  # among the evaluated images above the threshold


def risk_coverage(confidence_N: Tensor, correct_N: Tensor) -> RiskCoverage:
    risk = risk_curve(sort_by_confidence(confidence_N, correct_N))
    optimal_risk = risk_curve(correct_N.double().sort(descending=True).values)
    N = len(risk)
    points = (torch.arange(1, min(MAX_CURVE_POINTS, N) + 1) * N // min(MAX_CURVE_POINTS, N)) - 1
    return RiskCoverage(
        aurc=risk.mean().item(),
        optimal_aurc=optimal_risk.mean().item(),
        coverage=tuple(((points + 1) / N).tolist()),
        risk=tuple(risk[points].tolist()),
    )


def sort_by_confidence(confidence_N: Tensor, correct_N: Tensor) -> Tensor:
    """Correctness (N,) in order of descending confidence. Images with equal confidence get their mean correctness."""
    order = confidence_N.argsort(descending=True, stable=True)
    correct, confidence = correct_N.double()[order], confidence_N[order]
    _, group, sizes = confidence.unique_consecutive(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, group, correct)
    return (sums / sizes)[group]


def risk_curve(correct_N: Tensor) -> Tensor:
    """Error rate among the first 1, 2, …, N images."""
    return (1 - correct_N).cumsum(0) / torch.arange(1, len(correct_N) + 1)


def resampled_aurc(counts_RN: Tensor, correct_N: Tensor) -> Tensor:
    """AURC (R,) of resamples of images sorted by descending confidence."""
    covered = counts_RN.cumsum(dim=1)
    errors = (counts_RN * (1 - correct_N)).cumsum(dim=1)
    return (counts_RN * errors / covered.clamp_min(1)).sum(dim=1) / counts_RN.sum(dim=1)


def find_threshold(confidence_N: Tensor, correct_N: Tensor, max_error: float) -> float | None:
    """The lowest confidence at or above which at most a share `max_error` of the predictions is wrong."""
    if not 0 < max_error < 1:
        raise VitralError(
            f"the maximum error rate must be between 0 and 1, got {max_error}",
            "0.01 means that one prediction in a hundred may be wrong",
        )
    order = confidence_N.argsort(descending=True)
    confidence = confidence_N[order]
    risk = risk_curve(correct_N.double()[order])
    is_last_of_ties = torch.cat([confidence[1:] < confidence[:-1], torch.ones(1, dtype=torch.bool)])
    valid = (is_last_of_ties & (risk <= max_error)).nonzero().flatten()
    return confidence[valid[-1]].item() if len(valid) else None


def evaluate_threshold(
    max_error: float, validation: tuple[Tensor, Tensor], evaluated: tuple[Tensor, Tensor]
) -> ConfidenceThreshold:
    """Choose a threshold on the validation images and measure coverage and error rate on the evaluated images.

    Both are pairs of confidence and correctness, (N,) each.
    """
    threshold = find_threshold(*validation, max_error)
    if threshold is None:
        return ConfidenceThreshold(max_error=max_error, confidence=None, coverage=None, error_rate=None)
    confidence_N, correct_N = evaluated
    covered = confidence_N >= threshold
    num_covered, num_errors = int(covered.sum()), int((~correct_N.bool())[covered].sum())
    return ConfidenceThreshold(
        max_error=max_error,
        confidence=threshold,
        coverage=proportion_interval(num_covered, len(covered)),
        error_rate=proportion_interval(num_errors, num_covered) if num_covered else None,
    )
