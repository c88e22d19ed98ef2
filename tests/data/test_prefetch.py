"""Prefetching: the right pixels in order, no buffer overwritten too early, and no threads left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from vitral.data.lazy_images import LazyImages
from vitral.data.prefetch import prefetch_to_device
from vitral.errors import VitralError


class CpuStagingBuffers:
    """StagingBuffers without a device: the "device" reads the host buffers, so early overwrites become visible."""

    def __init__(self, shape: tuple[int, ...], count: int = 3) -> None:
        self.host = [torch.zeros(shape, dtype=torch.uint8) for _ in range(count)]
        self.calls: list[tuple[str, int]] = []

    def copy_to_device(self, slot: int) -> Tensor:
        self.calls.append(("copy", slot))
        return self.host[slot]

    def mark_consumed(self, slot: int) -> None:
        self.calls.append(("consumed", slot))

    def wait_until_copied(self, slot: int) -> int:
        self.calls.append(("wait", slot))
        return slot


class FailingImages(LazyImages):
    """Lazy images that raise an error at batch `fail_at`."""

    def __init__(self, images: Tensor, fail_at: int = 1000) -> None:
        N, C, H, W = images.shape
        self.images, self.shape, self.fail_at, self.is_closed = images, (N, C, H, W), fail_at, False

    def batches(self, batch_indices: Iterable[Tensor]) -> Iterator[Tensor]:
        try:
            for count, rows in enumerate(batch_indices):
                if count == self.fail_at:
                    raise VitralError("a worker died", "try again")
                yield self.images[rows]
        finally:
            self.is_closed = True


IMAGES = torch.randint(0, 256, (97, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
BATCH_INDICES = [torch.randperm(97, generator=torch.Generator().manual_seed(seed))[:11] for seed in range(20)]


def prefetch(images: Any, staging: CpuStagingBuffers | None = None) -> Iterator[Tensor]:
    staging = staging or CpuStagingBuffers((11, *images.shape[1:]))
    return prefetch_to_device(images, BATCH_INDICES, staging)  # type: ignore[arg-type]


def running_threads() -> set[str]:
    return {thread.name.split("_")[0] for thread in threading.enumerate()} & {"prefetch", "gather"}


@pytest.mark.parametrize(
    "images", [IMAGES, IMAGES.flip(3)[:, :, :, ::1], FailingImages(IMAGES)], ids=["tensor", "view", "lazy"]
)
def test_batches_come_in_order(images: Any) -> None:
    tensor = images.images if isinstance(images, FailingImages) else images
    for rows, batch in zip(BATCH_INDICES, prefetch(images), strict=True):
        assert torch.equal(batch, tensor[rows])
    assert not running_threads()


def test_crop_of_a_larger_tensor_is_read_without_a_copy() -> None:
    for rows, batch in zip(BATCH_INDICES, prefetch(IMAGES[:, :, 1:4, 2:6]), strict=True):
        assert torch.equal(batch, IMAGES[rows][:, :, 1:4, 2:6])


def test_buffer_is_reused_only_after_its_batch_was_copied() -> None:
    staging = CpuStagingBuffers((11, 3, 5, 7))
    for rows, batch in zip(BATCH_INDICES, prefetch(IMAGES, staging), strict=True):
        assert torch.equal(batch, IMAGES[rows])
        threading.Event().wait(0.002)  # time for the threads to fill every free buffer
        assert torch.equal(batch, IMAGES[rows])
    in_flight: set[int] = set()
    for call, slot in staging.calls:
        assert (slot in in_flight) == (call != "copy")
        if call == "copy":
            in_flight.add(slot)
        elif call == "wait":
            in_flight.discard(slot)
    assert [call for call, _ in staging.calls].count("consumed") == len(BATCH_INDICES)


def test_error_in_the_reader_is_raised_and_ends_the_threads() -> None:
    images = FailingImages(IMAGES, fail_at=4)
    batches = prefetch(images)
    for _ in range(4):
        next(batches)
    with pytest.raises(VitralError, match="a worker died"):
        next(batches)
    assert images.is_closed
    assert not running_threads()


def test_abandoned_iteration_leaves_no_threads() -> None:
    images = FailingImages(IMAGES)
    batches = prefetch(images)
    next(batches)
    assert running_threads()
    batches.close()  # type: ignore[attr-defined]
    assert images.is_closed
    assert not running_threads()
