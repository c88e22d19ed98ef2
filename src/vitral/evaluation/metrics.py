"""Loss, accuracy, per-class metrics and confusion matrix from logits and labels.

Shapes:  N images   K classes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.imbalance import find_imbalance
from vitral.errors import VitralError
from vitral.utils.intervals import wilson_interval
from vitral.utils.serialization import to_dict


@dataclass(frozen=True, kw_only=True)
class ClassMetrics:
    name: str
    precision: float  # 0 if the class was never predicted
    recall: float  # 0 if the class does not occur
    f1: float
    support: int  # number of images of the class


@dataclass(frozen=True, kw_only=True)
class Metrics:
    images: int
    loss: float  # cross-entropy
    top1: float
    top1_low: float  # 95% Wilson interval
    top1_high: float
    top5: float  # 1 with at most five classes
    per_class: tuple[ClassMetrics, ...]
    confusion: tuple[tuple[int, ...], ...]  # confusion[true][predicted]

    def as_dict(self) -> dict[str, Any]:
        return {**to_dict(self), "worst_class": self.worst_class.name}

    @property
    def worst_class(self) -> ClassMetrics:
        """The class with the lowest recall, among those that occur."""
        return min((each for each in self.per_class if each.support), key=lambda each: each.recall)

    @property
    def is_imbalanced(self) -> bool:
        """Whether some classes have so few of the images that the accuracy says little about them."""
        return find_imbalance({each.name: each.support for each in self.per_class}) is not None

    def most_confused(self, limit: int = 5) -> list[tuple[str, str, int]]:
        """The most frequent confusions: (true class, predicted class, count)."""
        names = [class_metrics.name for class_metrics in self.per_class]
        confusions = [
            (names[true], names[predicted], count)
            for true, row in enumerate(self.confusion)
            for predicted, count in enumerate(row)
            if true != predicted and count
        ]
        return sorted(confusions, key=lambda confusion: -confusion[2])[:limit]


def compute_metrics(logits_NK: Tensor, labels_N: Tensor, classes: tuple[str, ...]) -> Metrics:
    N, K = logits_NK.shape
    if not N:
        raise VitralError("no images to evaluate", "Choose a dataset or folder with --data")
    if len(classes) != K:
        raise VitralError(f"expected {K} class names, got {len(classes)}", "Pass one name per logit")
    if invalid := labels_N[(labels_N < 0) | (labels_N >= K)].unique().tolist():
        raise VitralError(
            f"labels outside the model's {K} classes: {', '.join(map(str, invalid[:5]))}",
            f"Labels are class indices from 0 ({classes[0]}) to {K - 1} ({classes[-1]})",
        )
    labels_N = labels_N.to(logits_NK.device)
    confusion = torch.bincount(labels_N * K + logits_NK.argmax(dim=1), minlength=K * K).view(K, K).cpu().double()
    correct, predicted, true = confusion.diag(), confusion.sum(dim=0), confusion.sum(dim=1)
    precision, recall = correct / predicted.clamp_min(1), correct / true.clamp_min(1)
    f1 = 2 * correct / (predicted + true).clamp_min(1)
    top1 = correct.sum().item() / N
    low, high = wilson_interval(top1, N)
    per_class = zip(classes, precision.tolist(), recall.tolist(), f1.tolist(), true.long().tolist(), strict=True)
    return Metrics(
        images=N,
        loss=F.cross_entropy(logits_NK, labels_N).item(),
        top1=top1,
        top1_low=low,
        top1_high=high,
        top5=(label_ranks(logits_NK, labels_N) < 5).double().mean().item(),
        per_class=tuple(
            ClassMetrics(name=name, precision=p, recall=r, f1=f, support=n) for name, p, r, f, n in per_class
        ),
        confusion=tuple(tuple(row) for row in confusion.long().tolist()),
    )


def label_ranks(logits_NK: Tensor, labels_N: Tensor) -> Tensor:
    """Position (N,) of each label among the classes by decreasing logit, from 0.

    Equal logits rank in the order of the classes, as in predictions (`rank_labels`). bf16 logits do tie.
    """
    own_N1 = logits_NK.gather(1, labels_N[:, None])
    is_earlier_NK = torch.arange(logits_NK.shape[1], device=logits_NK.device) < labels_N[:, None]
    return ((logits_NK > own_N1) | ((logits_NK == own_N1) & is_earlier_NK)).sum(dim=1)
