"""The configuration of distillation with labels in a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

DistillKind = Literal["soft", "hard"]


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Learn the predictions of a teacher as well as the labels (vitral.tasks.distillation)."""

    teacher: str = ""  # classifier of the same classes: run, model folder, checkpoint, hf:owner/name or bundled model
    kind: DistillKind = "hard"  # soft: its probabilities (KL divergence); hard: its decisions, as in DeiT
    alpha: float = 0.5  # weight of the teacher in the loss; the labels have 1 - alpha
    temperature: float = 3.0  # temperature of the softmax, with kind soft

    def __post_init__(self) -> None:
        if not self.teacher:
            raise ValueError("distill.teacher must name a model: a run, a checkpoint file, hf:owner/name")
        if self.kind not in get_args(DistillKind):
            raise ValueError(f"distill.kind must be one of {', '.join(get_args(DistillKind))}, got {self.kind!r}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"distill.alpha must be from 0 to 1, got {self.alpha}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"distill.temperature must be above 0 and finite, got {self.temperature}")
