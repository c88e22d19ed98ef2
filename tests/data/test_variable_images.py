"""Images of different sizes: order, batches of one size, and training buckets."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitral.data.augment import AugmentConfig, random_crop_inside_padding
from vitral.data.lazy_images import select_images
from vitral.data.loader import Loader, Sampling, training_images
from vitral.data.variable_images import (
    PaddedImages,
    VariableSizeImages,
    chain_images,
    concat_images,
    map_batches,
    merge_small_buckets,
)

SIZES = [(4, 8), (8, 4), (4, 8), (4, 4), (8, 4), (4, 8)]


def make_images(sizes: list[tuple[int, int]] = SIZES) -> tuple[list[Tensor], VariableSizeImages]:
    """Image i is filled with i."""
    images = [torch.full((3, *size), index % 256, dtype=torch.uint8) for index, size in enumerate(sizes)]
    return images, VariableSizeImages.stack(images)


def test_images_parts_and_batches_are_those_stored() -> None:
    images, stored = make_images()
    assert all(torch.equal(image, expected) for image, expected in zip(stored, images, strict=True))
    assert torch.equal(stored[1:][0], images[1])
    assert torch.equal(stored[torch.tensor([5, 0])][0], images[5])
    assert torch.equal(select_images(stored, torch.arange(6) % 2 == 1)[2], images[5])
    in_order = [image for batch in stored.split(2) for image in batch]
    assert all(torch.equal(image, expected) for image, expected in zip(in_order, images, strict=True))
    both = concat_images([stored, torch.stack([images[3]])])
    assert torch.equal(both[6], images[3])
    with pytest.raises(ValueError, match="one size"):
        next(stored.batches([torch.tensor([0, 1])]))


@pytest.mark.parametrize("limit", [0, 2**20], ids=["on access", "in memory"])
def test_chained_sets_of_several_sizes(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitral.data.variable_images.MAX_CHAINED_BYTES_IN_MEMORY", limit)
    images, stored = make_images()
    chained = chain_images([stored[:2], stored[2:]])
    assert isinstance(chained, VariableSizeImages)
    assert isinstance(chained.stored, Tensor) == (limit > 0)
    assert all(torch.equal(image, expected) for image, expected in zip(chained, images, strict=True))
    assert chain_images([stored]) is stored
    with pytest.raises(ValueError, match="those of one size"):
        chain_images([stored, torch.zeros(1, *stored.shape[1:])])


def test_results_are_in_the_order_of_the_images() -> None:
    _, stored = make_images()
    batches: list[int] = []

    def first_pixels(images: Tensor) -> Tensor:
        batches.append(len(images))
        return images[:, 0, 0, 0].int()

    assert map_batches(stored, first_pixels, batch_size=2).tolist() == list(range(6))
    assert sorted(batches) == [1, 1, 2, 2]


def test_padded_images_are_in_the_middle() -> None:
    images, stored = make_images()
    padded = PaddedImages(stored, (8, 8), (7, 8, 9))[:]
    assert torch.equal(padded[0, :, 2:6], images[0])
    assert padded[0, :, 0, 0].tolist() == padded[0, :, 7, 7].tolist() == [7, 8, 9]


def test_small_buckets_are_merged_into_the_nearest() -> None:
    sizes = [(16, 16)] * 10 + [(12, 20)] * 9 + [(8, 28)] * 2 + [(24, 8)]
    _, stored = make_images(sizes)
    merged = merge_small_buckets(stored, 5)
    assert [tuple(size) for size in merged.sizes.tolist()] == [(16, 16)] * 10 + [(12, 20)] * 11 + [(16, 16)]
    (batch,) = merged.batches([torch.tensor([10, 19, 20])])
    assert batch.shape == (3, 3, 12, 20)
    assert batch[:, 0, 0, 0].tolist() == [10, 19, 20]
    assert merge_small_buckets(stored, 1000).sizes.unique(dim=0).shape == (1, 2)


@settings(max_examples=40, deadline=None)
@given(
    buckets=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    batch_size=st.integers(1, 24),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 1000),
)
def test_buckets_cover_every_image_once_per_epoch(buckets: list[int], batch_size: int, seed: int, epoch: int) -> None:
    sizes = [(4, 4 * (bucket + 1)) for bucket, count in enumerate(buckets) for _ in range(count)]
    _, stored = make_images(sizes)
    loader = Loader(images=stored, labels=torch.arange(len(sizes)), batch_size=batch_size, seed=seed)
    batches = list(loader.epoch(epoch))
    labels = [labels.tolist() for _, labels in batches]
    assert sorted(itertools.chain(*labels)) == list(range(len(sizes)))
    assert len(batches) == loader.steps_per_epoch
    assert max(map(len, labels)) <= batch_size
    for images, batch in batches:
        assert {sizes[label] for label in batch.tolist()} == {tuple(images.shape[2:])}
        assert images[:, 0, 0, 0].tolist() == [label % 256 for label in batch.tolist()]
    resumed = [batch.tolist() for _, batch in loader.epoch(epoch, start=len(batches) // 2)]
    assert resumed == labels[len(batches) // 2 :]


@pytest.mark.parametrize(("sampling", "repeat"), [("balanced", 1), ("balanced", 3), ("uniform", 3)])
def test_every_epoch_has_the_same_number_of_steps(sampling: Sampling, repeat: int) -> None:
    sizes = [(4, 4)] * 50 + [(4, 8)] * 30 + [(8, 4)] * 9
    _, stored = make_images(sizes)
    labels = (torch.arange(len(sizes)) % 10 == 0).long()
    loader = Loader(images=stored, labels=labels, batch_size=8, seed=0, sampling=sampling, repeat=repeat)
    for epoch in range(20):
        batches = list(loader.epoch(epoch))
        assert len(batches) == loader.steps_per_epoch
        assert max(len(labels) for _, labels in batches) <= 8
        assert min(len(labels) for _, labels in batches) >= 1


def test_order_of_the_batches_depends_on_the_epoch_and_mixes_the_buckets() -> None:
    _, stored = make_images([(4, 4)] * 40 + [(4, 8)] * 40)
    loader = Loader(images=training_images(stored, 8), labels=torch.arange(80), batch_size=8, seed=0)
    shapes = [[tuple(images.shape[2:]) for images, _ in loader.epoch(epoch)] for epoch in range(3)]
    assert shapes[0] != shapes[1]
    assert shapes[0] != sorted(shapes[0])


def test_random_crops_of_padded_images_show_no_padding_inside_and_keep_it_outside() -> None:
    color = (10, 20, 30)
    images = torch.tensor(color, dtype=torch.uint8).view(1, 3, 1, 1).repeat(64, 1, 24, 24)
    images[:, :, 8:16] = torch.randint(100, 200, (64, 3, 8, 24), dtype=torch.uint8)
    cropped = random_crop_inside_padding(images, 0.1, color, torch.Generator().manual_seed(0))
    assert torch.equal(cropped[:, :, :8], images[:, :, :8].float())
    assert torch.equal(cropped[:, :, 16:], images[:, :, 16:].float())
    assert cropped[:, :, 9:15].min() >= 99.9
    assert not torch.equal(cropped[:, :, 8:16], images[:, :, 8:16].float())
    assert AugmentConfig(crop=0.5).transform(images, torch.Generator(), pad_color=color).shape == images.shape
