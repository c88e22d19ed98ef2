"""Batches: each image once, in an order that depends on seed and epoch alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitral.data.loader import Loader, Sampling


def loader(count: int, batch: int, seed: int = 0) -> Loader:
    """Image i is filled with i, and its label is i."""
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    return Loader(images=images, labels=torch.arange(count), batch=batch, seed=seed)


def labels(batches: Loader, epoch: int, start: int = 0) -> list[list[int]]:
    return [found.tolist() for _, found in batches.epoch(epoch, start)]


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 200), batch=st.integers(1, 64), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_an_epoch_shows_no_image_twice_and_leaves_out_less_than_a_batch(
    count: int, batch: int, seed: int, epoch: int
) -> None:
    batches = labels(loader(count, batch, seed), epoch)
    seen = [label for found in batches for label in found]
    assert len(batches) == loader(count, batch).steps
    assert len(seen) == len(set(seen))
    assert set(seen) <= set(range(count))
    if count < batch:
        assert sorted(seen) == list(range(count))
    else:
        assert {len(found) for found in batches} == {batch}
        assert count - len(seen) < batch
    if count % batch == 0:
        assert sorted(seen) == list(range(count))


def test_images_keep_their_labels() -> None:
    for images, found in loader(100, 8).epoch(3):
        assert torch.equal(images[:, 0, 0, 0].long(), found)


def test_images_that_are_left_out_are_others_each_epoch() -> None:
    batches = loader(20, 8)
    out = [frozenset(range(20)) - {i for found in labels(batches, epoch) for i in found} for epoch in range(40)]
    assert {len(missing) for missing in out} == {4}
    assert frozenset.union(*out) == frozenset(range(20))


def test_a_set_smaller_than_the_batch_is_one_batch() -> None:
    small = loader(5, 64)
    assert small.steps == 1
    assert [sorted(found) for found in labels(small, 0)] == [[0, 1, 2, 3, 4]]


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    torch.manual_seed(1)
    first = labels(loader(60, 10, seed=3), 7)
    torch.manual_seed(2)
    torch.rand(5)
    assert labels(loader(60, 10, seed=3), 7) == first
    others = [labels(loader(60, 10, seed), epoch) for seed in range(5) for epoch in range(5)]
    assert len({str(order) for order in others}) == 25
    assert sum(map(len, first), 0) == 60
    flat = [i for found in first for i in found]
    assert flat != sorted(flat)
    assert [i for found in labels(loader(60, 20, seed=3), 7) for i in found] == flat, "the batch only cuts the order"


def test_drawing_an_order_leaves_the_global_random_state_alone() -> None:
    state = torch.get_rng_state()
    labels(loader(20, 5), 1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("start", range(8))
def test_going_on_from_a_batch_gives_the_batches_that_were_left(start: int) -> None:
    batches = loader(60, 9, seed=5)
    assert labels(batches, 4, start) == labels(batches, 4)[start:]


def test_each_place_is_equally_likely_for_each_image() -> None:
    batches = loader(4, 4)
    places = torch.tensor([labels(batches, epoch)[0].index(0) for epoch in range(800)])
    counts = torch.bincount(places, minlength=4)
    assert ((counts - 200).double() ** 2 / 200).sum() < 11.3  # chi-square, 3 degrees of freedom, 1 %


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63 - 1, 2**64 - 1])
def test_every_seed_that_torch_takes_gives_an_order(seed: int) -> None:
    assert sorted(labels(loader(6, 6, seed), 2)[0]) == list(range(6))


def test_batches_are_copies() -> None:
    images: Tensor = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
    for batch, _ in Loader(images=images, labels=torch.arange(4), batch=4, seed=0).epoch(0):
        batch += 1
    assert images.sum() == 0


# ── each class equally often ───────────────────────────────────────────────────────────────────────────────────

UNEVEN = torch.tensor([0] * 70 + [1] * 9 + [3] * 20 + [4])


def uneven(batch: int, seed: int = 0, repeat: int = 1) -> Loader:
    """Images that are their own numbers."""
    images = torch.arange(100, dtype=torch.uint8).view(100, 1, 1, 1)
    return Loader(images=images, labels=UNEVEN, batch=batch, seed=seed, sampling="balanced", repeat=repeat)


def numbers(batches: Loader, epoch: int, start: int = 0) -> list[list[int]]:
    return [images.flatten().tolist() for images, _ in batches.epoch(epoch, start)]


def test_balanced_classes_are_equally_often_in_an_epoch_and_images_of_a_class_nearly_so() -> None:
    for epoch in range(5):
        (seen,) = numbers(uneven(100), epoch)
        found = torch.tensor(seen)
        assert torch.bincount(UNEVEN[found], minlength=5).tolist() == [25, 25, 0, 25, 25]
        counts = torch.bincount(found, minlength=100)
        assert counts[:70].max() == 1
        assert set(counts[70:79].tolist()) == {2, 3}
        assert set(counts[79:99].tolist()) == {1, 2}
        assert counts[99] == 25


def test_over_epochs_every_image_of_a_large_class_is_seen_and_no_class_gets_more() -> None:
    seen = [number for epoch in range(30) for batch in numbers(uneven(30), epoch) for number in batch]
    assert set(range(100)) == set(seen)
    shares = torch.bincount(UNEVEN[torch.tensor(seen)], minlength=5) / len(seen)
    assert shares[[0, 1, 3, 4]].tolist() == pytest.approx([0.25] * 4, abs=0.02)


def test_a_class_with_more_places_than_images_and_more_classes_than_images_are_no_trouble() -> None:
    lone = Loader(
        images=torch.zeros(3, 1, 1, 1), labels=torch.tensor([5, 900, 5]), batch=2, seed=0, sampling="balanced"
    )
    assert all(sorted(found.tolist()) in ([5, 5], [5, 900], [900, 900]) for _, found in lone.epoch(0))


# ── several copies of an image in a batch ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("batch", "repeat"), [(12, 3), (16, 3), (7, 2), (10, 10), (5, 9), (200, 3)])
@pytest.mark.parametrize("sampling", ["plain", "balanced"])
def test_each_image_of_a_batch_is_there_so_many_times_and_never_beside_itself(
    batch: int, repeat: int, sampling: Sampling
) -> None:
    batches = Loader(
        images=torch.arange(100, dtype=torch.uint8).view(100, 1, 1, 1),
        labels=torch.arange(100),
        batch=batch,
        seed=0,
        sampling=sampling,
        repeat=repeat,
    )
    rows = numbers(batches, 3)
    assert len(rows) == batches.steps
    for row in rows:
        counts = torch.bincount(torch.tensor(row))
        assert len(row) == min(batch, 100)
        assert counts.max() == min(repeat, batch)
        assert (counts > 0).sum() == -(-len(row) // repeat)
        if (counts > 0).sum() > 1:
            assert all(one != other for one, other in itertools.pairwise(row))
    different = [set(row) for row in rows]
    assert sum(map(len, different)) == len(set().union(*different))


def test_with_copies_too_an_epoch_can_be_gone_on_with_and_others_come_next() -> None:
    batches = uneven(12, seed=2, repeat=3)
    assert numbers(batches, 4, start=3) == numbers(batches, 4)[3:]
    assert numbers(batches, 4) == numbers(uneven(12, seed=2, repeat=3), 4)
    assert numbers(batches, 5) != numbers(batches, 4)
