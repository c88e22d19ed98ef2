"""Images that need not be in memory: asked like a tensor N C H W of uint8, read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor


class Images:
    """What a set of images too large for the memory can do. `batches` is how they are read; the rest follows."""

    shape: tuple[int, int, int, int]  # N C H W

    def batches(self, chosen: Iterable[Tensor]) -> Iterator[Tensor]:
        """For each row of indices its images, in order; reads a few rows ahead, and no more."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Tensor | int | slice) -> Tensor:
        rows = torch.arange(len(self))[index]
        (found,) = self.batches([rows.reshape(-1)])
        return found[0] if rows.ndim == 0 else found

    def split(self, batch: int) -> Iterator[Tensor]:
        return self.batches(torch.arange(len(self)).split(batch))


Pixels = Tensor | Images


class Adapted(Images):
    """Images that are changed when they are read: `change` makes a batch of `shape` (C H W) from a batch."""

    def __init__(self, images: Pixels, change: Callable[[Tensor], Tensor], shape: tuple[int, int, int]) -> None:
        self.images, self.change, self.shape = images, change, (len(images), *shape)

    def batches(self, chosen: Iterable[Tensor]) -> Iterator[Tensor]:
        return map(self.change, batches_of(self.images, chosen))


class Chosen(Images):
    """Some of a set's images, by their places in it."""

    def __init__(self, images: Images, places: Tensor) -> None:
        self.images, self.places, self.shape = images, places, (len(places), *images.shape[1:])

    def batches(self, chosen: Iterable[Tensor]) -> Iterator[Tensor]:
        return self.images.batches(self.places[rows] for rows in chosen)


class Joined(Images):
    """One set behind the other."""

    def __init__(self, first: Pixels, second: Pixels) -> None:
        self.first, self.second = first, second
        _, C, H, W = first.shape
        self.shape = (len(first) + len(second), C, H, W)

    def batches(self, chosen: Iterable[Tensor]) -> Iterator[Tensor]:
        for rows in chosen:
            found = torch.empty(len(rows), *self.shape[1:], dtype=torch.uint8)
            for images, mine, shift in (
                (self.first, rows < len(self.first), 0),
                (self.second, rows >= len(self.first), len(self.first)),
            ):
                if mine.any():
                    found[mine] = images[rows[mine] - shift]
            yield found


def these(images: Pixels, chosen_N: Tensor) -> Pixels:
    """Those for which `chosen_N` is true; read when they are asked for, where the others are."""
    return Chosen(images, chosen_N.nonzero().flatten()) if isinstance(images, Images) else images[chosen_N]


def batches_of(images: Pixels, chosen: Iterable[Tensor]) -> Iterator[Tensor]:
    if isinstance(images, Images):
        return images.batches(chosen)
    return (images[rows] for rows in chosen)


def some_of(images: Pixels, most_bytes: int) -> Iterator[Tensor]:
    """The images in parts, or evenly spaced ones of them where all would be more than `most_bytes`."""
    size = images.shape[1] * images.shape[2] * images.shape[3]
    count = max(min(len(images), most_bytes // max(size, 1)), 1)
    if isinstance(images, Tensor) and count == len(images):
        return iter(images.split(1024))
    rows = torch.linspace(0, len(images) - 1, count, dtype=torch.float64).round().long()
    return batches_of(images, rows.split(256))
