"""Training batches in an order that depends only on seed and epoch.

Epoch and step therefore identify a position in a run, and a resumed run continues with the same batches.
Images may be on the device, in a memory-mapped file or streamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from vitral.data.lazy_images import Images, LazyImages, iter_batches
from vitral.data.prefetch import prefetch_to_device
from vitral.data.variable_images import VariableSizeImages, merge_small_buckets
from vitral.device.memory import dataset_budget_bytes
from vitral.device.select import Hardware
from vitral.device.streams import StagingBuffers

Sampling = Literal["uniform", "balanced"]


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Batches of images and labels, on the device of the labels."""

    images: Images  # pixels (N, C, H, W)
    labels: Tensor  # int64 (N,), or float32 (N, K)
    batch_size: int
    seed: int
    sampling: Sampling = "uniform"  # balanced: every class equally often per epoch
    repeat: int = 1  # repeated augmentation: copies of each image per batch (arXiv 1902.05509)

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch. Of images of one size, the remainder, different images in every epoch, is dropped."""
        if self.buckets is None:
            return max(len(self.labels) // self.batch_size, 1)
        return bucket_steps(self.buckets, self.batch_size, self.sampling)

    @cached_property
    def buckets(self) -> Tensor | None:
        """The number (N,) of each image's size; None if all have one size. A batch holds images of one size."""
        if not isinstance(self.images, VariableSizeImages):
            return None
        return self.images.sizes.unique(dim=0, return_inverse=True)[1]

    def order(self, epoch: int) -> Tensor:
        """Indices of the images of an epoch, in order."""
        generator = torch.Generator().manual_seed(((self.seed << 20) + epoch) % 2**64)
        if self.sampling == "balanced":
            return balanced_order(self.labels, generator)
        return torch.randperm(len(self.labels), generator=generator)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch, beginning with batch `start`."""
        order, slices = self.batch_slices(epoch)
        size = min(self.batch_size, len(order))
        slices = slices[start:]
        labels_N = self.labels[order.to(self.labels.device)]  # once: a copy per step would synchronise with the device
        for batch_slice, images in zip(slices, self._images(order, slices), strict=True):
            labels = labels_N[batch_slice]
            if self.repeat > 1:  # tiled, so that copies are not neighbours: mixup blends neighbours
                images = images.repeat(self.repeat, 1, 1, 1)[:size]
                labels = labels.repeat(self.repeat, *[1] * (labels.ndim - 1))[:size]
            yield images, labels

    def batch_slices(self, epoch: int) -> tuple[Tensor, list[slice]]:
        """Indices of the distinct images of an epoch, in order, and the part of each batch."""
        order = self.order(epoch)
        if self.buckets is None:
            distinct = -(-min(self.batch_size, len(order)) // self.repeat)  # distinct images per batch
            return order, [slice(step * distinct, (step + 1) * distinct) for step in range(self.steps_per_epoch)]
        generator = torch.Generator().manual_seed(((self.seed << 20) + epoch + 2**63) % 2**64)
        batches = bucket_batches(order, self.buckets, self.batch_size, self.steps_per_epoch, self.repeat)
        batches = [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]
        ends = torch.tensor([len(batch) for batch in batches]).cumsum(dim=0).tolist()
        return torch.cat(batches), [slice(begin, end) for begin, end in pairwise([0, *ends])]

    def _images(self, order_N: Tensor, slices: Sequence[slice]) -> Iterator[Tensor]:
        device = self.labels.device
        images = self.images.resolve() if isinstance(self.images, LazyImages) else self.images
        if isinstance(images, Tensor) and images.device == device:
            order_N = order_N.to(device)
            return iter_batches(images, (order_N[batch_slice] for batch_slice in slices))
        batch_indices = [order_N[batch_slice] for batch_slice in slices]
        if device.type == "cpu" or not batch_indices:
            return iter_batches(images, batch_indices)
        if isinstance(images, VariableSizeImages):
            return self._variable_images(images, batch_indices)
        staging = StagingBuffers(device, (len(batch_indices[0]), *images.shape[1:]), images.dtype)
        return prefetch_to_device(images, batch_indices, staging)

    def _variable_images(self, images: VariableSizeImages, batch_indices: Sequence[Tensor]) -> Iterator[Tensor]:
        """Batches of different sizes, on the device. Staging buffers have one: that of the largest batch."""
        device, stored = self.labels.device, images.stored
        if isinstance(stored, Tensor) and stored.device == device:
            batches = iter_batches(stored, (rows.to(device) for rows in batch_indices))
        else:
            largest = max(map(len, batch_indices))
            padded = [torch.cat([rows, rows[-1:].expand(largest - len(rows))]) for rows in batch_indices]
            batches = prefetch_to_device(
                stored, padded, StagingBuffers(device, (largest, *stored.shape[1:]), stored.dtype)
            )
        for rows, batch in zip(batch_indices, batches, strict=True):
            yield images.assemble(batch[: len(rows)], rows)


def bucket_steps(bucket_N: Tensor, batch_size: int, sampling: Sampling) -> int:
    """Batches per epoch if each holds images of one bucket. Balanced sampling draws other numbers in every epoch."""
    counts = bucket_N.bincount().tolist()
    if sampling == "balanced":
        return min(len(bucket_N) // batch_size + len(counts), len(bucket_N))
    return sum(-(-count // batch_size) for count in counts)


def bucket_batches(order: Tensor, bucket_N: Tensor, batch_size: int, num_batches: int, repeat: int = 1) -> list[Tensor]:
    """The images of `order` in `num_batches` batches of one bucket each, none larger than `batch_size`.

    A bucket is divided into batches of equal size, to within one image, so that no batch is nearly empty. Of each
    bucket, 1 / `repeat` is used.
    """
    parts = [order[bucket_N[order] == bucket] for bucket in bucket_N.unique().tolist()]
    parts = [part for part in parts if len(part)]
    counts = [-(-len(part) // batch_size) for part in parts]
    while sum(counts) < num_batches:
        largest = max(range(len(parts)), key=lambda index: len(parts[index]) / counts[index])
        counts[largest] += 1
    used = (part[: max(-(-len(part) // repeat), count)] for part, count in zip(parts, counts, strict=True))
    return [batch for part, count in zip(used, counts, strict=True) for batch in part.tensor_split(count)]


def training_images(images: Images, batch_size: int) -> Images:
    """The images for a loader. Sizes that too few images have for a batch are merged into the nearest one."""
    return merge_small_buckets(images, batch_size // 2) if isinstance(images, VariableSizeImages) else images


def balanced_order(labels_N: Tensor, generator: torch.Generator) -> Tensor:
    """N indices with equal shares per class: small classes are repeated, large classes subsampled."""
    labels = labels_N.cpu()
    classes = labels.unique()
    classes = classes[torch.randperm(len(classes), generator=generator)]  # which classes get the remainder
    chosen = []
    for position, label in enumerate(classes):
        members = (labels == label).nonzero().flatten()
        count = len(labels) // len(classes) + (position < len(labels) % len(classes))
        rounds = [torch.randperm(len(members), generator=generator) for _ in range(-(-count // len(members)))]
        chosen.append(members[torch.cat(rounds)[:count]] if rounds else members[:0])
    order = torch.cat(chosen)
    return order[torch.randperm(len(order), generator=generator)]


def to_device_if_fits(images: Images, hardware: Hardware) -> Images:
    """Move the images to the device if they fit its memory budget; otherwise batches are copied one at a time."""
    if isinstance(images, VariableSizeImages) and isinstance(images.stored, Tensor):
        stored = to_device_if_fits(images.stored, hardware)
        return VariableSizeImages(stored, images.sizes, images.stored_sizes)
    if isinstance(images, LazyImages) or images.nbytes > dataset_budget_bytes(hardware.device):
        return images
    return images.to(hardware.device)
