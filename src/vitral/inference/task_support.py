"""Which commands support which tasks."""

from __future__ import annotations

from vitral.data.targets import TaskName
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor

TASK_TEXTS: dict[TaskName, str] = {
    "classification": "one class per image",
    "multilabel": "several labels per image",
    "regression": "real values per image",
}


def require_task(predictor: Predictor, what: str, *tasks: TaskName) -> None:
    """Raise VitralError unless the model's task is one of `tasks`; `what` is the command, or a flag to omit."""
    task = predictor.model_config.task
    if task not in tasks:
        supported = " or ".join(TASK_TEXTS[name] for name in tasks)
        raise VitralError(
            f"{what} supports models that predict {supported}; this one predicts {TASK_TEXTS[task]} ({task})",
            f"Omit {what}" if what.startswith("--") else "Evaluate it with: vitral evaluate MODEL",
        )
