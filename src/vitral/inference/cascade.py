"""A fast engine whose close calls are computed again by a more accurate one, and the margin that makes a call close.

Shapes:  B, N images   K classes   D features
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vitral.inference.engine import Engine

MIN_MARGIN_IMAGES = 64  # for `margin_for_agreement`
CASCADE_DEVIATIONS = 3.5  # of the error of a logit difference, that errors rarely exceed
MIN_DEVIATIONS = 2.0  # leaves 0.05% wrong labels if 6% of the images are within one deviation, as of Ti/16 on ImageNet


class SizedEngine(Engine, Protocol):
    """An engine that reports the size of its weights."""

    @property
    def nbytes(self) -> int: ...


class FastEngine(SizedEngine, Protocol):
    """An engine that can compute logits from its own features."""

    def head(self, features_BD: Tensor, /) -> Tensor: ...


class CascadeEngine:
    """A fast engine whose ambiguous images are computed again by a more accurate one.

    An image is ambiguous if its two largest logits differ by less than `margin`.
    """

    def __init__(self, fast: FastEngine, accurate: SizedEngine, margin: float) -> None:
        self.fast, self.accurate, self.margin = fast, accurate, margin

    @torch.inference_mode()
    def __call__(self, images_BCHW: Tensor) -> Tensor:
        logits_BK = self.fast(images_BCHW)
        ambiguous_B = self.is_ambiguous(logits_BK)
        if ambiguous_B.any():
            logits_BK[ambiguous_B] = self.accurate(images_BCHW[ambiguous_B])
        return logits_BK

    @torch.inference_mode()
    def features(self, images_BCHW: Tensor) -> Tensor:
        features_BD = self.fast.features(images_BCHW)
        ambiguous_B = self.is_ambiguous(self.fast.head(features_BD))
        if ambiguous_B.any():
            features_BD[ambiguous_B] = self.accurate.features(images_BCHW[ambiguous_B])
        return features_BD

    @property
    def nbytes(self) -> int:
        return self.fast.nbytes + self.accurate.nbytes

    def is_ambiguous(self, logits_BK: Tensor) -> Tensor:
        """(B,) booleans; True for NaN, which is what an overflow leaves."""
        top_B2 = logits_BK.topk(min(2, logits_BK.shape[1]), dim=1).values
        return ~(top_B2[:, 0] - top_B2[:, -1] >= self.margin)


def cascade_margin(fast_NK: Tensor, accurate_NK: Tensor) -> float:
    """Margin that errors of the fast engine rarely exceed: 3.5 standard deviations of the error of a logit difference.

    The differences are those between the fast engine's top logit and its next four.
    """
    return CASCADE_DEVIATIONS * error_deviation(fast_NK, accurate_NK)


def error_deviation(fast_NK: Tensor, accurate_NK: Tensor) -> float:
    """Standard deviation of the error of a logit difference."""
    errors = (top_differences(fast_NK, fast_NK) - top_differences(fast_NK, accurate_NK)).double()
    return float(errors.square().mean().sqrt()) if errors.numel() else 0.0


def margin_for_agreement(fast_NK: Tensor, accurate_NK: Tensor, max_disagreement: float = 0.0005) -> float:
    """The smallest margin with which at most this share of the images keeps a wrong label, as far as N images tell.

    An image with a gap g between its two largest logits keeps a wrong label with the probability that an error exceeds
    g, which is the share of larger errors among the differences of `cascade_margin`. Compared with a fixed number of
    standard deviations it accounts for how many images are close and for the tails of the errors. Images that the model
    is certain of, such as those it was trained on, say nothing about close calls: the margin is at least two standard
    deviations.
    """
    differences = top_differences(fast_NK, fast_NK)
    if len(fast_NK) < MIN_MARGIN_IMAGES or not differences.numel():  # too few for the tails
        return cascade_margin(fast_NK, accurate_NK)
    errors = (differences - top_differences(fast_NK, accurate_NK)).abs().flatten().double().sort().values
    gaps = differences[:, 0].double().sort().values
    flips = 0.5 * (1 - torch.searchsorted(errors, gaps).double() / len(errors))  # half of the errors favour the label
    missed = flips.flip(0).cumsum(0).flip(0) / len(gaps)  # of all images with at least this gap
    sufficient = gaps[missed <= max_disagreement]
    margin = float(sufficient[0]) if len(sufficient) else float(errors[-1])
    return max(0.0 if missed[0] <= max_disagreement else margin, MIN_DEVIATIONS * error_deviation(fast_NK, accurate_NK))


def top_differences(fast_NK: Tensor, logits_NK: Tensor) -> Tensor:
    """Differences (N, 4) of `logits_NK` between the fast engine's top class and its next four."""
    top = fast_NK.topk(min(5, fast_NK.shape[1]), dim=1).indices
    values = logits_NK.gather(1, top)
    return values[:, :1] - values[:, 1:]
