"""Split conformal prediction: thresholds with guaranteed coverage, and the coverage measured on other images.

If the held-out images and the new image are exchangeable, such as independent draws from one source, the new score is
at most the ⌈(N + 1) · coverage⌉-th smallest of N held-out scores with a probability of at least `coverage`
(Vovk, Gammerman and Shafer, 2005). The probability is over held-out images and new image together.

Shapes:  N images   K classes
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from vitral.errors import VitralError
from vitral.models.conformal import ConformalSets
from vitral.utils.intervals import Interval, proportion_interval

DEFAULT_COVERAGE = 0.9
MAX_LISTED_CLASSES = 5  # classes with a low coverage that are named in a text
MAX_LISTED_SIZES = 5


@dataclass(frozen=True, kw_only=True)
class ClassCoverage:
    name: str
    coverage: Interval | None  # 95% Wilson interval; None if the class does not occur
    mean_size: float  # of the sets of its images; 0 if the class does not occur
    support: int  # number of images of the class


@dataclass(frozen=True, kw_only=True)
class PredictionSetReport:
    """Coverage and size of the prediction sets of the evaluated images."""

    target: float  # the coverage that the threshold was fitted for
    threshold: float  # a set holds the classes with at least this calibrated probability
    fitted_images: int  # number of validation images on which the threshold was fitted
    coverage: Interval  # share of sets that contain the true class, 95% Wilson interval
    mean_size: float
    sizes: tuple[int, ...]  # sizes[i]: number of sets with i + 1 classes, up to the largest set
    per_class: tuple[ClassCoverage, ...]

    def size_text(self) -> str:
        """`1 in 78.0%, 2 in 15.2%, 3 in 6.8% of sets`"""
        total, listed = sum(self.sizes), self.sizes[:MAX_LISTED_SIZES]
        parts = [f"{size} in {count / total:.1%}" for size, count in enumerate(listed, start=1) if count]
        if larger := total - sum(listed):
            parts.append(f"more in {larger / total:.1%}")
        return f"{', '.join(parts)} of sets" if len(self.sizes) > 1 else "one class in every set"

    @property
    def single_classes_suffice(self) -> bool:
        """Whether every set has one class and the coverage is above the target; larger sets need a higher target."""
        return self.coverage.value > self.target and len(self.sizes) == 1

    def least_covered(self) -> list[tuple[ClassCoverage, Interval]]:
        """Classes whose coverage is below the target even at the upper end of its interval, lowest first."""
        rows = [(row, row.coverage) for row in self.per_class if row.coverage is not None]
        low = [(row, coverage) for row, coverage in rows if coverage.high < self.target]
        return sorted(low, key=lambda item: item[1].value)[:MAX_LISTED_CLASSES]


def check_coverage(coverage: float) -> None:
    if not 0 < coverage < 1:
        raise VitralError(
            f"the coverage must be between 0 and 1, got {coverage:g}",
            "0.9 means that nine of ten sets contain the true class",
        )


def quantile_rank(count: int, coverage: float) -> int:
    """⌈(count + 1) · coverage⌉, exact for decimal fractions: 0.07 · 100 is 7, although 0.07 * 100 > 7 in floats."""
    return math.ceil(Fraction(repr(coverage)) * (count + 1))


def min_images(coverage: float) -> int:
    """Smallest number of held-out images for which the quantile exists: 9 for 90%, 99 for 99%."""
    exact = Fraction(repr(coverage))
    return math.ceil(exact / (1 - exact))


def conformal_quantile(scores_N: Tensor, coverage: float) -> float | None:
    """The score that a new one does not exceed with a probability of at least `coverage`.

    None if N is below `min_images`.
    """
    check_coverage(coverage)
    rank = quantile_rank(len(scores_N), coverage)
    return scores_N.sort().values[rank - 1].item() if rank <= len(scores_N) else None


def check_image_count(count: int, coverage: float) -> None:
    """Raise VitralError if there are too few validation images for this coverage."""
    check_coverage(coverage)
    if count >= min_images(coverage):
        return
    largest = math.floor(100 * count / (count + 1)) / 100
    command = "vitral train DATA --data.validation 0.2"
    raise VitralError(
        f"a coverage of {coverage:g} needs at least {min_images(coverage):,} validation images, got {count:,}",
        f"Use --coverage {largest:g} or less, or hold more images out: {command}"
        if largest > 0
        else f"Hold more images out: {command}",
    )


def fit_prediction_sets(probabilities_NK: Tensor, labels_N: Tensor, coverage: float) -> ConformalSets | None:
    """Prediction sets from the calibrated probabilities of validation images; None if there are too few images."""
    own_N = probabilities_NK.double().gather(1, labels_N[:, None])[:, 0]
    quantile = conformal_quantile(-own_N, coverage)
    return None if quantile is None else ConformalSets(coverage=coverage, threshold=-quantile, images=len(own_N))


def evaluate_prediction_sets(
    sets: ConformalSets, probabilities_NK: Tensor, labels_N: Tensor, classes: tuple[str, ...]
) -> PredictionSetReport:
    """Measure coverage and size of the sets of labelled images."""
    members_NK = probabilities_NK.double() >= sets.threshold
    members_NK[range(len(members_NK)), probabilities_NK.argmax(dim=1)] = True
    covered_N = members_NK.gather(1, labels_N[:, None])[:, 0]
    sizes_N = members_NK.sum(dim=1)

    def class_coverage(index: int, name: str) -> ClassCoverage:
        is_class = labels_N == index
        count = int(is_class.sum())
        return ClassCoverage(
            name=name,
            coverage=proportion_interval(int(covered_N[is_class].sum()), count) if count else None,
            mean_size=sizes_N[is_class].double().mean().item() if count else 0.0,
            support=count,
        )

    return PredictionSetReport(
        target=sets.coverage,
        threshold=sets.threshold,
        fitted_images=sets.images,
        coverage=proportion_interval(int(covered_N.sum()), len(covered_N)),
        mean_size=sizes_N.double().mean().item(),
        sizes=tuple(sizes_N.bincount()[1:].tolist()),
        per_class=tuple(class_coverage(index, name) for index, name in enumerate(classes)),
    )
