"""How much a second set of initial weights improves on a first one, by the fraction of labels that is used.

before   the weights to start from without the pretraining: any checkpoint, or random ones
after    the weights to start from with it

Both are measured on the same test images, by classifiers on their frozen features and by fine-tuning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from vitral.evaluation.label_subsets import fraction_text
from vitral.evaluation.leaks import LeakReport
from vitral.evaluation.paired_difference import PairedDifference, accuracy_interval, paired_difference
from vitral.utils.intervals import Interval
from vitral.utils.serialization import to_dict

Method = Literal["nearest neighbours", "linear", "fine-tuning"]
Outcome = Literal["better", "worse", "unclear", "unknown"]
Array = np.ndarray[Any, Any]
MAX_FRACTION_ERROR = 0.25  # a subset that is larger by more, because every class needs an image, is named by its size


@dataclass(frozen=True, kw_only=True)
class LabelEfficiencyRow:
    """Accuracy of both models with one method and one fraction of the labels."""

    method: Method
    setting: str  # such as "k = 20"; empty if there is nothing to set
    fraction: float  # of the labelled images
    images: int  # labelled images that were used
    seeds: int  # repetitions with other labels and random numbers; 1 if they would all be the same
    before: Interval  # mean accuracy over seeds, with its 95% interval
    after: Interval
    before_accuracies: tuple[float, ...]  # per seed
    after_accuracies: tuple[float, ...]
    difference: PairedDifference  # after minus before
    outcome: Outcome  # of after, compared with before; unclear: the interval includes zero; unknown: one seed

    @property
    def name(self) -> str:
        return f"{self.method} ({self.setting})" if self.setting else self.method


@dataclass(frozen=True, kw_only=True)
class LabelEfficiency:
    """Comparison of two sets of initial weights. `summary` is the result in one or two sentences."""

    summary: str
    rows: tuple[LabelEfficiencyRow, ...]
    data: str
    before_name: str
    after_name: str
    classes: tuple[str, ...]
    labelled_images: int
    test_images: int
    evaluated_on: Literal["test", "validation"]
    seeds: int
    recipes: Mapping[str, str] = field(default_factory=dict)  # of the fine-tuning, in a few words: before and after
    engine: Mapping[str, Any] = field(default_factory=dict)  # that computed the features of `after`
    seconds: float = 0.0
    folder: str = ""  # of the finished parts
    leaks: Mapping[str, LeakReport] = field(default_factory=dict)  # test images that a model was trained on
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return dict(to_dict(self))


def make_row(
    method: Method,
    fraction: float,
    images: int,
    before_SM: Array,
    after_SM: Array,
    *,
    setting: str = "",
    varies: bool = True,
) -> LabelEfficiencyRow:
    """The row of two arrays of booleans: for each seed, which test images were classified correctly.

    `varies`: see `paired_difference`.
    """
    difference = paired_difference(before_SM, after_SM, varies=varies)
    outcome: Outcome = "better" if difference.is_positive else "worse" if difference.is_negative else "unclear"
    return LabelEfficiencyRow(
        method=method,
        setting=setting,
        fraction=fraction,
        images=images,
        seeds=len(before_SM),
        before=accuracy_interval(before_SM),
        after=accuracy_interval(after_SM),
        before_accuracies=tuple(before_SM.mean(axis=1).tolist()),
        after_accuracies=tuple(after_SM.mean(axis=1).tolist()),
        difference=difference,
        outcome="unknown" if difference.low is None else outcome,
    )


def summarise(rows: Sequence[LabelEfficiencyRow], subject: str, labelled_images: int) -> str:
    """Whether `subject` helped, in a sentence about the smallest fraction of the labels.

    A second sentence follows if another fraction had another outcome. Which rows these are does not depend on the
    results: those of the fine-tuning, or of the linear classifier if nothing was fine-tuned.
    """
    fine_tuned = [row for row in rows if row.method == "fine-tuning"]
    chosen = sorted(fine_tuned or [row for row in rows if row.method == "linear"], key=lambda row: row.fraction)
    first, *others = chosen
    sentences = [f"{subject} {_outcome_text(first, labels_text(first, labelled_images))}."]
    differing = [row for row in others if row.outcome != first.outcome]
    if differing:
        clauses = [f"With {labels_text(row, labelled_images)} it {_other_outcome_text(row)}" for row in differing]
        sentences.append("; ".join([clauses[0], *(clause[0].lower() + clause[1:] for clause in clauses[1:])]) + ".")
    return " ".join(sentences)


def labels_text(row: LabelEfficiencyRow, labelled_images: int) -> str:
    """ "1% of the labels", or the number of images where every class needs one and the fraction is exceeded."""
    if row.fraction == 1:
        return "all labels"
    if row.images > (1 + MAX_FRACTION_ERROR) * row.fraction * labelled_images:
        return f"{row.images:,} labels ({fraction_text(row.images / labelled_images)} of all)"
    return f"{fraction_text(row.fraction)} of the labels"


def _outcome_text(row: LabelEfficiencyRow, labels: str) -> str:
    accuracies = f"from {row.before.value:.1%} to {row.after.value:.1%}"
    difference = row.difference
    if difference.low is None:
        return (
            f"cannot be judged from one seed: accuracy with {labels} went {accuracies}, and the interval of the "
            "difference is unknown"
        )
    if difference.is_positive:
        return f"raised accuracy with {labels} {accuracies} ({_interval_text(difference)})"
    if difference.is_negative:
        return f"lowered accuracy with {labels} {accuracies} ({_interval_text(difference)})"
    return (
        f"did not measurably help: accuracy with {labels} went {accuracies} ({_interval_text(difference)}, which "
        "includes zero)"
    )


def _other_outcome_text(row: LabelEfficiencyRow) -> str:
    verb = {"better": "raised", "worse": "lowered"}.get(row.outcome, "did not measurably change")
    low, high = points(row.difference.low or 0.0), points(row.difference.high or 0.0)
    return f"{verb} accuracy: {row.before.value:.1%} to {row.after.value:.1%} ({low} to {high} points)"


def _interval_text(difference: PairedDifference) -> str:
    assert difference.low is not None
    assert difference.high is not None
    return f"95% CI of the difference: {points(difference.low)} to {points(difference.high)} points"


def points(difference: float) -> str:
    """+1.2, -0.3 or 0.0 percentage points"""
    text = f"{100 * difference:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text
