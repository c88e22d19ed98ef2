"""Batches: every image once per epoch, in an order that depends only on seed and epoch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitral.data.loader import Loader, Sampling


def make_loader(count: int, batch_size: int, seed: int = 0) -> Loader:
    """Image i is filled with i, and its label is i."""
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    return Loader(images=images, labels=torch.arange(count), batch_size=batch_size, seed=seed)


def batch_labels(loader: Loader, epoch: int, start: int = 0) -> list[list[int]]:
    return [labels.tolist() for _, labels in loader.epoch(epoch, start)]


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 200), batch_size=st.integers(1, 64), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_epoch_has_no_image_twice_and_drops_less_than_a_batch(
    count: int, batch_size: int, seed: int, epoch: int
) -> None:
    batches = batch_labels(make_loader(count, batch_size, seed), epoch)
    labels = [label for batch in batches for label in batch]
    assert len(batches) == make_loader(count, batch_size).steps_per_epoch
    assert len(labels) == len(set(labels))
    assert set(labels) <= set(range(count))
    if count < batch_size:
        assert sorted(labels) == list(range(count))
    else:
        assert {len(batch) for batch in batches} == {batch_size}
        assert count - len(labels) < batch_size
    if count % batch_size == 0:
        assert sorted(labels) == list(range(count))


def test_images_keep_their_labels() -> None:
    for images, labels in make_loader(100, 8).epoch(3):
        assert torch.equal(images[:, 0, 0, 0].long(), labels)


def test_every_epoch_drops_different_images() -> None:
    loader = make_loader(20, 8)
    dropped = [frozenset(range(20)) - set(itertools.chain(*batch_labels(loader, epoch))) for epoch in range(40)]
    assert {len(images) for images in dropped} == {4}
    assert frozenset.union(*dropped) == frozenset(range(20))


def test_dataset_smaller_than_the_batch_size_is_one_batch() -> None:
    loader = make_loader(5, 64)
    assert loader.steps_per_epoch == 1
    assert [sorted(batch) for batch in batch_labels(loader, 0)] == [[0, 1, 2, 3, 4]]


def test_order_depends_only_on_seed_and_epoch() -> None:
    torch.manual_seed(1)
    first = batch_labels(make_loader(60, 10, seed=3), 7)
    torch.manual_seed(2)
    torch.rand(5)
    assert batch_labels(make_loader(60, 10, seed=3), 7) == first
    orders = [batch_labels(make_loader(60, 10, seed), epoch) for seed in range(5) for epoch in range(5)]
    assert len({str(order) for order in orders}) == 25
    order = list(itertools.chain(*first))
    assert len(order) == 60
    assert order != sorted(order)
    larger_batches = batch_labels(make_loader(60, 20, seed=3), 7)
    assert list(itertools.chain(*larger_batches)) == order, "independent of the batch size"


def test_order_does_not_use_the_global_random_state() -> None:
    state = torch.get_rng_state()
    batch_labels(make_loader(20, 5), 1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("start", range(8))
def test_epoch_resumed_at_a_batch_gives_the_remaining_batches(start: int) -> None:
    loader = make_loader(60, 9, seed=5)
    assert batch_labels(loader, 4, start) == batch_labels(loader, 4)[start:]


def test_every_position_is_equally_likely_for_an_image() -> None:
    loader = make_loader(4, 4)
    positions = torch.tensor([batch_labels(loader, epoch)[0].index(0) for epoch in range(800)])
    counts = torch.bincount(positions, minlength=4)
    assert ((counts - 200).double() ** 2 / 200).sum() < 11.3  # chi-square, 3 degrees of freedom, 1%


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63 - 1, 2**64 - 1])
def test_any_seed_supported_by_torch_is_valid(seed: int) -> None:
    assert sorted(batch_labels(make_loader(6, 6, seed), 2)[0]) == list(range(6))


def test_batches_are_copies() -> None:
    images: Tensor = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
    for batch, _ in Loader(images=images, labels=torch.arange(4), batch_size=4, seed=0).epoch(0):
        batch += 1
    assert images.sum() == 0


# ── balanced sampling ──────────────────────────────────────────────────────────────────────────────────────────

IMBALANCED = torch.tensor([0] * 70 + [1] * 9 + [3] * 20 + [4])


def imbalanced_loader(batch_size: int, seed: int = 0, repeat: int = 1) -> Loader:
    """Image i is filled with i."""
    images = torch.arange(100, dtype=torch.uint8).view(100, 1, 1, 1)
    return Loader(
        images=images, labels=IMBALANCED, batch_size=batch_size, seed=seed, sampling="balanced", repeat=repeat
    )


def batch_images(loader: Loader, epoch: int, start: int = 0) -> list[list[int]]:
    return [images.flatten().tolist() for images, _ in loader.epoch(epoch, start)]


def test_balanced_epoch_has_equal_class_counts_and_even_image_counts() -> None:
    for epoch in range(5):
        (batch,) = batch_images(imbalanced_loader(100), epoch)
        images = torch.tensor(batch)
        assert torch.bincount(IMBALANCED[images], minlength=5).tolist() == [25, 25, 0, 25, 25]
        counts = torch.bincount(images, minlength=100)
        assert counts[:70].max() == 1
        assert set(counts[70:79].tolist()) == {2, 3}
        assert set(counts[79:99].tolist()) == {1, 2}
        assert counts[99] == 25


def test_balanced_epochs_eventually_use_every_image() -> None:
    images = [image for epoch in range(30) for batch in batch_images(imbalanced_loader(30), epoch) for image in batch]
    assert set(images) == set(range(100))
    shares = torch.bincount(IMBALANCED[torch.tensor(images)], minlength=5) / len(images)
    assert shares[[0, 1, 3, 4]].tolist() == pytest.approx([0.25] * 4, abs=0.02)


def test_balanced_sampling_works_with_single_image_classes_and_gaps_in_labels() -> None:
    loader = Loader(
        images=torch.zeros(3, 1, 1, 1), labels=torch.tensor([5, 900, 5]), batch_size=2, seed=0, sampling="balanced"
    )
    assert all(sorted(labels.tolist()) in ([5, 5], [5, 900], [900, 900]) for _, labels in loader.epoch(0))


# ── repeated augmentation ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("batch_size", "repeat"), [(12, 3), (16, 3), (7, 2), (10, 10), (5, 9), (200, 3)])
@pytest.mark.parametrize("sampling", ["uniform", "balanced"])
def test_copies_of_an_image_are_in_one_batch_and_never_adjacent(
    batch_size: int, repeat: int, sampling: Sampling
) -> None:
    loader = Loader(
        images=torch.arange(100, dtype=torch.uint8).view(100, 1, 1, 1),
        labels=torch.arange(100),
        batch_size=batch_size,
        seed=0,
        sampling=sampling,
        repeat=repeat,
    )
    batches = batch_images(loader, 3)
    assert len(batches) == loader.steps_per_epoch
    for batch in batches:
        counts = torch.bincount(torch.tensor(batch))
        assert len(batch) == min(batch_size, 100)
        assert counts.max() == min(repeat, batch_size)
        assert (counts > 0).sum() == -(-len(batch) // repeat)
        if (counts > 0).sum() > 1:
            assert all(first != second for first, second in itertools.pairwise(batch))
    distinct = [set(batch) for batch in batches]
    assert sum(map(len, distinct)) == len(set().union(*distinct))


def test_epoch_with_copies_can_be_resumed_and_repeated() -> None:
    loader = imbalanced_loader(12, seed=2, repeat=3)
    assert batch_images(loader, 4, start=3) == batch_images(loader, 4)[3:]
    assert batch_images(loader, 4) == batch_images(imbalanced_loader(12, seed=2, repeat=3), 4)
    assert batch_images(loader, 5) != batch_images(loader, 4)
