"""The expected duration of an evaluation."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from vitral.device.threads import thread_count
from vitral.evaluation.corruptions import CORRUPTIONS
from vitral.evaluation.time_estimate import duration_text, estimate_corrupted_seconds, estimate_seconds

SECONDS_PER_IMAGE = 0.002


def predict_slowly(images: Tensor) -> Tensor:
    time.sleep(SECONDS_PER_IMAGE * len(images))
    return torch.zeros(len(images), dtype=torch.long)


@pytest.mark.parametrize("in_parallel", [True, False])
def test_the_estimate_scales_a_measurement_to_all_images(in_parallel: bool) -> None:
    images = torch.zeros(200, 1, 8, 8, dtype=torch.uint8)
    with thread_count(2):
        seconds = estimate_seconds(images, predict_slowly, count=200, in_parallel=in_parallel)
        seconds += estimate_corrupted_seconds(images, predict_slowly, count=100, in_parallel=in_parallel)
    slept = SECONDS_PER_IMAGE * (200 + 100 * len(CORRUPTIONS)) / (2 if in_parallel else 1)
    assert 0.9 * slept < seconds < 10 * slept  # a busy machine takes longer


def test_the_estimate_of_fewer_images_than_a_sample() -> None:
    images = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    seconds = estimate_seconds(images, predict_slowly, count=3)
    assert seconds >= 3 * SECONDS_PER_IMAGE / torch.get_num_threads()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.2, "1 s"), (7.4, "7 s"), (41, "40 s"), (58, "60 s"), (100, "2 min"), (4000, "67 min"), (9000, "2.5 h")],
)
def test_durations_are_rounded(seconds: float, expected: str) -> None:
    with thread_count(2):
        assert duration_text(seconds, "cpu") == f"about {expected} on 2 cores"
    assert duration_text(seconds, "cuda") == f"about {expected} on the GPU"
