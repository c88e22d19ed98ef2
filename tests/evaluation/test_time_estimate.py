"""The expected duration of an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, current_thread, main_thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.clock import FakeClock
from vitral.data.datasets import Split
from vitral.device.threads import thread_count
from vitral.evaluation import time_estimate
from vitral.evaluation.corruptions import CORRUPTIONS
from vitral.evaluation.target_logits import compute_target_logits
from vitral.evaluation.time_estimate import (
    SMALL_SAMPLE,
    duration_text,
    estimate_corrupted_seconds,
    estimate_seconds,
)

SECONDS_PER_IMAGE = 0.002


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(time_estimate, "time", clock)
    return clock


@pytest.mark.parametrize("in_parallel", [True, False])
def test_the_estimate_scales_a_measurement_to_all_images(in_parallel: bool, clock: FakeClock) -> None:
    """In parallel, two threads predict 64 images each in the time that one thread takes for its own."""
    both_threads = Barrier(2, lambda: clock.sleep(SECONDS_PER_IMAGE * SMALL_SAMPLE), timeout=60)

    def predict(images: Tensor) -> Tensor:
        if in_parallel and current_thread() is not main_thread():
            both_threads.wait()
        else:
            clock.sleep(SECONDS_PER_IMAGE * len(images))
        return images.new_zeros(len(images))

    images = torch.zeros(200, 1, 8, 8, dtype=torch.uint8)
    with thread_count(2):
        seconds = estimate_seconds(images, predict, count=200, in_parallel=in_parallel)
        seconds += estimate_corrupted_seconds(images, predict, count=100, in_parallel=in_parallel)
    slept = SECONDS_PER_IMAGE * (200 + 100 * len(CORRUPTIONS))
    assert seconds == pytest.approx(slept / 2 if in_parallel else slept)


def test_the_estimate_of_fewer_images_than_a_sample(clock: FakeClock) -> None:
    images = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)

    def predict(images: Tensor) -> Tensor:
        clock.sleep(SECONDS_PER_IMAGE * len(images))
        return images.new_zeros(len(images))

    assert estimate_seconds(images, predict, count=3) == pytest.approx(3 * SECONDS_PER_IMAGE)


def test_the_duration_is_announced_before_the_logits_are_computed(clock: FakeClock) -> None:
    events: list[str] = []

    def logits(images: Tensor) -> Tensor:
        clock.sleep(SECONDS_PER_IMAGE * len(images))
        return images.new_zeros(len(images), 3)

    def logits_distributed(images: Tensor, progress: Callable[[int], None]) -> Tensor:
        progress(len(images))
        return logits(images)

    predictor = SimpleNamespace(
        hardware=SimpleNamespace(device=torch.device("cpu")), logits=logits, logits_distributed=logits_distributed
    )
    split = Split(images=torch.zeros(2000, 1, 8, 8, dtype=torch.uint8), labels=torch.zeros(2000, dtype=torch.long))
    target: Any = SimpleNamespace(predictor=predictor, split=split, noun="test images")
    with thread_count(1):
        assert compute_target_logits(target, events.append, events.append).shape == (2000, 3)
    message = "Evaluating on 2,000 test images"
    assert events == [message, f"{message}: about 4 s on 1 core", f"{message}: 2,000 done"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.2, "1 s"), (7.4, "7 s"), (41, "40 s"), (58, "60 s"), (100, "2 min"), (4000, "67 min"), (9000, "2.5 h")],
)
def test_durations_are_rounded(seconds: float, expected: str) -> None:
    with thread_count(2):
        assert duration_text(seconds, "cpu") == f"about {expected} on 2 cores"
    assert duration_text(seconds, "cuda") == f"about {expected} on the GPU"
