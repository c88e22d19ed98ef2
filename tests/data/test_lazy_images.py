"""Lazy images behave like the tensors they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from vitral.data.lazy_images import (
    ConcatImages,
    Images,
    LazyImages,
    MappedImages,
    SubsetImages,
    iter_batches,
    iter_sample,
    select_images,
)

IMAGES = torch.randint(0, 256, (40, 3, 4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
MASK = torch.arange(40) % 3 == 0


class LazyTensor(LazyImages):
    def __init__(self, images: Tensor) -> None:
        N, C, H, W = images.shape
        self.images, self.shape = images, (N, C, H, W)

    def batches(self, batch_indices: Iterable[Tensor]) -> Iterator[Tensor]:
        return (self.images[rows] for rows in batch_indices)


@pytest.mark.parametrize(
    ("lazy", "expected"),
    [
        (LazyTensor(IMAGES), IMAGES),
        (SubsetImages(LazyTensor(IMAGES), torch.tensor([7, 3, 3])), IMAGES[[7, 3, 3]]),
        (MappedImages(IMAGES, lambda batch: batch[:, :1, 1:], (1, 3, 5)), IMAGES[:, :1, 1:]),
        (ConcatImages([IMAGES[:11], LazyTensor(IMAGES[11:])]), IMAGES),
        (ConcatImages([IMAGES[:1], LazyTensor(IMAGES[1:1]), LazyTensor(IMAGES[1:9]), IMAGES[9:]]), IMAGES),
        (select_images(LazyTensor(IMAGES), MASK), IMAGES[MASK]),
    ],
    ids=["lazy", "subset", "mapped", "concatenated", "four parts", "selected"],
)
def test_indexing_and_splitting_match_the_tensor(lazy: LazyImages, expected: Tensor) -> None:
    assert isinstance(lazy, LazyImages)
    assert (len(lazy), lazy.shape) == (len(expected), tuple(expected.shape))
    assert torch.equal(lazy[:], expected)
    assert torch.equal(lazy[2], expected[2])
    assert torch.equal(lazy[torch.tensor([1, 0, 1])], expected[[1, 0, 1]])
    assert torch.equal(torch.cat(list(lazy.split(7))), expected)


def test_selecting_from_a_tensor_returns_a_tensor() -> None:
    selected = select_images(IMAGES, MASK)
    assert isinstance(selected, Tensor)
    assert torch.equal(selected, IMAGES[MASK])


@pytest.mark.parametrize("images", [IMAGES, LazyTensor(IMAGES)], ids=["tensor", "lazy"])
def test_sample_is_everything_or_evenly_spaced(images: Images) -> None:
    assert torch.equal(torch.cat(list(iter_sample(images, IMAGES.nbytes))), IMAGES)
    sample = torch.cat(list(iter_sample(images, 3 * 60)))
    assert torch.equal(sample, IMAGES[[0, 20, 39]])


def test_batches_of_tensors_and_lazy_images_are_equal() -> None:
    batch_indices = [torch.tensor([3, 1]), torch.tensor([0])]
    for tensor_batch, lazy_batch in zip(
        iter_batches(IMAGES, batch_indices), iter_batches(LazyTensor(IMAGES), batch_indices), strict=True
    ):
        assert torch.equal(tensor_batch, lazy_batch)
