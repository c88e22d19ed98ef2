"""From logits and labels to loss, accuracy, per-class figures and the confusion matrix.

Shapes:  N images   K classes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.lazy_images import Pixels, batches_of
from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.errors import VitralError

Heard = Callable[[int], None]  # how many images have been answered while others wait


def unheard(answered: int) -> None:
    pass


def logits_of(
    model: nn.Module,
    images_NCHW: Pixels,
    preprocessing: Preprocessing,
    hardware: Hardware,
    batch: int = 512,
    heard: Heard = unheard,
) -> Tensor:
    """The model's answers for uint8 images: N K, fp32, on the device. `heard` is told how many, between batches."""
    check_images(images_NCHW, preprocessing)
    return _answers(model, images_NCHW.split(batch), preprocessing, hardware, heard)


def logits_together(
    model: nn.Module,
    images_NCHW: Pixels,
    preprocessing: Preprocessing,
    hardware: Hardware,
    batch: int = 512,
    heard: Heard = unheard,
) -> Tensor:
    """The same, computed by all processes together, each its share; every process gets all of it, each image once.

    Shares are of one size, filled up with the last image: a divided model needs all processes at every batch.
    """
    world, N = hardware.world, len(images_NCHW)
    if world.size == 1 or not N:
        return logits_of(model, images_NCHW, preprocessing, hardware, batch, heard)
    each = -(-N // world.size)
    mine = torch.arange(each * world.rank, each * (world.rank + 1)).clamp(max=N - 1)
    answers = _answers(model, batches_of(images_NCHW, mine.split(batch)), preprocessing, hardware, heard)
    return world.stack(answers)[:N]


@torch.inference_mode()
def _answers(
    model: nn.Module, batches: Iterable[Tensor], preprocessing: Preprocessing, hardware: Hardware, heard: Heard
) -> Tensor:
    answers: list[Tensor] = []
    for images in batches:
        if answers:
            heard(sum(map(len, answers)))
        with hardware.autocast():
            answers.append(model(preprocessing.normalise(images.to(hardware.device))).float())
    return torch.cat(answers)


def check_images(images_NCHW: Pixels, preprocessing: Preprocessing) -> None:
    if not len(images_NCHW):
        raise VitralError("there are no images to evaluate", "choose a set or folder with --data")
    if images_NCHW.shape[1] != preprocessing.channels:
        raise VitralError(
            f"the images have {images_NCHW.shape[1]} channels; the model wants {preprocessing.channels}",
            "vitral.data.preprocess.adapt makes colour from gray and gray from colour",
        )


@dataclass(frozen=True, kw_only=True)
class ClassFigures:
    name: str
    precision: float  # of the images called this, how many are; 0 where none was called this
    recall: float  # of the images that are this, how many were called it; 0 where there is none
    f1: float
    images: int


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What an evaluation found."""

    images: int
    loss: float
    top1: float
    top1_low: float  # 95 % interval (Wilson)
    top1_high: float
    top5: float  # 1 where there are at most five classes
    per_class: tuple[ClassFigures, ...]
    confusion: tuple[tuple[int, ...], ...]  # confusion[true][said]

    def as_dict(self) -> dict[str, Any]:
        from vitral.utils.serialization import to_plain

        plain: dict[str, Any] = to_plain(self)
        return plain

    def mistakes(self, most: int = 5) -> list[tuple[str, str, int]]:
        """The commonest confusions: (is, was called, how often)."""
        names = [figures.name for figures in self.per_class]
        found = [
            (names[true], names[said], count)
            for true, row in enumerate(self.confusion)
            for said, count in enumerate(row)
            if true != said and count
        ]
        return sorted(found, key=lambda mistake: -mistake[2])[:most]


def measure(logits_NK: Tensor, labels_N: Tensor, classes: tuple[str, ...]) -> Metrics:
    """All figures at once, from one pass over the set."""
    N, K = logits_NK.shape
    if not N:
        raise VitralError("there are no images to evaluate", "choose a set or folder with --data")
    if len(classes) != K:
        raise VitralError(f"the model answers for {K} classes, but {len(classes)} are named", "give one name for each")
    if strange := labels_N[(labels_N < 0) | (labels_N >= K)].unique().tolist():
        raise VitralError(
            f"there are labels outside the model's {K} classes: {', '.join(map(str, strange[:5]))}",
            f"labels count from 0 ({classes[0]}) to {K - 1} ({classes[-1]})",
        )
    labels_N = labels_N.to(logits_NK.device)
    ranked = logits_NK.topk(min(5, K), dim=1).indices
    confusion = torch.bincount(labels_N * K + ranked[:, 0], minlength=K * K).view(K, K).cpu().double()
    right, said, true = confusion.diag(), confusion.sum(dim=0), confusion.sum(dim=1)
    precision, recall = right / said.clamp_min(1), right / true.clamp_min(1)
    f1 = 2 * right / (said + true).clamp_min(1)
    top1 = right.sum().item() / N
    low, high = wilson(top1, N)
    per_class = zip(classes, precision.tolist(), recall.tolist(), f1.tolist(), true.long().tolist(), strict=True)
    return Metrics(
        images=N,
        loss=F.cross_entropy(logits_NK, labels_N).item(),
        top1=top1,
        top1_low=low,
        top1_high=high,
        top5=(ranked == labels_N[:, None]).any(dim=1).double().mean().item(),
        per_class=tuple(
            ClassFigures(name=name, precision=p, recall=r, f1=f, images=n) for name, p, r, f, n in per_class
        ),
        confusion=tuple(tuple(row) for row in confusion.long().tolist()),
    )


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The interval in which the true share lies with 95 % (Wilson, 1927): sound near 0 and 1 too."""
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(middle - half, 0.0), min(middle + half, 1.0)
