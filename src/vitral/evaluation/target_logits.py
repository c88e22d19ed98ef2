"""The logits of a target's images, with the expected duration and the progress."""

from __future__ import annotations

from torch import Tensor

from vitral.evaluation.data import EvalTarget
from vitral.evaluation.time_estimate import duration_text, estimate_logit_seconds
from vitral.utils.progress import LogFn


def compute_target_logits(target: EvalTarget, log: LogFn, note: LogFn | None = None) -> Tensor:
    """Logits (N, K). `note` is called first with the expected duration, `log` with the number of completed images."""
    predictor, message = target.predictor, f"Evaluating on {len(target.split):,} {target.noun}"
    log(message)
    if note is not None:
        duration = duration_text(estimate_logit_seconds(target.split, predictor), predictor.hardware.device.type)
        note(f"{message}: {duration}")
    return predictor.logits_distributed(target.split.images, lambda completed: log(f"{message}: {completed:,} done"))
