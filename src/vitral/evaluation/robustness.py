"""Accuracy under image corruption: five corruptions at five severities.

Shapes:  N images   C channels   H, W pixels   S corruptions × severities   R resamples
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vitral.data.lazy_images import Images
from vitral.data.variable_images import VariableSizeImages
from vitral.evaluation.bootstrap import bootstrap, intervals
from vitral.evaluation.corruptions import CORRUPTIONS, SEVERITIES, CorruptionInput, corruption_inputs
from vitral.inference.parallel_batches import parallel_map
from vitral.utils.intervals import Interval
from vitral.utils.progress import ProgressFn, no_progress

PredictFn = Callable[[Tensor], Tensor]  # uint8 images (B, C, H, W) to class indices (B,)
Task = tuple[Tensor, int, CorruptionInput]  # rows of the images, column of the corruption, the images


@dataclass(frozen=True, kw_only=True)
class CorruptionResult:
    """Accuracy under one corruption at its five severities, mildest first."""

    corruption: str
    severities: tuple[float, ...]
    accuracy: tuple[Interval, ...]
    relative_accuracy: Interval  # mean accuracy over the severities, divided by the clean accuracy


@dataclass(frozen=True, kw_only=True)
class Robustness:
    images: int
    clean_accuracy: float  # on the same images without corruption
    relative_accuracy: Interval  # mean over all corruptions
    corruptions: tuple[CorruptionResult, ...]


def measure_robustness(
    images_NCHW: Images,
    labels_N: Tensor,
    predict: PredictFn,
    *,
    clean_N: Tensor | None = None,
    in_parallel: bool = True,
    progress: ProgressFn = no_progress,
) -> Robustness:
    """Evaluate `predict` on clean and corrupted images.

    Args:
        clean_N: classes predicted for the clean images, if they are known.
        in_parallel: call `predict` in several threads at once. Otherwise only the images are corrupted in them.
        progress: receives the number of corrupted images completed so far.
    """
    if clean_N is None:
        clean_N = torch.empty(len(images_NCHW), dtype=torch.long)
        for rows, images in image_groups(images_NCHW):
            clean_N[rows] = predict(images).cpu()
    predicted_NS = predict_corrupted(images_NCHW, predict, in_parallel, progress)
    predicted = torch.cat([clean_N.cpu()[:, None], predicted_NS], dim=1)
    return robustness_of((predicted == labels_N.cpu()[:, None]).float())


def predict_corrupted(
    images_NCHW: Images, predict: PredictFn, in_parallel: bool, progress: ProgressFn = no_progress
) -> Tensor:
    """Classes (N, S) predicted for the images under each of CORRUPTIONS."""
    predicted_NS = torch.empty(len(images_NCHW), len(CORRUPTIONS), dtype=torch.long)
    completed = 0

    def corrupt_task(task: Task) -> tuple[Tensor, int, Tensor]:
        rows, column, inputs = task
        return rows, column, inputs.corrupt(*CORRUPTIONS[column])

    def predict_task(corrupted: tuple[Tensor, int, Tensor]) -> tuple[Tensor, int, Tensor]:
        rows, column, images = corrupted
        return rows, column, predict(images).cpu()

    if in_parallel:
        results = parallel_map(lambda task: predict_task(corrupt_task(task)), corruption_tasks(images_NCHW))
    else:
        results = map(predict_task, parallel_map(corrupt_task, corruption_tasks(images_NCHW)))
    for rows, column, classes in results:
        predicted_NS[rows, column] = classes
        completed += len(rows)
        progress(completed)
    return predicted_NS


def corruption_tasks(images_NCHW: Images) -> Iterator[Task]:
    """Each batch of images under every corruption."""
    for group, images in image_groups(images_NCHW):
        start = 0
        for inputs in corruption_inputs(images):
            rows = group[start : start + len(inputs.images)]
            start += len(rows)
            for column in range(len(CORRUPTIONS)):
                yield rows, column, inputs


def image_groups(images_NCHW: Images) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and images (B, C, H, W) of each image size."""
    rows = torch.arange(len(images_NCHW))
    if isinstance(images_NCHW, VariableSizeImages):
        groups = images_NCHW.group_rows(rows)
        yield from zip(groups, images_NCHW.batches(groups), strict=True)
    else:
        yield rows, images_NCHW[:]


def robustness_of(correct_NS: Tensor) -> Robustness:
    """Accuracies and intervals from whether the prediction is correct: of the clean image, then of CORRUPTIONS."""
    num_kinds, N = len(SEVERITIES), len(correct_NS)

    def statistics(counts_RN: Tensor) -> Tensor:
        """Accuracy per corruption and severity, relative accuracy per corruption, overall relative accuracy."""
        accuracy = (counts_RN @ correct_NS).double() / N
        relative = accuracy[:, 1:].unflatten(1, (num_kinds, -1)).mean(dim=2) / accuracy[:, :1].clamp_min(1e-12)
        return torch.cat([accuracy[:, 1:], relative, relative.mean(dim=1, keepdim=True)], dim=1)

    estimates = intervals(statistics(torch.ones(1, N))[0], bootstrap(statistics, N))
    num_severities = len(estimates) // num_kinds - 1
    return Robustness(
        images=N,
        clean_accuracy=correct_NS[:, 0].mean().item(),
        relative_accuracy=estimates[-1],
        corruptions=tuple(
            CorruptionResult(
                corruption=kind,
                severities=severities,
                accuracy=tuple(estimates[index * num_severities : (index + 1) * num_severities]),
                relative_accuracy=estimates[num_kinds * num_severities + index],
            )
            for index, (kind, severities) in enumerate(SEVERITIES.items())
        ),
    )
