"""All that a model's answers say about it: how good it is, how sure, how robust, and whether it knows its limits.

Shapes:  N images   K classes   R resamples
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from vitral.evaluation.bootstrap import Interval, between, bootstrap, intervals
from vitral.evaluation.calibration import Calibration
from vitral.evaluation.metrics import Metrics, measure
from vitral.evaluation.ood import Unknown
from vitral.evaluation.reliability import Reliability, membership, reliability, squared, surprise
from vitral.evaluation.robustness import Robustness
from vitral.evaluation.selective_prediction import AnswerAt, Selective, aurc_of, selective, share, surest_first


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The figures people quote, of the calibrated probabilities, with 95 % intervals: Wilson's for what is counted
    (accuracy and top-5, as everywhere), over 1,000 bootstrap resamples for the others."""

    accuracy: Interval
    top5: Interval
    macro_f1: Interval  # mean over the classes that occur
    nll: Interval
    brier: Interval
    ece: Interval
    aurc: Interval


@dataclass(frozen=True, kw_only=True)
class Evaluation(Metrics):
    """What an evaluation found, and how far to trust it."""

    headline: Headline
    temperature: float
    raw: Reliability  # softmax(logits)
    calibrated: Reliability  # softmax(logits / temperature)
    selective: Selective
    answer_at: AnswerAt | None = None
    unknown: Unknown | None = None
    robustness: Robustness | None = None
    split: str = "test"
    fitted_on: str = "the validation images"  # temperature and threshold


def assess(
    logits_NK: Tensor,
    labels_N: Tensor,
    classes: tuple[str, ...],
    calibration: Calibration,
    *,
    answer_at: AnswerAt | None = None,
    unknown: Unknown | None = None,
    robustness: Robustness | None = None,
    split: str = "test",
) -> Evaluation:
    """Everything that logits and labels say; what needs more forward passes is handed in."""
    metrics = measure(logits_NK, labels_N, classes)
    logits, labels = logits_NK.double().cpu(), labels_N.cpu()
    p = calibration.probabilities(logits)
    confidence, said = p.max(dim=1)
    return Evaluation(
        **{field.name: getattr(metrics, field.name) for field in fields(metrics)},
        headline=headline(p, labels),
        temperature=calibration.temperature,
        raw=reliability(logits.softmax(dim=1), labels),
        calibrated=reliability(p, labels),
        selective=selective(confidence, said == labels),
        answer_at=answer_at,
        unknown=unknown,
        robustness=robustness,
        split=split,
        fitted_on=calibration.fitted_on,
    )


def headline(p_NK: Tensor, labels_N: Tensor) -> Headline:
    """All of them from the same resamples: means are a product with the counts, class sums too, areas a running sum."""
    N, K = p_NK.shape
    order = p_NK.amax(dim=1).argsort(descending=True, stable=True)
    p, labels = p_NK[order], labels_N[order]
    confidence, said = p.max(dim=1)
    right = (said == labels).double()
    smooth = surest_first(confidence, right).float()
    among5 = (p.topk(min(5, K), dim=1).indices == labels[:, None]).any(dim=1)
    means_NV = torch.stack([right, among5.double(), surprise(p, labels), squared(p, labels)], dim=1).float()
    gap_Nb = (membership(confidence) * (confidence - right)[:, None]).float()

    def figures(counts_RN: Tensor) -> Tensor:
        accuracy, top5, nll, brier = (counts_RN @ means_NV / N).double().unbind(1)
        ece = (counts_RN @ gap_Nb).double().abs().sum(dim=1) / N
        f1 = macro_f1(counts_RN, labels, said, K)
        return torch.stack([accuracy, top5, f1, nll, brier, ece, aurc_of(counts_RN, smooth).double()], dim=1)

    values, samples = figures(torch.ones(1, N))[0], bootstrap(figures, N)
    found = dict(zip((field.name for field in fields(Headline)), intervals(values, samples), strict=True))
    found |= {name: share(round(found[name].value * N), N) for name in ("accuracy", "top5")}
    # Resampling adds noise, and the ECE counts noise as error: its samples lie too high by about as much as the figure
    # itself lies above the truth. Reflected (the "basic" interval), they allow for it.
    low, high = between(samples[:, 5:6])
    ece = values[5].item()
    found["ece"] = Interval(value=ece, low=max(2 * ece - high.item(), 0.0), high=max(2 * ece - low.item(), 0.0))
    return Headline(**found)


def macro_f1(counts_RN: Tensor, labels_N: Tensor, said_N: Tensor, K: int) -> Tensor:
    """The mean F1 of the classes that occur: R. A class without an image in a resample, and never said, is left out."""
    R = len(counts_RN)

    def of_class(classes_N: Tensor, counts: Tensor) -> Tensor:
        return torch.zeros(R, K).index_add_(1, classes_N, counts)

    true, said = of_class(labels_N, counts_RN), of_class(said_N, counts_RN)
    hits = of_class(labels_N, counts_RN * (said_N == labels_N))
    f1 = 2 * hits / (true + said).clamp_min(1)
    there = labels_N.bincount(minlength=K) > 0
    occurs = (true + said > 0) & there
    return ((f1 * occurs).sum(dim=1) / occurs.sum(dim=1).clamp_min(1)).double()
