"""What differs between classification, multi-label classification and regression during training.

`TASKS` has one object per task. The task of a trained model is `ModelConfig.task`.
"""

from __future__ import annotations

from vitral.data.targets import TaskName
from vitral.tasks.classification import Classification
from vitral.tasks.multilabel import MultiLabel
from vitral.tasks.regression import Regression
from vitral.tasks.task import Task

TASKS: dict[TaskName, Task] = {
    "classification": Classification(),
    "multilabel": MultiLabel(),
    "regression": Regression(),
}
