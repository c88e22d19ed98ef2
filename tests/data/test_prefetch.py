"""Batches gathered ahead for a device: the right pixels, in order, and nothing left behind when something stops."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from vitral.data import prefetch as feed
from vitral.data.lazy_images import Images
from vitral.errors import VitralError


class Pretend:
    """As vitral.device.hardware.Staging, on a CPU. A buffer that is written too early spoils what the device still reads."""

    def __init__(self, shape: tuple[int, ...], count: int = 3) -> None:
        self.here = [torch.zeros(shape, dtype=torch.uint8) for _ in range(count)]
        self.said: list[tuple[str, int]] = []

    def send(self, place: int) -> Tensor:
        self.said.append(("send", place))
        return self.here[place]

    def used(self, place: int) -> None:
        self.said.append(("used", place))

    def wait(self, place: int) -> int:
        self.said.append(("wait", place))
        return place


class Read(Images):
    """Images that come one batch at a time, until one does not."""

    def __init__(self, images: Tensor, breaks_at: int = 1000) -> None:
        self.images, self.shape, self.breaks_at, self.closed = images, tuple(images.shape), breaks_at, False

    def batches(self, chosen: Iterable[Tensor]) -> Iterator[Tensor]:
        try:
            for count, rows in enumerate(chosen):
                if count == self.breaks_at:
                    raise VitralError("a worker died", "try again")
                yield self.images[rows]
        finally:
            self.closed = True


IMAGES = torch.randint(0, 256, (97, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
ROWS = [torch.randperm(97, generator=torch.Generator().manual_seed(seed))[:11] for seed in range(20)]


def fed(images: Any, staging: Pretend | None = None) -> Iterator[Tensor]:
    return feed.fed(images, ROWS, staging or Pretend((11, 3, 5, 7)))  # type: ignore[arg-type]


def threads() -> set[str]:
    return {thread.name.split("_")[0] for thread in threading.enumerate()} & {"feed", "gather"}


@pytest.mark.parametrize("images", [IMAGES, IMAGES.flip(3)[:, :, :, ::1], Read(IMAGES)], ids=["mapped", "view", "read"])
def test_each_row_becomes_its_images_in_order(images: Any) -> None:
    whole = images.images if isinstance(images, Read) else images
    for rows, batch in zip(ROWS, fed(images), strict=True):
        assert torch.equal(batch, whole[rows])
    assert not threads()


def test_a_cut_out_of_a_larger_picture_is_read_where_it_lies() -> None:
    for rows, batch in zip(ROWS, feed.fed(IMAGES[:, :, 1:4, 2:6], ROWS, Pretend((11, 3, 3, 4))), strict=True):  # type: ignore[arg-type]
        assert torch.equal(batch, IMAGES[rows][:, :, 1:4, 2:6])


def test_a_buffer_is_written_again_only_after_its_batch_has_left_it() -> None:
    staging = Pretend((11, 3, 5, 7))
    for rows, batch in zip(ROWS, fed(IMAGES, staging), strict=True):
        assert torch.equal(batch, IMAGES[rows])
        threading.Event().wait(0.002)  # the threads fill whatever they were given
        assert torch.equal(batch, IMAGES[rows])
    sent: set[int] = set()
    for what, place in staging.said:
        assert (place in sent) == (what != "send")
        (sent.add if what == "send" else sent.discard if what == "wait" else lambda _: None)(place)
    assert [what for what, _ in staging.said].count("used") == len(ROWS)


def test_an_error_of_the_reader_reaches_who_asks_and_ends_the_threads() -> None:
    images = Read(IMAGES, breaks_at=4)
    batches = fed(images)
    for _ in range(4):
        next(batches)
    with pytest.raises(VitralError, match="a worker died"):
        next(batches)
    assert images.closed
    assert not threads()


def test_who_stops_early_leaves_no_thread_behind() -> None:
    images = Read(IMAGES)
    batches = fed(images)
    next(batches)
    assert threads()
    batches.close()  # type: ignore[attr-defined]
    assert images.closed
    assert not threads()
