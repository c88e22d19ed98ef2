"""The exported file beside the model, on real images: how far apart, how often the same, how good, how fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.export.wrapper import Precision

Ask = Callable[[Tensor], tuple[Tensor, Tensor]]  # uint8 images → logits, probabilities
LEAST_SAME = {"fp32": 0.999, "fp16": 0.99, "bf16": 0.98, "int8": 0.9}  # share of equal first labels
MOST_OFF = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.15, "int8": 0.5}  # of a probability
MOST_LOST = 0.005  # of the accuracy


@dataclass(frozen=True, kw_only=True)
class Agreement:
    images: int
    largest_difference: float  # between two probabilities
    same: float  # share of images with the same first label
    accuracy: tuple[float, float] | None  # of the model, of the file; None without labels
    images_per_second: tuple[float, float]

    def __str__(self) -> str:
        right = f"   accuracy {self.accuracy[0]:.2%} → {self.accuracy[1]:.2%}" if self.accuracy else ""
        speeds = f"{self.images_per_second[0]:,.0f} → {self.images_per_second[1]:,.0f} images/s"
        return (
            f"same first label on {self.same:.2%} of {self.images:,} images   "
            f"probabilities within {self.largest_difference:.2g}{right}   {speeds}"
        )


@torch.inference_mode()
def compare(model: Ask, file: Ask, batches: Sequence[tuple[Tensor, Tensor]], labels: Tensor | None) -> Agreement:
    """Both are asked in turns, so that a busy moment meets both. A batch: for the model, and for the file."""
    answers: tuple[list[Tensor], list[Tensor]] = ([], [])
    seconds: tuple[list[float], list[float]] = ([], [])
    for ask, some in zip((model, file), batches[0], strict=True):
        ask(some)
    for both in batches:
        for index, (ask, some) in enumerate(zip((model, file), both, strict=True)):
            start = time.perf_counter()
            probabilities = ask(some)[1]
            seconds[index].append((time.perf_counter() - start) / len(some))
            answers[index].append(probabilities)
    said = [torch.cat(parts).double() for parts in answers]
    first = [probabilities.argmax(dim=1) for probabilities in said]
    right = None
    if labels is not None:
        right = (float((first[0] == labels).double().mean()), float((first[1] == labels).double().mean()))
    medians = [sorted(times)[len(times) // 2] for times in seconds]
    return Agreement(
        images=len(said[0]),
        largest_difference=float((said[0] - said[1]).abs().nan_to_num(nan=float("inf")).max()),
        same=float((first[0] == first[1]).double().mean()),
        accuracy=right,
        images_per_second=(1 / medians[0], 1 / medians[1]),
    )


def check(found: Agreement, precision: Precision, where: Callable[[], str]) -> None:
    """An error that names the place where file and model part, unless they agree."""
    one = 1 / found.images  # a single image may differ: of few images it is more than any share
    faults = []
    if found.same < min(LEAST_SAME[precision], 1 - one):
        faults.append(f"only {found.same:.1%} of {found.images:,} images keep their first label")
    if not found.largest_difference <= MOST_OFF[precision]:
        faults.append(f"a probability differs by {found.largest_difference:.2g}")
    if found.accuracy and found.accuracy[0] - found.accuracy[1] > max(MOST_LOST, one) + 1e-9:
        faults.append(f"accuracy falls from {found.accuracy[0]:.2%} to {found.accuracy[1]:.2%}")
    if faults:
        raise VitralError(
            f"not exported: in {precision} the file does not say what the model says: {'; '.join(faults)}",
            where() or "export in fp32",
        )


def parting(ours: list[Tensor], theirs: list[Tensor], bound: float) -> str:
    """Where two lists of tokens, block by block, begin to differ."""
    lines = []
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        off = float((a.float() - b.float()).square().mean().sqrt() / a.float().square().mean().sqrt().clamp_min(1e-9))
        name = "the embedding" if index == 0 else "the logits" if index == len(ours) - 1 else f"block {index}"
        lines.append((name, off))
        if not off <= bound:
            return f"they part at {name}: {off:.1%} off, {lines[-2][1]:.2%} before" if index else f"they part at {name}"
    return f"block by block they are within {max(off for _, off in lines):.1%}"
