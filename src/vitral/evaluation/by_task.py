"""Evaluate and calibrate a model of any task."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vitral.errors import VitralError
from vitral.evaluation.data import EvalTarget
from vitral.evaluation.evaluate import evaluate
from vitral.evaluation.multilabel import evaluate_multilabel
from vitral.inference.task_support import TASK_TEXTS
from vitral.utils.progress import LogFn, no_log


def evaluate_model(
    target: EvalTarget, *, log: LogFn = no_log, note: LogFn | None = None, **options: Any
) -> tuple[Any, Tensor]:
    """Evaluate a model with the metrics of its task. Returns the report and the logits (N, K).

    `note` is called first with the expected duration. `options` are those of `vitral.evaluation.evaluate.evaluate`, for
    models that predict one class per image.
    """
    task = target.predictor.model_config.task
    if task == "classification":
        return evaluate(target, log=log, note=note, **options)
    if given := [name for name, value in options.items() if value not in (None, 0, "none")]:
        flag = {"ood_data": "ood", "corrupted_images": "robustness"}.get(given[0], given[0]).replace("_", "-")
        raise VitralError(
            f"--{flag} needs a model that predicts one class per image; this one predicts {TASK_TEXTS[task]} ({task})",
            f"Omit --{flag}",
        )
    if task == "multilabel":
        return evaluate_multilabel(target, log=log, note=note)
    raise VitralError(f"{task} models cannot be evaluated yet", "Their validation metrics are in metrics.jsonl")
