"""The evaluation report: accuracy, calibration, selective prediction, OOD detection and robustness.

Shapes:  N images   K classes   R resamples
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from vitral.evaluation.bootstrap import bootstrap, intervals, percentile_interval
from vitral.evaluation.conformal import PredictionSetReport
from vitral.evaluation.leaks import LeakReport
from vitral.evaluation.metrics import Metrics, compute_metrics, label_ranks
from vitral.evaluation.ood import OODResult
from vitral.evaluation.reliability import (
    Reliability,
    bin_membership,
    brier_scores,
    negative_log_likelihoods,
    reliability,
)
from vitral.evaluation.robustness import Robustness
from vitral.evaluation.selective_prediction import (
    ConfidenceThreshold,
    RiskCoverage,
    resampled_aurc,
    risk_coverage,
    sort_by_confidence,
)
from vitral.evaluation.tta import TTA_DESCRIPTIONS
from vitral.models.calibration import Calibration
from vitral.recipes.options import TTA
from vitral.utils.intervals import Interval, proportion_interval


@dataclass(frozen=True, kw_only=True)
class Headline:
    """Main metrics of the calibrated probabilities with 95% confidence intervals.

    Wilson intervals for accuracy and top-5; intervals over 1,000 bootstrap resamples for the others.
    """

    accuracy: Interval
    top5: Interval
    balanced_accuracy: Interval  # mean recall of the classes that occur
    macro_f1: Interval  # mean over the classes that occur
    nll: Interval
    brier: Interval
    ece: Interval
    aurc: Interval


@dataclass(frozen=True, kw_only=True)
class EvaluationReport(Metrics):
    """Result of an evaluation; written to test.json."""

    headline: Headline
    temperature: float
    uncalibrated: Reliability  # softmax(logits)
    calibrated: Reliability  # softmax(logits / temperature)
    risk_coverage: RiskCoverage
    # These are measured without TTA, as predictions are made.
    confidence_threshold: ConfidenceThreshold | None = None
    prediction_sets: PredictionSetReport | None = None  # None: neither requested nor stored
    ood: OODResult | None = None
    robustness: Robustness | None = None
    split: str = "test"
    calibrated_on: str = "validation"  # split on which temperature and OOD threshold were fitted
    engine: Mapping[str, Any] = field(default_factory=dict)  # EngineChoice.info() of the engine in use
    tta: TTA = "none"  # of the logits that the other metrics are computed from
    accuracy_without_tta: Interval | None = None  # that of predict and evaluate, which use no TTA; None if tta="none"
    notes: tuple[str, ...] = ()  # files that were skipped or could not be read
    leak: LeakReport | None = None  # evaluated images that were used for training; None: unknown

    def scalars(self) -> dict[str, float]:
        """The main metrics by split and name, as in `test_top1`, for experiment trackers."""
        headline = {f.name: getattr(self.headline, f.name).value for f in fields(self.headline) if f.name != "accuracy"}
        values = {"top1": self.top1, "loss": self.loss, **headline}
        if self.accuracy_without_tta is not None:
            values["top1_without_tta"] = self.accuracy_without_tta.value
        return {f"{self.split}_{name}": float(value) for name, value in values.items()}

    @property
    def worst_recall(self) -> Interval:
        """Recall of the worst class with its Wilson interval."""
        worst = self.worst_class
        return proportion_interval(round(worst.recall * worst.support), worst.support)

    def tta_sentences(self) -> list[str]:
        """What the metrics mean if they include TTA: how it works, and the accuracy of predictions without it."""
        if self.tta == "none":
            return []
        sentences = [f"This is with test-time augmentation ({TTA_DESCRIPTIONS[self.tta]})."]
        if self.accuracy_without_tta is not None:
            sentences.append(f"predict, evaluate and serve do not use it: {self.accuracy_without_tta.percent()}.")
        return sentences


def build_report(
    logits_NK: Tensor,
    labels_N: Tensor,
    classes: tuple[str, ...],
    calibration: Calibration,
    *,
    engine: Mapping[str, Any] | None = None,
    tta: TTA = "none",
    confidence_threshold: ConfidenceThreshold | None = None,
    prediction_sets: PredictionSetReport | None = None,
    ood: OODResult | None = None,
    robustness: Robustness | None = None,
    split: str = "test",
    leak: LeakReport | None = None,
) -> EvaluationReport:
    """Compute everything that follows from logits and labels. Results of further forward passes are passed in."""
    metrics = compute_metrics(logits_NK, labels_N, classes)
    logits, labels = logits_NK.double().cpu(), labels_N.cpu()
    probabilities = calibration.probabilities(logits)
    confidence, predicted = probabilities.max(dim=1)
    return EvaluationReport(
        **{field.name: getattr(metrics, field.name) for field in fields(metrics)},
        headline=headline(probabilities, labels),
        temperature=calibration.temperature,
        uncalibrated=reliability(logits.softmax(dim=1), labels),
        calibrated=reliability(probabilities, labels),
        risk_coverage=risk_coverage(confidence, predicted == labels),
        confidence_threshold=confidence_threshold,
        prediction_sets=prediction_sets,
        ood=ood,
        robustness=robustness,
        split=split,
        calibrated_on=calibration.fitted_on,
        engine=dict(engine or {}),
        tta=tta,
        leak=leak,
    )


def headline(p_NK: Tensor, labels_N: Tensor) -> Headline:
    """All metrics from the same resamples. Means and class sums are matrix products with the resample counts."""
    N, K = p_NK.shape
    order = p_NK.amax(dim=1).argsort(descending=True, stable=True)
    p, labels = p_NK[order], labels_N[order]
    confidence, predicted = p.max(dim=1)
    correct = (predicted == labels).double()
    sorted_correct = sort_by_confidence(confidence, correct).float()
    in_top5 = label_ranks(p, labels) < 5
    means_NV = torch.stack(
        [correct, in_top5.double(), negative_log_likelihoods(p, labels), brier_scores(p, labels)], dim=1
    ).float()
    gap_Nb = (bin_membership(confidence) * (confidence - correct)[:, None]).float()

    def statistics(counts_RN: Tensor) -> Tensor:
        accuracy, top5, nll, brier = (counts_RN @ means_NV / N).double().unbind(1)
        ece = (counts_RN @ gap_Nb).double().abs().sum(dim=1) / N
        balanced_accuracy, f1 = class_means(counts_RN, labels, predicted, K)
        aurc = resampled_aurc(counts_RN, sorted_correct).double()
        return torch.stack([accuracy, top5, balanced_accuracy, f1, nll, brier, ece, aurc], dim=1)

    values, samples = statistics(torch.ones(1, N))[0], bootstrap(statistics, N)
    by_name = dict(zip((field.name for field in fields(Headline)), intervals(values, samples), strict=True))
    by_name |= {name: proportion_interval(round(by_name[name].value * N), N) for name in ("accuracy", "top5")}
    # Resampling adds noise, which the ECE counts as error: its samples are too high by about as much as the estimate
    # itself exceeds the true value. The "basic" (reflected) interval corrects for that.
    low, high = percentile_interval(samples[:, 6:7])
    ece = values[6].item()
    by_name["ece"] = Interval(value=ece, low=max(2 * ece - high.item(), 0.0), high=max(2 * ece - low.item(), 0.0))
    return Headline(**by_name)


def class_means(counts_RN: Tensor, labels_N: Tensor, predicted_N: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Mean recall and mean F1 over the classes that occur, (R,) each.

    The recall leaves out classes that are not present in a resample, F1 those neither present nor predicted.
    """
    R = len(counts_RN)

    def class_sums(classes_N: Tensor, counts: Tensor) -> Tensor:
        return torch.zeros(R, K).index_add_(1, classes_N, counts)

    num_true, num_predicted = class_sums(labels_N, counts_RN), class_sums(predicted_N, counts_RN)
    num_correct = class_sums(labels_N, counts_RN * (predicted_N == labels_N))
    f1 = 2 * num_correct / (num_true + num_predicted).clamp_min(1)
    occurs = (num_true + num_predicted > 0) & (labels_N.bincount(minlength=K) > 0)
    macro_f1 = (f1 * occurs).sum(dim=1) / occurs.sum(dim=1).clamp_min(1)
    recall, is_present = num_correct / num_true.clamp_min(1), num_true > 0
    balanced_accuracy = recall.sum(dim=1) / is_present.sum(dim=1).clamp_min(1)
    return balanced_accuracy.double(), macro_f1.double()
