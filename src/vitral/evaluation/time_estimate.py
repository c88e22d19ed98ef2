"""How long an evaluation takes, from a measurement on a few images."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from vitral.data.datasets import Split
from vitral.data.lazy_images import Images
from vitral.data.variable_images import images_of_one_size
from vitral.evaluation.corruptions import (
    LARGE_IMAGE_BATCH,
    SEVERITIES,
    CorruptionInput,
    corruption_batch_size,
    corruption_inputs,
)
from vitral.evaluation.data import FileImages, evenly_spaced_indices, load_split
from vitral.evaluation.robustness import PredictFn
from vitral.inference.parallel_batches import Item, parallel_map
from vitral.inference.predictor import Predictor
from vitral.utils.text import count_text

SMALL_SAMPLE, LARGE_SAMPLE = 64, 4  # images per thread
FEATURE_SAMPLE = 16  # images per thread, decoded and computed as all others


def estimate_seconds(
    images_NCHW: Images, predict: Callable[[Tensor], object], *, count: int, in_parallel: bool = True
) -> float:
    """Expected duration of `predict` on `count` such images."""
    sample, per_thread = _sample(images_NCHW)
    predict(sample[:per_thread])  # the first call with a shape takes longer
    return _seconds(predict, sample.split(per_thread), in_parallel) * count / len(sample)


def estimate_corrupted_seconds(
    images_NCHW: Images, predict: PredictFn, *, count: int, in_parallel: bool = True
) -> float:
    """Expected duration of `predict` on `count` such images under all corruptions."""
    sample, per_thread = _sample(images_NCHW)
    inputs = list(corruption_inputs(sample, per_thread))
    predict(inputs[0].images)
    seconds = 0.0
    for kind, severities in SEVERITIES.items():
        task = _corrupt_and_predict(kind, severities[len(severities) // 2], predict)
        seconds += _seconds(task, inputs, in_parallel) * len(severities)
    return seconds * count / len(sample)


def estimate_logit_seconds(split: Split, predictor: Predictor) -> float:
    """Expected duration of computing the logits of all images of a split."""
    is_cpu = predictor.hardware.device.type == "cpu"
    return estimate_seconds(split.images, predictor.logits, count=len(split), in_parallel=is_cpu)


def estimate_feature_seconds(split: Split, predictor: Predictor, *, count: int) -> float:
    """Expected time to decode `count` images such as those of a split and to compute their features."""
    indices = evenly_spaced_indices(len(split), FEATURE_SAMPLE * torch.get_num_threads())
    started = time.perf_counter()
    if isinstance(split.images, FileImages):
        images, _ = split.images.decode(indices)
    else:
        images = load_split(split, predictor, indices=indices).images
    seconds = time.perf_counter() - started
    predictor.features(images)  # the first call takes longer
    started = time.perf_counter()
    predictor.features(images)
    return (seconds + time.perf_counter() - started) * count / len(indices)


def _sample(images_NCHW: Images) -> tuple[Tensor, int]:
    """A few images, and how many of them each thread computes."""
    is_small = corruption_batch_size(*images_NCHW.shape[2:]) > LARGE_IMAGE_BATCH
    per_thread = SMALL_SAMPLE if is_small else LARGE_SAMPLE
    return images_of_one_size(images_NCHW, per_thread * torch.get_num_threads()), per_thread


def _corrupt_and_predict(kind: str, severity: float, predict: PredictFn) -> Callable[[CorruptionInput], Tensor]:
    return lambda inputs: predict(inputs.corrupt(kind, severity))


def _seconds(function: Callable[[Item], object], items: Iterable[Item], in_parallel: bool) -> float:
    """Time to apply a function to all items."""
    started = time.perf_counter()
    for _ in parallel_map(function, items) if in_parallel else map(function, items):
        pass
    return time.perf_counter() - started


def duration_text(seconds: float, device: str) -> str:
    """`about 40 s on 2 cores`, rounded to the accuracy of the measurement."""
    if seconds < 60:
        step = 1 if seconds < 10 else 5
        duration = f"{max(round(seconds / step), 1) * step} s"
    elif seconds < 5400:
        duration = f"{round(seconds / 60)} min"
    else:
        duration = f"{seconds / 3600:.1f} h"
    threads = torch.get_num_threads()
    cores = count_text(threads, "core")
    return f"about {duration} on {cores if device == 'cpu' else 'the GPU'}"
