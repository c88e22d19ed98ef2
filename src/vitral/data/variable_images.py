"""Image sets whose images differ in size: native inputs, and images that have yet to be padded.

Every image fills the first height·width pixels of each channel of a row of one array (N, C, H, W). The array is packed,
memory-mapped, streamed and copied to the device like that of images of one size; only its rows are read differently.
A batch holds images of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import tee
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.geometry import Size, nearest_bucket
from vitral.data.lazy_images import ConcatImages, Images, LazyImages, SubsetImages, iter_batches
from vitral.data.resize_crop import write_row
from vitral.utils.progress import ProgressFn, no_progress

MapFn = Callable[[Callable[[Tensor], Tensor], Iterable[Tensor]], Iterable[Tensor]]  # `map` is one

MAX_CHAINED_BYTES_IN_MEMORY = 2 * 2**30  # of larger sets, those in memory-mapped files are read on access


class VariableSizeImages(LazyImages):
    """Images of different sizes in the rows of `stored`. A part of the set is again such a set, one image a tensor.

    Images are resized on access where `stored_sizes_N2` differs from `sizes_N2`. Both are on the CPU.
    """

    def __init__(self, stored: Images, sizes_N2: Tensor, stored_sizes_N2: Tensor | None = None) -> None:
        self.stored, self.sizes = stored, sizes_N2  # heights and widths
        self.stored_sizes = sizes_N2 if stored_sizes_N2 is None else stored_sizes_N2
        self.shape = (stored.shape[0], stored.shape[1], stored.shape[2], stored.shape[3])
        self.dtype = stored.dtype

    @classmethod
    def stack(cls, images: Sequence[Tensor]) -> VariableSizeImages:
        """A set of the images (C, h, w), in memory."""
        sizes = torch.tensor([image.shape[1:] for image in images])
        stored = torch.zeros(len(images), images[0].shape[0], 1, int(sizes.prod(dim=1).max()), dtype=images[0].dtype)
        for row, image in zip(stored.numpy(), images, strict=True):
            write_row(row, image.cpu().numpy())
        return cls(stored, sizes)

    def batches(self, batch_indices: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the images of each index tensor, which must have one size."""
        for_reading, for_sizes = tee(batch_indices)
        for rows, stored in zip(for_sizes, iter_batches(self.stored, for_reading), strict=True):
            yield self.assemble(stored, rows)

    def assemble(self, stored_BCHW: Tensor, rows: Tensor) -> Tensor:
        """The images (B, C, h, w) from their rows of `stored`, which may be on another device."""
        size = self.size_of(rows)
        stored_sizes = self.stored_sizes[rows.cpu()]
        if (stored_sizes == torch.tensor(size)).all():
            return view_as_size(stored_BCHW, size)
        images = stored_BCHW.new_empty(len(rows), stored_BCHW.shape[1], *size)
        for height, width in stored_sizes.unique(dim=0).tolist():
            mask = (stored_sizes == torch.tensor((height, width))).all(dim=1).to(stored_BCHW.device)
            images[mask] = resize_pixels(view_as_size(stored_BCHW[mask], (height, width)), size, "bilinear")
        return images

    def size_of(self, rows: Tensor) -> Size:
        """The common size of these images."""
        sizes = self.sizes[rows.cpu()]
        if (sizes != sizes[:1]).any():
            raise ValueError("the images of a batch must have one size; group them with `group_rows`")
        height, width = sizes[0].tolist() if len(sizes) else self.shape[2:]
        return height, width

    def __getitem__(self, index: Tensor | int | slice) -> Any:
        rows = torch.arange(len(self))[index]
        if rows.ndim == 0:
            return super().__getitem__(index)
        return self.select(rows)

    def select(self, rows: Tensor) -> VariableSizeImages:
        stored = self.stored[rows] if isinstance(self.stored, Tensor) else SubsetImages(self.stored, rows)
        return VariableSizeImages(stored, self.sizes[rows], self.stored_sizes[rows])

    def split(self, batch_size: int) -> Iterator[Tensor]:
        """Yield all images in order, in batches that end where the size changes."""
        changes = (self.sizes[1:] != self.sizes[:-1]).any(dim=1).nonzero().flatten() + 1
        runs = torch.arange(len(self)).tensor_split(changes)
        return self.batches(rows for run in runs for rows in run.split(batch_size) if len(rows))

    def group_rows(self, rows: Tensor) -> list[Tensor]:
        _, group = self.sizes[rows].unique(dim=0, return_inverse=True)
        return [rows[group == index] for index in range(int(group.max()) + 1 if len(rows) else 0)]


def merge_small_buckets(images: VariableSizeImages, min_images: int) -> VariableSizeImages:
    """Give the images of sizes that fewer than `min_images` have the size with the nearest aspect ratio.

    The smallest bucket is merged first, until all are large enough or one is left.
    """
    sizes = images.sizes.clone()
    while True:
        buckets, counts = sizes.unique(dim=0, return_counts=True)
        if len(buckets) == 1 or counts.min() >= min_images:
            return VariableSizeImages(images.stored, sizes, images.stored_sizes)
        smallest = buckets[counts.argmin()]
        others = [(height, width) for height, width in buckets.tolist() if [height, width] != smallest.tolist()]
        height, width = smallest.tolist()
        sizes[(sizes == smallest).all(dim=1)] = torch.tensor(nearest_bucket(height, width, tuple(others)))


