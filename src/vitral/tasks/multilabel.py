"""Any number of labels per image: one sigmoid per class."""

from __future__ import annotations

import math

from torch import Tensor

from vitral.data.targets import TaskName
from vitral.evaluation.multilabel_metrics import image_f1_scores, mean_average_precision
from vitral.models.target_scaling import TargetScaling
from vitral.recipes.options import LossName
from vitral.tasks.losses import per_image_losses


class MultiLabel:
    """Multi-hot labels (N, K); the best epoch has the highest mean average precision (mAP).

    The running training score is the F1 score of each image at probability 1/2, averaged over the images.
    """

    name: TaskName = "multilabel"
    train_metric, metric = "f1", "map"
    higher_is_better = True
    train_title, title = "F1", "mAP"

    def scaling(self, labels: Tensor, names: tuple[str, ...]) -> TargetScaling | None:
        return None

    def uniform_loss(self, num_outputs: int, loss: LossName) -> float:
        return num_outputs * math.log(2)

    def scores(self, logits_BK: Tensor, labels: Tensor) -> Tensor:
        return image_f1_scores(logits_BK > 0, labels)

    def train_score(self, mean_score: float, scaling: TargetScaling | None) -> float:
        return mean_score

    def validation_metrics(
        self, logits_NK: Tensor, labels: Tensor, loss: LossName, scaling: TargetScaling | None
    ) -> dict[str, float]:
        labels = labels.to(logits_NK)
        return {
            "loss": per_image_losses(logits_NK, labels, loss).mean().item(),
            "map": mean_average_precision(logits_NK, labels),
            "f1": image_f1_scores(logits_NK > 0, labels).mean().item(),
        }

    def format_metric(self, value: float) -> str:
        return f"{value:.2%}"
