from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vitral.data.lazy_images import LazyImages, select_images


class ImagesOnDisk(LazyImages):
    def __init__(self, images: Tensor) -> None:
        self.images, self.shape = images, tuple(images.shape)  # type: ignore[assignment]

    def batches(self, chosen: Iterable[Tensor]) -> Iterator[Tensor]:
        return (self.images[indices] for indices in chosen)


def test_selected_images_are_read_from_their_source() -> None:
    images = torch.randint(0, 256, (9, 1, 2, 2), dtype=torch.uint8)
    mask = torch.arange(9) % 3 == 0
    selection = select_images(ImagesOnDisk(images), mask)
    assert len(selection) == 3
    assert torch.equal(torch.cat(list(selection.split(2))), images[mask])
    assert torch.equal(selection[torch.tensor([2, 0])], images[torch.tensor([6, 0])])
    assert torch.equal(select_images(images, mask), images[mask])
