"""How long an evaluation takes, from a measurement on a few images."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from vitral.data.lazy_images import Images
from vitral.data.variable_images import images_of_one_size
from vitral.evaluation.corruptions import (
    LARGE_IMAGE_BATCH,
    SEVERITIES,
    CorruptionInput,
    corruption_batch_size,
    corruption_inputs,
)
from vitral.evaluation.robustness import PredictFn
from vitral.inference.parallel_batches import Item, parallel_map

SMALL_SAMPLE, LARGE_SAMPLE = 64, 4  # images per thread


def estimate_seconds(
    images_NCHW: Images, predict: PredictFn, *, num_clean: int, num_corrupted: int, in_parallel: bool = True
) -> float:
    """Expected duration of `predict` on clean images, and on `num_corrupted` images under all corruptions."""
    is_small = corruption_batch_size(*images_NCHW.shape[2:]) > LARGE_IMAGE_BATCH
    per_thread = SMALL_SAMPLE if is_small else LARGE_SAMPLE
    sample = images_of_one_size(images_NCHW, per_thread * torch.get_num_threads())
    predict(sample[:per_thread])  # the first call with a shape takes longer
    seconds = _seconds(predict, sample.split(per_thread), in_parallel) * num_clean
    if num_corrupted:
        inputs = list(corruption_inputs(sample, per_thread))
        for kind, severities in SEVERITIES.items():
            task = _corrupt_and_predict(kind, severities[len(severities) // 2], predict)
            seconds += _seconds(task, inputs, in_parallel) * num_corrupted * len(severities)
    return seconds / len(sample)


def _corrupt_and_predict(kind: str, severity: float, predict: PredictFn) -> Callable[[CorruptionInput], Tensor]:
    return lambda inputs: predict(inputs.corrupt(kind, severity))


def _seconds(function: Callable[[Item], object], items: Iterable[Item], in_parallel: bool) -> float:
    """Time to apply a function to all items."""
    started = time.perf_counter()
    for _ in parallel_map(function, items) if in_parallel else map(function, items):
        pass
    return time.perf_counter() - started


def duration_text(seconds: float, device: str) -> str:
    """`about 40 s on 2 cores`, rounded to what such a measurement can tell."""
    if seconds < 60:
        step = 1 if seconds < 10 else 5
        duration = f"{max(round(seconds / step), 1) * step} s"
    elif seconds < 5400:
        duration = f"{round(seconds / 60)} min"
    else:
        duration = f"{seconds / 3600:.1f} h"
    threads = torch.get_num_threads()
    cores = f"{threads} core{'s' if threads > 1 else ''}"
    return f"about {duration} on {cores if device == 'cpu' else 'the GPU'}"
