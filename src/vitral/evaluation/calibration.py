"""From logits to probabilities that can be believed, and to "I don't know this".

Shapes:  N images   K classes
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from vitral.errors import VitralError

Score = Literal["max-logit", "energy"]

FALSE_ALARMS = 0.01  # share of images like those trained on that may be called unknown
COLDEST, HOTTEST = 0.05, 20.0  # temperatures looked at
ENOUGH = 20  # images to learn a temperature from; what fewer say is chance


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What images that were held out taught about a model's logits. It travels with the model."""

    temperature: float = 1.0  # probabilities are softmax(logits / temperature)
    score: Score = "energy"  # of the logits: high for images like those trained on
    unknown_below: float | None = None  # an image with a lower score is called unknown; None: none is
    fitted_on: str = "the validation images"

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"calibration.temperature must be above 0, not {self.temperature}")

    def probabilities(self, logits_BK: Tensor) -> Tensor:
        return (logits_BK / self.temperature).softmax(dim=1)

    def unknown(self, logits_BK: Tensor) -> Tensor:
        """B booleans: whether the image looks like nothing the model was trained on."""
        least = -math.inf if self.unknown_below is None else self.unknown_below
        return ~(known_score(logits_BK, self.score) >= least)  # what is not a number is unknown too


def known_score(logits_BK: Tensor, score: Score) -> Tensor:
    """B numbers, high where the image looks familiar: the largest logit, or log Σ exp (arXiv 2010.03759)."""
    return logits_BK.amax(dim=1) if score == "max-logit" else logits_BK.logsumexp(dim=1)


def calibrate(
    logits_NK: Tensor, labels_N: Tensor, *, score: Score = "energy", false_alarms: float = FALSE_ALARMS
) -> Calibration:
    """The calibration that validation images ask for. They must not be images the model was trained on; few of them
    leave the temperature at 1, and call no image unknown."""
    if not len(logits_NK):
        raise VitralError(
            "there are no validation images to calibrate with", "vitral train DATA --data.validation 0.1 holds some out"
        )
    logits_NK, labels_N = logits_NK.detach().double().cpu(), labels_N.cpu()
    return Calibration(
        temperature=temperature_of(logits_NK, labels_N) if len(logits_NK) >= ENOUGH else 1.0,
        score=score,
        unknown_below=threshold(known_score(logits_NK, score), false_alarms),
    )


def temperature_of(logits_NK: Tensor, labels_N: Tensor) -> float:
    """The T whose softmax(logits / T) surprises least: the minimum of the mean cross-entropy (arXiv 1706.04599).

    The cross-entropy is convex in β = 1/T, so the minimum is where its slope is zero: Newton's steps, halved
    intervals where they leave the bracket. Without a single mistake it only falls towards T = 0: then the labels are
    smoothed by 1/(N+2), as Platt did (1999), for the next image may be the first mistake.
    """
    N, K = logits_NK.shape
    z = logits_NK.double() - logits_NK.double().amax(dim=1, keepdim=True)
    faultless = bool((z.argmax(dim=1) == labels_N).all())
    smoothing = 1 / (N + 2) if faultless else 0.0
    targets = F.one_hot(labels_N, K).double() * (1 - smoothing) + smoothing / K
    wanted = (targets * z).sum(dim=1).mean()
    low, high, beta = 1 / HOTTEST, 1 / COLDEST, 1.0
    for _ in range(100):
        p = (beta * z).softmax(dim=1)
        mean_N = (p * z).sum(dim=1)
        slope = (mean_N.mean() - wanted).item()
        low, high = (beta, high) if slope < 0 else (low, beta)
        bend = ((p * z.square()).sum(dim=1) - mean_N.square()).mean().item()
        step = beta - slope / bend if bend > 0 else math.nan
        after = step if low < step < high else (low + high) / 2
        if abs(after - beta) <= 1e-10 * beta:
            break
        beta = after
    return 1 / beta


def threshold(scores_N: Tensor, false_alarms: float) -> float | None:
    """The score below which an image is called unknown.

    So many known images lie below it that the next known one does so with a chance of at most `false_alarms`: (k+1) in
    (N+1) for the k-th smallest of N, counted from 0. Where even the smallest is too many, N is too small: None.
    """
    if not 0 < false_alarms < 1:
        raise VitralError(
            f"the share of false alarms must be above 0 and below 1, not {false_alarms}", "0.01: one image in a hundred"
        )
    place = math.floor(false_alarms * (len(scores_N) + 1)) - 1
    return scores_N.sort().values[place].item() if place >= 0 else None
