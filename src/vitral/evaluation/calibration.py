"""From logits to probabilities that can be believed, and to "I don't know this"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What the validation images taught about a model's logits. It travels with the model."""

    temperature: float = 1.0  # probabilities are softmax(logits / temperature)
    score: Literal["max-logit", "energy"] = "energy"  # of the logits: high for images like those trained on
    unknown_below: float | None = None  # an image with a lower score is called unknown; None: none is

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"calibration.temperature must be above 0, not {self.temperature}")

    def probabilities(self, logits_BK: Tensor) -> Tensor:
        return (logits_BK / self.temperature).softmax(dim=1)

    def unknown(self, logits_BK: Tensor) -> Tensor:
        """B booleans: whether the image looks like nothing the model was trained on."""
        scores_B = known_score(logits_BK, self.score)
        return scores_B < self.unknown_below if self.unknown_below is not None else scores_B.isnan()


def known_score(logits_BK: Tensor, score: Literal["max-logit", "energy"]) -> Tensor:
    """B numbers, high where the image looks familiar: the largest logit, or log Σ exp (arXiv 2010.03759)."""
    return logits_BK.amax(dim=1) if score == "max-logit" else logits_BK.logsumexp(dim=1)
