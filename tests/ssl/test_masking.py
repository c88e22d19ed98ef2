"""Masks: exact counts, uniform or in blocks, repeatable."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage, stats
from torch import Generator, Tensor

from vitral.ssl.masking import (
    block_masks,
    num_masked_patches,
    split_patches,
)

CPU = torch.device("cpu")


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@settings(max_examples=30, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    ratio=st.floats(0, 1),
    num_images=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_every_image_has_exactly_the_given_number_of_masked_patches(
    grid: tuple[int, int], ratio: float, num_images: int, seed: int
) -> None:
    num_patches = grid[0] * grid[1]
    count = round(ratio * num_patches)
    counts = torch.full((num_images,), count)
    assert torch.equal(block_masks(num_images, grid, count, seeded(seed), CPU).sum(dim=1), counts)
    assert torch.equal(split_patches(num_images, num_patches, count, seeded(seed), CPU).mask.sum(dim=1), counts)


def test_masks_of_split_patches_are_uniform_over_positions_and_pairs() -> None:
    masks = split_patches(8000, 8, 3, seeded(), CPU).mask
    assert stats.chisquare(masks.sum(dim=0)).pvalue > 0.01
    sets, frequencies = torch.unique(masks, dim=0, return_counts=True)
    assert len(sets) == 56  # 8 over 3
    assert stats.chisquare(frequencies).pvalue > 0.01


def test_masks_depend_on_the_generator_only() -> None:
    draws: list[Callable[[Generator], Tensor]] = [
        lambda rng: block_masks(4, (6, 6), 12, rng, CPU),
        lambda rng: split_patches(4, 36, 12, rng, CPU).mask,
        lambda rng: split_patches(4, 36, 12, rng, CPU).visible_indices,
    ]
    for draw in draws:
        assert torch.equal(draw(seeded(3)), draw(seeded(3)))
        assert not torch.equal(draw(seeded(3)), draw(seeded(4)))
        assert not torch.equal(*draw(seeded(3))[:2])


def mean_components(masks_BN: Tensor, side: int) -> float:
    """Connected regions per mask."""
    return sum(ndimage.label(mask.view(side, side).numpy())[1] for mask in masks_BN) / len(masks_BN)


def test_block_masks_have_few_connected_regions() -> None:
    blocks, scattered = block_masks(100, (14, 14), 78, seeded(), CPU), split_patches(100, 196, 78, seeded(), CPU).mask
    assert mean_components(blocks, 14) < 4
    assert mean_components(scattered, 14) > 15


def beit_mask(side: int, num_masked: int, rng: random.Random) -> list[list[bool]]:
    """BEiT's algorithm 1 with DINOv2's smallest block, one block after the other; the last ones may not fit."""
    mask, missing = [[False] * side for _ in range(side)], num_masked
    for _ in range(100):
        area = rng.uniform(4, max(missing, 4))
        ratio = math.exp(rng.uniform(math.log(0.3), -math.log(0.3)))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if max(height, width) > side:
            continue
        top, left = rng.randint(0, side - height), rng.randint(0, side - width)
        block = [(i, j) for i in range(top, top + height) for j in range(left, left + width)]
        count = sum(not mask[i][j] for i, j in block)
        if count <= missing:
            missing -= count
            for i, j in block:
                mask[i][j] = True
    return mask


@pytest.mark.parametrize(("side", "num_masked"), [(7, 20), (14, 70)])
def test_block_masks_cover_positions_as_often_as_beits(side: int, num_masked: int) -> None:
    """Blocks lie inside the image, so that its centre is masked most often and its corners least often."""
    rng = random.Random(0)
    expected = average_symmetries(torch.tensor([beit_mask(side, num_masked, rng) for _ in range(100)]))
    frequency = average_symmetries(
        block_masks(1000, (side, side), num_masked, seeded(), CPU).unflatten(1, (side, side))
    )
    assert expected.max() > 4 * expected.min()
    torch.testing.assert_close(frequency, expected, atol=0.08, rtol=0)


def average_symmetries(masks_BRS: Tensor) -> Tensor:
    """(R, R): how often a position is masked, averaged over flips and transposition, which are equally likely."""
    frequency = masks_BRS.float().mean(dim=0)
    frequency = (frequency + frequency.flip(0)) / 2
    frequency = (frequency + frequency.flip(1)) / 2
    return (frequency + frequency.T) / 2


def test_split_patches_are_undone_by_the_restore_indices() -> None:
    split = split_patches(5, 20, 15, seeded(), CPU)
    assert split.visible_indices.shape == (5, 5)
    patches = torch.arange(20).expand(5, 20)
    masked = torch.stack([patches[0][mask] for mask in split.mask])
    visible = patches.gather(1, split.visible_indices)
    assert torch.equal(torch.cat([visible, masked], dim=1).sort(dim=1).values, patches)
    filled = torch.cat([visible, torch.full((5, 15), -1)], dim=1).gather(1, split.restore_indices)
    assert torch.equal(filled, torch.where(split.mask, -1, patches))


def test_visible_patches_are_uniform_over_ordered_pairs() -> None:
    visible = split_patches(6000, 4, 2, seeded(), CPU).visible_indices
    _, frequencies = torch.unique(visible, dim=0, return_counts=True)
    assert len(frequencies) == 12
    assert stats.chisquare(frequencies).pvalue > 0.01


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, 1), (0.5, 98), (0.75, 147), (1.0, 195)])
def test_at_least_one_patch_is_masked_and_one_is_visible(ratio: float, expected: int) -> None:
    assert num_masked_patches(196, ratio) == expected


@pytest.mark.slow
def test_masks_neither_synchronise_with_the_host_nor_depend_on_data_for_their_shape() -> None:
    """Tensors on the meta device have no values that could be read."""
    meta, generator = torch.device("meta"), seeded()
    assert block_masks(2, (4, 4), 3, generator, meta).shape == (2, 16)
    split = split_patches(2, 16, 3, generator, meta)
    assert split.visible_indices.shape == (2, 13)
    assert split.mask.shape == (2, 16)
