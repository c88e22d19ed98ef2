"""The interface of a task.

Shapes: B images of a batch, N images, K outputs (classes, or targets of a regression).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from vitral.data.targets import TaskName
from vitral.models.target_scaling import TargetScaling
from vitral.recipes.options import LossName


class Task(Protocol):
    """What training needs to know about a task. Its losses are `vitral.recipes.options.TASK_LOSSES`."""

    name: TaskName
    train_metric: str  # name of the running score in metrics.jsonl, after "train_"
    metric: str  # name of the validation metric that selects the best epoch, after "validation_"
    higher_is_better: bool  # of that metric
    train_title: str  # header of the running score in the progress table
    title: str  # header of the validation metric

    def scaling(self, labels: Tensor, names: tuple[str, ...]) -> TargetScaling | None:
        """How labels are standardised for training, measured on the training set; None: not at all."""
        ...

    def uniform_loss(self, num_outputs: int, loss: LossName) -> float:
        """Loss of an untrained model. A loss far above it counts as diverged."""
        ...

    def scores(self, logits_BK: Tensor, labels: Tensor) -> Tensor:
        """The running training score of each image, (B,). `labels` are those before mixup and CutMix."""
        ...

    def train_score(self, mean_score: float, scaling: TargetScaling | None) -> float:
        """The metric `train_metric` from the mean of the running score."""
        ...

    def validation_metrics(
        self, logits_NK: Tensor, labels: Tensor, loss: LossName, scaling: TargetScaling | None
    ) -> dict[str, float]:
        """Metrics of the validation set: `loss`, `metric` and others. Labels are not standardised."""
        ...

    def format_metric(self, value: float) -> str:
        """A value of `metric` or `train_metric` for the progress table, at most 8 characters."""
        ...
