"""Evaluate multi-label models: average precision, F1 scores at the fitted thresholds, and co-occurrence of labels.

Shapes:  N images   K classes   R resamples
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import VitralError
from vitral.evaluation.bootstrap import NUM_RESAMPLES, bootstrap, intervals
from vitral.evaluation.calibration import MAX_TEMPERATURE, MIN_IMAGES, MIN_TEMPERATURE
from vitral.evaluation.data import EvalTarget
from vitral.evaluation.leaks import LeakReport, find_leaks
from vitral.evaluation.multilabel_metrics import average_precisions, tie_ends
from vitral.evaluation.target_logits import compute_target_logits
from vitral.models.calibration import Calibration
from vitral.utils.intervals import Interval
from vitral.utils.progress import LogFn, no_log
from vitral.utils.serialization import to_dict

MIN_POSITIVES = 5  # for fitting a threshold; the optimum of fewer images is noise
DEFAULT_THRESHOLD = 0.5
MAX_BOOTSTRAP_ELEMENTS = 4e8  # resamples x images x classes; fewer resamples for more


@dataclass(frozen=True, kw_only=True)
class LabelMetrics:
    """One label at its threshold. Values that the images do not determine are None."""

    name: str
    average_precision: Interval | None  # None if no image has the label
    threshold: float
    precision: float | None  # None if the label was never predicted
    recall: float | None  # None if no image has the label
    f1: float | None
    support: int  # images with the label
    predicted: int  # images for which the label was predicted


@dataclass(frozen=True, kw_only=True)
class MultiLabelReport:
    """Result of the evaluation of a multi-label model; written to test.json.

    Intervals are the 95% percentiles of bootstrap resamples of the images.
    """

    images: int
    loss: float  # binary cross-entropy of the calibrated probabilities, summed over the labels
    mean_average_precision: Interval  # mAP: mean over the labels that occur
    micro_f1: Interval  # of all decisions together
    macro_f1: Interval  # mean over the labels that occur
    exact_match: Interval  # share of images with exactly the right labels
    labels_per_image: float  # of the images
    predicted_per_image: float
    per_class: tuple[LabelMetrics, ...]
    cooccurrence: tuple[tuple[int, ...], ...]  # [i][j]: images with labels i and j; [i][i]: with label i
    predicted_cooccurrence: tuple[tuple[int, ...], ...]
    temperature: float
    split: str = "test"
    calibrated_on: str = "validation"  # split on which temperature and thresholds were fitted
    engine: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    leak: LeakReport | None = None
    task: str = "multilabel"

    def as_dict(self) -> dict[str, Any]:
        return dict(to_dict(self))

    def scalars(self) -> dict[str, float]:
        """The main metrics by split and name, as in `test_map`, for experiment trackers."""
        values = {
            "map": self.mean_average_precision.value,
            "micro_f1": self.micro_f1.value,
            "macro_f1": self.macro_f1.value,
            "exact_match": self.exact_match.value,
            "loss": self.loss,
        }
        return {f"{self.split}_{name}": value for name, value in values.items()}

    def frequent_pairs(self, limit: int = 5) -> list[tuple[str, str, int, int]]:
        """The labels that occur together most often: names, images with both, images predicted to have both."""
        names = [label.name for label in self.per_class]
        pairs = [
            (names[i], names[j], self.cooccurrence[i][j], self.predicted_cooccurrence[i][j])
            for i in range(len(names))
            for j in range(i + 1, len(names))
            if self.cooccurrence[i][j] or self.predicted_cooccurrence[i][j]
        ]
        return sorted(pairs, key=lambda pair: -max(pair[2], pair[3]))[:limit]


def evaluate_multilabel(
    target: EvalTarget, *, log: LogFn = no_log, note: LogFn | None = None
) -> tuple[MultiLabelReport, Tensor]:
    """Evaluate a multi-label model. Returns the report and the logits (N, K). `note` receives the expected duration."""
    logits, config = compute_target_logits(target, log, note).cpu(), target.predictor.model_config
    report = build_multilabel_report(
        logits, target.split.labels, config.classes, config.calibration, config.thresholds, split=target.split_name
    )
    engine = target.predictor.engine.info()
    return replace(report, engine=engine, notes=target.notes, leak=find_leaks(target)), logits


def build_multilabel_report(
    logits_NK: Tensor,
    labels_NK: Tensor,
    classes: tuple[str, ...],
    calibration: Calibration,
    thresholds: tuple[float, ...],
    *,
    split: str = "test",
) -> MultiLabelReport:
    """Compute everything that follows from logits and labels."""
    if not len(logits_NK):
        raise VitralError("no images to evaluate", "Choose a list with --data")
    labels = labels_NK.cpu() > 0
    p = calibration.probabilities(logits_NK.double().cpu())
    predicted = p >= torch.tensor(thresholds, dtype=torch.float64)
    precisions_K, means = _intervals(p, labels, predicted)
    num_true, num_predicted = labels.sum(dim=0).tolist(), predicted.sum(dim=0).tolist()
    num_correct = (labels & predicted).sum(dim=0).tolist()
    per_class = tuple(
        LabelMetrics(
            name=name,
            average_precision=precisions_K[k] if num_true[k] else None,
            threshold=thresholds[k],
            precision=num_correct[k] / num_predicted[k] if num_predicted[k] else None,
            recall=num_correct[k] / num_true[k] if num_true[k] else None,
            f1=2 * num_correct[k] / (num_true[k] + num_predicted[k]) if num_true[k] else None,
            support=num_true[k],
            predicted=num_predicted[k],
        )
        for k, name in enumerate(classes)
    )
    mean_ap, micro_f1, macro_f1, exact_match = means
    return MultiLabelReport(
        images=len(labels),
        loss=F.binary_cross_entropy(p, labels.double(), reduction="none").sum(dim=1).mean().item(),
        mean_average_precision=mean_ap,
        micro_f1=micro_f1,
        macro_f1=macro_f1,
        exact_match=exact_match,
        labels_per_image=labels.sum(dim=1).double().mean().item(),
        predicted_per_image=predicted.sum(dim=1).double().mean().item(),
        per_class=per_class,
        cooccurrence=_cooccurrence(labels),
        predicted_cooccurrence=_cooccurrence(predicted),
        temperature=calibration.temperature,
        split=split,
        calibrated_on=calibration.fitted_on,
    )


def _cooccurrence(labels_NK: Tensor) -> tuple[tuple[int, ...], ...]:
    counts = labels_NK.double().T @ labels_NK.double()
    return tuple(tuple(row) for row in counts.long().tolist())


def _intervals(p_NK: Tensor, labels_NK: Tensor, predicted_NK: Tensor) -> tuple[list[Interval], list[Interval]]:
    """Intervals of the average precision of each class, and of mAP, micro F1, macro F1 and exact match."""
    N, K = p_NK.shape
    true, predicted = labels_NK.float(), predicted_NK.float()
    correct, exact = true * predicted, (labels_NK == predicted_NK).all(dim=1).float()
    occurs = labels_NK.any(dim=0)

    def statistics(counts_RN: Tensor) -> Tensor:
        precisions_RK = resampled_average_precisions(counts_RN, p_NK, labels_NK)
        num_true, num_predicted, num_correct = (counts_RN @ values for values in (true, predicted, correct))
        total = num_true + num_predicted
        f1_RK = torch.where(total > 0, 2 * num_correct / total.clamp(min=1), torch.nan)[:, occurs]
        micro = 2 * num_correct.sum(dim=1) / total.sum(dim=1).clamp(min=1)
        columns = [precisions_RK[:, occurs].nanmean(dim=1), micro, f1_RK.nanmean(dim=1), counts_RN @ exact / N]
        return torch.cat([precisions_RK, torch.stack(columns, dim=1)], dim=1).double().nan_to_num(0.0)

    count = int(min(NUM_RESAMPLES, max(MAX_BOOTSTRAP_ELEMENTS / (N * K), 100)))
    values, samples = statistics(torch.ones(1, N))[0], bootstrap(statistics, N, count=count)
    # The value itself is exact; resamples are computed in fp32.
    exact_values = average_precisions(p_NK, labels_NK).nan_to_num(0.0)
    values[:K] = exact_values
    values[K] = exact_values[occurs].mean() if occurs.any() else 0.0
    # Repeated images raise the average precision of a resample, on average by as much as the estimate exceeds the true
    # value, so its samples are shifted to have the mean of the estimate.
    samples[:, : K + 1] += (values - samples.mean(dim=0))[: K + 1]
    all_intervals = intervals(values, samples.clamp(0, 1))
    return all_intervals[:K], all_intervals[K:]


def resampled_average_precisions(counts_RN: Tensor, p_NK: Tensor, labels_NK: Tensor) -> Tensor:
    """Average precision (R, K) of resamples given as counts; NaN where a resample has no image with the label."""
    scores_NK, order_NK = p_NK.sort(dim=0, descending=True, stable=True)
    columns, ends_NK = [], tie_ends(scores_NK)
    for order, ends, labels_N in zip(order_NK.T, ends_NK.T, labels_NK.T, strict=True):
        counts = counts_RN[:, order]
        positives = counts * labels_N[order].float()
        precision = positives.cumsum(dim=1) / counts.cumsum(dim=1).clamp(min=1)
        columns.append((positives * precision[:, ends]).sum(dim=1) / positives.sum(dim=1))
    return torch.stack(columns, dim=1)


def fit_multilabel_calibration(logits_NK: Tensor, labels_NK: Tensor, engine: str = "fp32") -> Calibration:
    """Fit one temperature and a threshold per label on validation images, which must not be training images.

    A label with fewer than MIN_POSITIVES images keeps the threshold 0.5.
    """
    logits, labels = logits_NK.detach().double().cpu(), labels_NK.cpu() > 0
    temperature = fit_sigmoid_temperature(logits, labels) if len(logits) >= MIN_IMAGES else 1.0
    calibration = Calibration(temperature=temperature, activation="sigmoid", engine=engine)
    p = calibration.probabilities(logits)
    thresholds = tuple(fit_threshold(p[:, k], labels[:, k]) for k in range(p.shape[1]))
    return replace(calibration, thresholds=thresholds)


def fit_sigmoid_temperature(logits_NK: Tensor, labels_NK: Tensor) -> float:
    """The temperature T, as in `fit_temperature`, that minimises the binary cross-entropy of sigmoid(logits / T).

    The cross-entropy is convex in 1/T, so its minimum is where the slope is zero, found by bisection.
    """
    targets, low, high = labels_NK.double(), 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
    for _ in range(60):
        beta = (low + high) / 2
        slope = ((torch.sigmoid(beta * logits_NK) - targets) * logits_NK).mean().item()
        low, high = (beta, high) if slope < 0 else (low, beta)
    return 2 / (low + high)


def fit_threshold(p_N: Tensor, labels_N: Tensor) -> float:
    """The probability from which on a label is predicted: the one with the highest F1 score.

    Halfway between two images' probabilities; of several equally good ones, the closest to 0.5.
    """
    num_true = int(labels_N.sum())
    if num_true < MIN_POSITIVES or num_true == len(labels_N):
        return DEFAULT_THRESHOLD
    scores, order = p_N.sort(descending=True, stable=True)
    num_correct = labels_N[order].double().cumsum(dim=0)
    num_predicted = torch.arange(1, len(p_N) + 1, dtype=torch.float64)
    f1 = 2 * num_correct / (num_predicted + num_true)
    below = torch.cat([scores[1:], scores.new_zeros(1)])
    f1[scores == below] = -1  # no threshold separates equal probabilities
    candidates = (f1 >= f1.max() - 1e-12).nonzero().flatten()
    thresholds = (scores[candidates] + below[candidates]) / 2
    return float(thresholds[(thresholds - DEFAULT_THRESHOLD).abs().argmin()])
