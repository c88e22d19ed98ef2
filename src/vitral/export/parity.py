"""Parity of an exported file with the model: agreement, accuracy and speed on real images."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.export.wrapper import ExportPrecision
from vitral.inference.agreement import Agreement, label_agreement, top1_agreement
from vitral.runs.model_io import ModelConfig

ModelFn = Callable[[Tensor], tuple[Tensor, Tensor]]  # uint8 images (B, C, H, W) to logits and probabilities (B, K)
MIN_IMAGES = 100  # to compare on, unless the user requests fewer
MIN_AGREEMENT = 0.99  # share of images with the same top-1 label, unless the user accepts less
# Largest difference of a probability. int8 is judged by its agreement alone: some images are always near a tie.
MAX_PROBABILITY_DIFF = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.15, "int8": 1.0}
# Largest difference of a value of a regression, in standard deviations of its target.
MAX_VALUE_DIFF = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.15, "int8": 0.3}
Units = tuple[tuple[str, float], ...]  # name and standard deviation of each target of a regression


@dataclass(frozen=True, kw_only=True)
class ValueDifference:
    """How much the values of one target of a regression differ, in its units."""

    name: str
    max_abs_diff: float
    mean_abs_diff: float
    std: float  # of the target on the training set

    @property
    def relative(self) -> float:
        """The largest difference in standard deviations of the target."""
        return self.max_abs_diff / self.std

    def __str__(self) -> str:
        return (
            f"{self.name} differs by at most {self.max_abs_diff:.2g} (mean {self.mean_abs_diff:.2g}; its standard "
            f"deviation is {self.std:.3g})"
        )


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """Comparison of the model (first value of each pair) with the exported file (second value)."""

    agreement: Agreement  # top-1; of a multi-label model, of its worst label
    max_abs_diff: float  # of the probabilities
    mean_abs_diff: float  # mean over the images of the largest difference of a probability
    accuracy: tuple[float, float] | None  # None without labels and for multi-label models
    images_per_second: tuple[float, float]
    calibration_images: int = 0  # that int8 was calibrated on, none of them compared
    notes: tuple[str, ...] = ()  # files that were skipped or could not be read
    values: tuple[ValueDifference, ...] = ()  # of a regression, which has no labels to agree on

    @property
    def images(self) -> int:
        return self.agreement.images

    def __str__(self) -> str:
        if self.values:
            speed = f"{self.images_per_second[0]:,.0f} → {self.images_per_second[1]:,.0f} images/s"
            return f"{'; '.join(map(str, self.values))}, on {self.images:,} images, {speed}"
        parts = [
            str(self.agreement),
            f"probabilities differ by at most {self.max_abs_diff:.2g} (mean {self.mean_abs_diff:.2g})",
            f"{self.images_per_second[0]:,.0f} → {self.images_per_second[1]:,.0f} images/s",
        ]
        if self.accuracy is not None:
            parts.insert(2, f"accuracy {self.accuracy[0]:.2%} → {self.accuracy[1]:.2%}")
        if self.calibration_images:
            parts.append(f"calibrated on {self.calibration_images:,} other images")
        return ", ".join(parts)


@torch.inference_mode()
def measure_parity(
    model: ModelFn,
    exported: ModelFn,
    batches: Iterable[tuple[Tensor, Tensor]],
    labels: Tensor | None,
    units: Units | None = None,
    config: ModelConfig | None = None,
) -> ParityReport:
    """Run both on pairs of batches (input of the model, input of the file), alternating so that load affects both.

    units: of a regression, whose second result are values instead of probabilities.
    config: of a multi-label model, of which the decision on each label is compared instead of the top-1 label.
    """
    functions = (model, exported)
    probabilities: tuple[list[Tensor], list[Tensor]] = ([], [])
    seconds_per_image: tuple[list[float], list[float]] = ([], [])
    for number, batch in enumerate(batches):
        if number == 0:
            for function, images in zip(functions, batch, strict=True):
                function(images)  # warm-up
        for index, (function, images) in enumerate(zip(functions, batch, strict=True)):
            start = time.perf_counter()
            batch_probabilities = function(images)[1]
            seconds_per_image[index].append((time.perf_counter() - start) / len(images))
            probabilities[index].append(batch_probabilities)
    expected, actual = (torch.cat(parts).double() for parts in probabilities)
    accuracy = None
    if labels is not None and labels.ndim == 1:
        correct = [float((each.argmax(dim=1) == labels).double().mean()) for each in (expected, actual)]
        accuracy = correct[0], correct[1]
    medians = [sorted(times)[len(times) // 2] for times in seconds_per_image]
    diff_NK = (expected - actual).abs().nan_to_num(nan=float("inf"))
    diff_N = diff_NK.amax(dim=1)
    values = [
        ValueDifference(name=name, max_abs_diff=float(diff.max()), mean_abs_diff=float(diff.mean()), std=std)
        for (name, std), diff in zip(units or (), diff_NK.unbind(1), strict=False)
    ]
    agreement = top1_agreement(expected, actual)
    if config is not None and config.task == "multilabel":
        agreement = label_agreement(expected, actual, config.thresholds, config.classes)
    return ParityReport(
        agreement=agreement,
        max_abs_diff=float(diff_N.max()),
        mean_abs_diff=float(diff_N.mean()),
        accuracy=accuracy,
        images_per_second=(1 / medians[0], 1 / medians[1]),
        values=tuple(values),
    )


def check_image_count(available: int, requested: int | None) -> None:
    """Raise a VitralError if there are too few images for a comparison that means something."""
    if available < MIN_IMAGES and (requested is None or requested >= MIN_IMAGES):
        raise VitralError(
            f"{available} images are too few to compare the exported file with the model; at least {MIN_IMAGES} needed",
            f"Name more images with --data (labels are not needed), or accept {available}: --images {available}",
        )


def check_parity(
    parity: ParityReport, precision: ExportPrecision, locate: Callable[[], str], min_agreement: float = MIN_AGREEMENT
) -> None:
    """Raise a VitralError if file and model disagree. `locate` describes where they diverge."""
    failures, hint = [], ""
    if parity.values:
        failures = [str(value) for value in parity.values if not value.relative <= MAX_VALUE_DIFF[precision]]
    elif parity.agreement.value < min_agreement:
        failures.append(f"{parity.agreement}, expected at least {100 * min_agreement:g}%")
        accepted = math.floor(parity.agreement.value * 1000) / 1000
        hint = f". To accept this agreement: --min-agreement {accepted:g}"
    if not parity.values and not parity.max_abs_diff <= MAX_PROBABILITY_DIFF[precision]:
        failures.append(f"a probability differs by {parity.max_abs_diff:.2g}")
        hint = ""
    if failures:
        raise VitralError(
            f"not exported: the {precision} file does not agree with the model: {'; '.join(failures)}",
            locate() + hint,
        )


def first_divergent_block(expected: Sequence[Tensor], actual: Sequence[Tensor], tolerance: float) -> str:
    """Describe the first block whose tokens differ by more than the tolerance (relative RMS error).

    Both lists hold the tokens after the embedding and after each block, and the logits.
    """
    errors: list[float] = []
    for index, (a, b) in enumerate(zip(expected, actual, strict=True)):
        error = (a.float() - b.float()).square().mean().sqrt() / a.float().square().mean().sqrt().clamp_min(1e-9)
        errors.append(float(error))
        if not errors[-1] <= tolerance:
            name = "the embedding" if index == 0 else "the logits" if index == len(expected) - 1 else f"block {index}"
            before = f": relative error {errors[-1]:.1%}, {errors[-2]:.2%} before" if index else ""
            return f"They diverge at {name}{before}"
    return f"The relative error of every block is at most {max(errors):.1%}"
