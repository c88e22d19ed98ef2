"""Training batches in an order that depends only on seed and epoch.

Epoch and step therefore identify a position in a run, and a resumed run continues with the same batches.
Images may be on the device, in a memory-mapped file or streamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitral.data.lazy_images import Images, LazyImages, iter_batches
from vitral.data.prefetch import prefetch_to_device
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
        """Full batches per epoch. The remainder, different images in every epoch, is dropped."""
        return max(len(self.labels) // self.batch_size, 1)

    def order(self, epoch: int) -> Tensor:
        """Indices of the images of an epoch, in order."""
        generator = torch.Generator().manual_seed(((self.seed << 20) + epoch) % 2**64)
        if self.sampling == "balanced":
            return balanced_order(self.labels, generator)
        return torch.randperm(len(self.labels), generator=generator)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch, beginning with batch `start`."""
        order = self.order(epoch)
        size = min(self.batch_size, len(order))
        distinct = -(-size // self.repeat)  # distinct images per batch
        labels_N = self.labels[order.to(self.labels.device)]  # once: a copy per step would synchronise with the device
        slices = [slice(step * distinct, (step + 1) * distinct) for step in range(start, self.steps_per_epoch)]
        for batch_slice, images in zip(slices, self._images(order, slices), strict=True):
            labels = labels_N[batch_slice]
            if self.repeat > 1:  # tiled, so that copies are not neighbours: mixup blends neighbours
                images = images.repeat(self.repeat, 1, 1, 1)[:size]
                labels = labels.repeat(self.repeat, *[1] * (labels.ndim - 1))[:size]
            yield images, labels

    def _images(self, order_N: Tensor, slices: Sequence[slice]) -> Iterator[Tensor]:
        device = self.labels.device
        if isinstance(self.images, Tensor) and self.images.device == device:
            order_N = order_N.to(device)
            return iter_batches(self.images, (order_N[batch_slice] for batch_slice in slices))
        batch_indices = [order_N[batch_slice] for batch_slice in slices]
        if device.type == "cpu" or not batch_indices:
            return iter_batches(self.images, batch_indices)
        staging = StagingBuffers(device, (len(batch_indices[0]), *self.images.shape[1:]), self.images.dtype)
        return prefetch_to_device(self.images, batch_indices, staging)


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
    if isinstance(images, LazyImages) or images.nbytes > dataset_budget_bytes(hardware.device):
        return images
    return images.to(hardware.device)
