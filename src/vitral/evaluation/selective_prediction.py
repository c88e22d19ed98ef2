"""Answering only when sure: how the share of mistakes falls with the share of images that get an answer.

Shapes:  N images, the surest first
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.evaluation.bootstrap import Interval
from vitral.evaluation.metrics import wilson

POINTS = 100  # of the curve that is kept


@dataclass(frozen=True, kw_only=True)
class Selective:
    """The risk–coverage curve (arXiv 1705.08500)."""

    aurc: float  # area under it: the mean share of mistakes over all coverages
    best_aurc: float  # if every mistake were less sure than every right answer
    coverage: tuple[float, ...]  # share of the images that are answered
    risk: tuple[float, ...]  # share of mistakes among those


@dataclass(frozen=True, kw_only=True)
class AnswerAt:
    """From what confidence on to answer, for a wished-for share of mistakes. Chosen on the validation images."""

    wished: float
    confidence: float | None  # None: at no confidence are so few answers wrong
    coverage: Interval | None  # on the images asked about
    error: Interval | None  # among those answered


def selective(confidence_N: Tensor, right_N: Tensor) -> Selective:
    risk = risk_curve(surest_first(confidence_N, right_N))
    best = risk_curve(right_N.double().sort(descending=True).values)
    N = len(risk)
    places = (torch.arange(1, min(POINTS, N) + 1) * N // min(POINTS, N)) - 1
    return Selective(
        aurc=risk.mean().item(),
        best_aurc=best.mean().item(),
        coverage=tuple(((places + 1) / N).tolist()),
        risk=tuple(risk[places].tolist()),
    )


def surest_first(confidence_N: Tensor, right_N: Tensor) -> Tensor:
    """Ones where the answer is right; among equally sure ones, the mistakes spread evenly: their mean."""
    order = confidence_N.argsort(descending=True, stable=True)
    right, confidence = right_N.double()[order], confidence_N[order]
    _, group, sizes = confidence.unique_consecutive(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, group, right)
    return (sums / sizes)[group]


def risk_curve(right_N: Tensor) -> Tensor:
    """Share of mistakes among the first 1, 2, … N."""
    return (1 - right_N).cumsum(0) / torch.arange(1, len(right_N) + 1)


def aurc_of(counts_RN: Tensor, right_N: Tensor) -> Tensor:
    """The area for resamples of images that stand surest first: R."""
    answered = counts_RN.cumsum(dim=1)
    wrong = (counts_RN * (1 - right_N)).cumsum(dim=1)
    return (counts_RN * wrong / answered.clamp_min(1)).sum(dim=1) / counts_RN.sum(dim=1)


def answer_from(confidence_N: Tensor, right_N: Tensor, wished: float) -> float | None:
    """The lowest confidence such that among the images at least so sure at most a share `wished` is wrong."""
    if not 0 < wished < 1:
        raise VitralError(
            f"the wished-for share of mistakes must be above 0 and below 1, not {wished}",
            "0.01: one answer in a hundred may be wrong",
        )
    order = confidence_N.argsort(descending=True)
    confidence = confidence_N[order]
    risk = risk_curve(right_N.double()[order])
    last_of_equals = torch.cat([confidence[1:] < confidence[:-1], torch.ones(1, dtype=torch.bool)])
    good = (last_of_equals & (risk <= wished)).nonzero().flatten()
    return confidence[good[-1]].item() if len(good) else None


def answer_at(wished: float, validation: tuple[Tensor, Tensor], asked: tuple[Tensor, Tensor]) -> AnswerAt:
    """Confidence and rightness of the validation images choose; those of the asked images say what it is worth."""
    least = answer_from(*validation, wished)
    if least is None:
        return AnswerAt(wished=wished, confidence=None, coverage=None, error=None)
    confidence_N, right_N = asked
    answered = confidence_N >= least
    return AnswerAt(
        wished=wished,
        confidence=least,
        coverage=share(int(answered.sum()), len(answered)),
        error=share(int((~right_N.bool())[answered].sum()), int(answered.sum())) if answered.any() else None,
    )


def share(some: int, all: int) -> Interval:
    """With Wilson's interval: the bootstrap's is empty where nothing or everything is meant."""
    low, high = wilson(some / all, all)
    return Interval(value=some / all, low=low, high=high)