class PaddedImages(LazyImages):
    """Images of different sizes in the middle of a canvas of one colour."""

    def __init__(self, images: VariableSizeImages, window: Size, pad_color: Sequence[float]) -> None:
        self.images, self.shape = images, (len(images), images.shape[1], *window)
        self.dtype = images.dtype
        self.color = torch.tensor(pad_color).to(self.dtype).view(1, -1, 1, 1)

    def batches(self, batch_indices: Iterable[Tensor]) -> Iterator[Tensor]:
        _, _, H, W = self.shape
        for_reading, for_sizes = tee(batch_indices)
        for rows, stored in zip(for_sizes, iter_batches(self.images.stored, for_reading), strict=True):
            canvas = self.color.expand(len(rows), -1, H, W).clone()
            for image, row, (height, width) in zip(canvas, stored, self.images.sizes[rows].tolist(), strict=True):
                top, left = (H - height) // 2, (W - width) // 2
                image[:, top : top + height, left : left + width] = view_as_size(row[None], (height, width))[0]
            yield canvas


def resize_pixels(images_BCHW: Tensor, size: Size, interpolation: str) -> Tensor:
    """Resize pixels and keep their type. torch resizes floats, uint8 on a CPU only, and not uint16."""
    dtype = images_BCHW.dtype
    if dtype.is_floating_point or (dtype == torch.uint8 and images_BCHW.device.type == "cpu"):
        return F.interpolate(images_BCHW, size=size, mode=interpolation, antialias=True)
    resized = F.interpolate(images_BCHW.float(), size=size, mode=interpolation, antialias=True)
    return resized.round().clamp(0, torch.iinfo(dtype).max).to(dtype)


def view_as_size(stored_BCHW: Tensor, size: Size) -> Tensor:
    """The images (B, C, h, w) in rows of the array."""
    return stored_BCHW.flatten(2)[:, :, : size[0] * size[1]].unflatten(2, size)


def images_of_one_size(images: Images, count: int) -> Tensor:
    """The first `count` images; of sets with several sizes, those of the most frequent size."""
    if not isinstance(images, VariableSizeImages):
        return images[:count]
    rows = max(images.group_rows(torch.arange(len(images))), key=len)[:count]
    return next(images.batches([rows]))


def select_rows(images: Images, rows: Tensor) -> Images:
    """The images at `rows`; stays lazy if `images` is."""
    return images.select(rows) if isinstance(images, LazyImages) else images[rows]


def stack_images(images: Sequence[Tensor]) -> Images:
    """A batch of images (C, h, w): a tensor if they have one size."""
    if len({image.shape for image in images}) == 1:
        return torch.stack(list(images))
    return VariableSizeImages.stack(images)


def concat_images(parts: Sequence[Images]) -> Images:
    """Image sets one after the other, in memory."""
    if not any(isinstance(part, VariableSizeImages) for part in parts):
        return torch.cat([part[:] for part in parts])
    return VariableSizeImages.stack([image for part in parts for batch in part.split(1) for image in batch])


def chain_images(parts: Sequence[Images]) -> Images:
    """Image sets one after the other, whose rows have one shape. Large and lazy sets are read on access."""
    if len(parts) == 1:
        return parts[0]
    variable = [part for part in parts if isinstance(part, VariableSizeImages)]
    if variable:
        if len(variable) < len(parts):
            raise ValueError("image sets of variable sizes cannot be chained with those of one size")
        return VariableSizeImages(
            chain_images([part.stored for part in variable]),
            torch.cat([part.sizes for part in variable]),
            torch.cat([part.stored_sizes for part in variable]),
        )
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts) and sum(part.nbytes for part in tensors) <= MAX_CHAINED_BYTES_IN_MEMORY:
        return torch.cat(tensors)
    return ConcatImages(parts)


def map_batches(
    images: Images,
    function: Callable[[Tensor], Tensor],
    batch_size: int,
    progress: ProgressFn = no_progress,
    map_fn: MapFn = map,
) -> Tensor:
    """The results of `function` on batches of images of one size, in the order of the images.

    `map_fn` applies the function to the batches, by default one after the other.
    """
    rows: list[Tensor] = []
    if isinstance(images, VariableSizeImages):
        rows = [part for group in images.group_rows(torch.arange(len(images))) for part in group.split(batch_size)]
        batches: Iterable[Tensor] = images.batches(rows)
    else:
        batches = images.split(batch_size)
    results: list[Tensor] = []
    for result in map_fn(function, batches):
        if results:
            progress(sum(map(len, results)))
        results.append(result)
    values = torch.cat(results)
    return values[torch.cat(rows).argsort().to(values.device)] if rows else values
