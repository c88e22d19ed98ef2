"""Batches in an order that depends on seed and epoch alone, from the device, from a mapped file or from a stream.

So a place in a training is two numbers, epoch and step, and a resumed run sees the batches it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitral.data.lazy_images import Images, Pixels, batches_of
from vitral.data.prefetch import fed
from vitral.device.hardware import Hardware, Staging

Sampling = Literal["plain", "balanced"]


@dataclass(frozen=True, kw_only=True)
class Loader:
    images: Pixels  # uint8, N C H W
    labels: Tensor  # int64, N; batches come to where they are
    batch: int
    seed: int
    sampling: Sampling = "plain"  # balanced: each class equally often, whatever the set has of it
    repeat: int = 1  # so often an image is in its batch, and so many fewer others (arXiv 1902.05509)

    @property
    def steps(self) -> int:
        """Full batches an epoch. What is left over, less than a batch, sits this epoch out: other images each time."""
        return max(len(self.labels) // self.batch, 1)

    def order(self, epoch: int) -> Tensor:
        """Which images an epoch shows, one after the other."""
        generator = torch.Generator().manual_seed(((self.seed << 20) + epoch) % 2**64)
        if self.sampling == "balanced":
            return balanced(self.labels, generator)
        return torch.randperm(len(self.labels), generator=generator)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch, from batch `start` on."""
        order = self.order(epoch)
        size = min(self.batch, len(order))
        others = -(-size // self.repeat)  # different images in a batch
        labels_N = self.labels[order.to(self.labels.device)]  # once: a copy in each step would wait for the device
        places = [slice(step * others, (step + 1) * others) for step in range(start, self.steps)]
        for place, images in zip(places, self._images(order, places), strict=True):
            labels = labels_N[place]
            if self.repeat > 1:  # copies stand far apart: mixing takes its partner from next door
                images, labels = images.repeat(self.repeat, 1, 1, 1)[:size], labels.repeat(self.repeat)[:size]
            yield images, labels

    def _images(self, order_N: Tensor, places: Sequence[slice]) -> Iterator[Tensor]:
        device = self.labels.device
        if isinstance(self.images, Tensor) and self.images.device == device:
            order_N = order_N.to(device)
            return batches_of(self.images, (order_N[place] for place in places))
        rows = [order_N[place] for place in places]
        if device.type == "cpu" or not rows:
            return batches_of(self.images, rows)
        return fed(self.images, rows, Staging(device, (len(rows[0]), *self.images.shape[1:])))


def balanced(labels_N: Tensor, generator: torch.Generator) -> Tensor:
    """N places, in which each class has an equal share: small classes come round again, large ones only in part."""
    labels = labels_N.cpu()
    classes = labels.unique()
    classes = classes[torch.randperm(len(classes), generator=generator)]  # who gets what does not divide evenly
    chosen = []
    for index, one in enumerate(classes):
        members = (labels == one).nonzero().flatten()
        wanted = len(labels) // len(classes) + (index < len(labels) % len(classes))
        rounds = [torch.randperm(len(members), generator=generator) for _ in range(-(-wanted // len(members)))]
        chosen.append(members[torch.cat(rounds)[:wanted]] if rounds else members[:0])
    order = torch.cat(chosen)
    return order[torch.randperm(len(order), generator=generator)]


def on_device(images: Pixels, hardware: Hardware) -> Pixels:
    """The images on the device if there is room; otherwise where they are, and each batch is sent there."""
    if isinstance(images, Images) or images.nbytes > hardware.room():
        return images
    return images.to(hardware.device)
