"""Image sets that need not be in memory: indexed like a tensor (N, C, H, W) of pixels, read on access."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import tee

import torch
from torch import Tensor


class LazyImages:
    """Interface of an image set that is too large for memory. Subclasses implement `batches`."""

    shape: tuple[int, int, int, int]  # (N, C, H, W)
    dtype: torch.dtype = torch.uint8  # uint16 or float32 for images that are not photographs

    def batches(self, batch_indices: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the images of each index tensor, in order. Reads ahead by a bounded number of batches."""
        raise NotImplementedError

    def resolve(self) -> Images:
        """The images to read from now on: a tensor, once all are in memory or in a memory-mapped file."""
        return self

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (image for batch in self.split(1) for image in batch)

    def __getitem__(self, index: Tensor | int | slice) -> Tensor:
        rows = torch.arange(len(self))[index]
        (images,) = self.batches([rows.reshape(-1)])
        return images[0] if rows.ndim == 0 else images

    def split(self, batch_size: int) -> Iterator[Tensor]:
        return self.batches(torch.arange(len(self)).split(batch_size))

    def select(self, rows: Tensor) -> LazyImages:
        """The images at `rows`."""
        return SubsetImages(self, rows)

    def group_rows(self, rows: Tensor) -> list[Tensor]:
        """The indices in groups of images that have one size."""
        return [rows]


Images = Tensor | LazyImages  # pixels (N, C, H, W), uint8 for photographs


class MappedImages(LazyImages):
    """Images transformed on access: `transform` maps a batch to a batch of images with `shape` (C, H, W)."""

    def __init__(self, images: Images, transform: Callable[[Tensor], Tensor], shape: tuple[int, int, int]) -> None:
        self.images, self.transform, self.shape = images, transform, (len(images), *shape)
        self.dtype = images.dtype

    def batches(self, batch_indices: Iterable[Tensor]) -> Iterator[Tensor]:
        return map(self.transform, iter_batches(self.images, batch_indices))


class SubsetImages(LazyImages):
    """The images at `indices`."""

    def __init__(self, images: LazyImages, indices: Tensor) -> None:
        self.images, self.indices, self.shape = images, indices, (len(indices), *images.shape[1:])
        self.dtype = images.dtype

    def batches(self, batch_indices: Iterable[Tensor]) -> Iterator[Tensor]:
        return self.images.batches(self.indices[rows] for rows in batch_indices)


class ConcatImages(LazyImages):
    """Image sets of equal shape and type, one after the other. Each reads ahead as it does on its own."""

    def __init__(self, parts: Sequence[Images]) -> None:
        self.parts = tuple(parts)
        _, C, H, W = parts[0].shape
        self.shape, self.dtype = (sum(map(len, parts)), C, H, W), parts[0].dtype

    def batches(self, batch_indices: Iterable[Tensor]) -> Iterator[Tensor]:
        ends = torch.tensor([len(part) for part in self.parts]).cumsum(dim=0)
        *for_parts, for_order = tee(batch_indices, len(self.parts) + 1)

        def part_rows(index: int, batches: Iterable[Tensor]) -> Iterator[Tensor]:
            start = int(ends[index]) - len(self.parts[index])
            return (rows[(rows >= start) & (rows < ends[index])] - start for rows in batches)

        readers = [
            iter_batches(part, part_rows(index, batches))
            for index, (part, batches) in enumerate(zip(self.parts, for_parts, strict=True))
        ]
        for rows in for_order:
            images = torch.cat([next(reader) for reader in readers])  # part by part
            # Gathers: index_put does not support uint16.
            yield images[torch.bucketize(rows, ends, right=True).argsort(stable=True).argsort()]
        for reader in readers:
            next(reader, None)  # ends it, so that it keeps its worker processes for the next epoch


def select_images(images: Images, mask_N: Tensor) -> Images:
    """The images where `mask_N` is true; stays lazy if `images` is."""
    return images.select(mask_N.nonzero().flatten()) if isinstance(images, LazyImages) else images[mask_N]


def iter_batches(images: Images, batch_indices: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the images of each index tensor."""
    if isinstance(images, LazyImages):
        return images.batches(batch_indices)
    if images.dtype == torch.uint16:  # as int16, which can be indexed on every device
        return (images.view(torch.int16)[rows].view(torch.uint16) for rows in batch_indices)
    return (images[rows] for rows in batch_indices)


def iter_sample(images: Images, max_bytes: int) -> Iterator[Tensor]:
    """Yield all images in batches, or an evenly spaced subset if all would be more than `max_bytes`."""
    image_bytes = images.shape[1] * images.shape[2] * images.shape[3] * images.dtype.itemsize
    count = max(min(len(images), max_bytes // max(image_bytes, 1)), 1)
    if isinstance(images, Tensor) and count == len(images):
        return iter(images.split(1024))
    rows = torch.linspace(0, len(images) - 1, count, dtype=torch.float64).round().long()
    groups = images.group_rows(rows) if isinstance(images, LazyImages) else [rows]
    return iter_batches(images, [part for group in groups for part in group.split(256)])
