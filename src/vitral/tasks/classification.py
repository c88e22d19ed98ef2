"""One class per image."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vitral.data.targets import TaskName
from vitral.models.target_scaling import TargetScaling
from vitral.recipes.options import LossName
from vitral.tasks.losses import per_image_losses, uniform_loss


class Classification:
    """Class indices (N,) as labels; the best epoch has the highest top-1 accuracy."""

    name: TaskName = "classification"
    train_metric = metric = "top1"
    higher_is_better = True
    train_title = title = "Acc."

    def scaling(self, labels: Tensor, names: tuple[str, ...]) -> TargetScaling | None:
        return None

    def uniform_loss(self, num_outputs: int, loss: LossName) -> float:
        return uniform_loss(num_outputs)

    def scores(self, logits_BK: Tensor, labels: Tensor) -> Tensor:
        return logits_BK.argmax(dim=1) == labels

    def train_score(self, mean_score: float, scaling: TargetScaling | None) -> float:
        return mean_score

    def validation_metrics(
        self, logits_NK: Tensor, labels: Tensor, loss: LossName, scaling: TargetScaling | None
    ) -> dict[str, float]:
        targets_NK = F.one_hot(labels, logits_NK.shape[1]).to(logits_NK)
        num_correct = int((logits_NK.argmax(dim=1) == labels.to(logits_NK.device)).sum())
        return {
            "loss": per_image_losses(logits_NK, targets_NK, loss).mean().item(),
            "top1": num_correct / len(labels),
        }

    def format_metric(self, value: float) -> str:
        return f"{value:.2%}"
