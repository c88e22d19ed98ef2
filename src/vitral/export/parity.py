"""Parity of an exported file with the model: agreement, accuracy and speed on real images."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.export.wrapper import ExportPrecision

ModelFn = Callable[[Tensor], tuple[Tensor, Tensor]]  # uint8 images (B, C, H, W) to logits and probabilities (B, K)
MIN_TOP1_AGREEMENT = {"fp32": 0.999, "fp16": 0.99, "bf16": 0.98, "int8": 0.9}
MAX_PROBABILITY_DIFF = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.15, "int8": 0.5}
MAX_ACCURACY_DROP = 0.005


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """Comparison of the model (first value of each pair) with the exported file (second value)."""

    images: int
    max_abs_diff: float  # of the probabilities
    top1_agreement: float
    accuracy: tuple[float, float] | None  # None without labels
    images_per_second: tuple[float, float]

    def __str__(self) -> str:
        parts = [
            f"top-1 agreement {self.top1_agreement:.2%} on {self.images:,} images",
            f"probabilities within {self.max_abs_diff:.2g}",
            f"{self.images_per_second[0]:,.0f} → {self.images_per_second[1]:,.0f} images/s",
        ]
        if self.accuracy is not None:
            parts.insert(2, f"accuracy {self.accuracy[0]:.2%} → {self.accuracy[1]:.2%}")
        return ", ".join(parts)


@torch.inference_mode()
def measure_parity(
    model: ModelFn, exported: ModelFn, batches: Sequence[tuple[Tensor, Tensor]], labels: Tensor | None
) -> ParityReport:
    """Run both on pairs of batches (input of the model, input of the file), alternating so that load affects both."""
    functions = (model, exported)
    probabilities: tuple[list[Tensor], list[Tensor]] = ([], [])
    seconds_per_image: tuple[list[float], list[float]] = ([], [])
    for function, images in zip(functions, batches[0], strict=True):
        function(images)  # warm-up
    for batch in batches:
        for index, (function, images) in enumerate(zip(functions, batch, strict=True)):
            start = time.perf_counter()
            batch_probabilities = function(images)[1]
            seconds_per_image[index].append((time.perf_counter() - start) / len(images))
            probabilities[index].append(batch_probabilities)
    expected, actual = (torch.cat(parts).double() for parts in probabilities)
    top1 = expected.argmax(dim=1), actual.argmax(dim=1)
    accuracy = None
    if labels is not None:
        accuracy = (float((top1[0] == labels).double().mean()), float((top1[1] == labels).double().mean()))
    medians = [sorted(times)[len(times) // 2] for times in seconds_per_image]
    return ParityReport(
        images=len(expected),
        max_abs_diff=float((expected - actual).abs().nan_to_num(nan=float("inf")).max()),
        top1_agreement=float((top1[0] == top1[1]).double().mean()),
        accuracy=accuracy,
        images_per_second=(1 / medians[0], 1 / medians[1]),
    )


def check_parity(parity: ParityReport, precision: ExportPrecision, locate: Callable[[], str]) -> None:
    """Raise a VitralError if file and model disagree. `locate` describes where they diverge."""
    one_image = 1 / parity.images  # a single image may differ: with few images it exceeds any tolerance
    failures = []
    if parity.top1_agreement < min(MIN_TOP1_AGREEMENT[precision], 1 - one_image):
        failures.append(f"top-1 agreement is {parity.top1_agreement:.1%} on {parity.images:,} images")
    if not parity.max_abs_diff <= MAX_PROBABILITY_DIFF[precision]:
        failures.append(f"a probability differs by {parity.max_abs_diff:.2g}")
    if parity.accuracy and parity.accuracy[0] - parity.accuracy[1] > max(MAX_ACCURACY_DROP, one_image) + 1e-9:
        failures.append(f"accuracy drops from {parity.accuracy[0]:.2%} to {parity.accuracy[1]:.2%}")
    if failures:
        raise VitralError(
            f"not exported: the {precision} file does not agree with the model: {'; '.join(failures)}",
            locate() or "Export in fp32",
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
