"""Test-time augmentation: which views are averaged, and with which weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vitral.data.lazy_images import Images
from vitral.evaluation.tta import tta_logits
from vitral.recipes.options import TTA


def middle_row(images: Images) -> Tensor:
    """A model whose logits are the pixels of the middle row."""
    return images[:][:, 0, images.shape[2] // 2].float()


def test_no_tta_is_a_single_forward_pass() -> None:
    images = torch.randint(0, 256, (5, 1, 7, 7), dtype=torch.uint8)
    assert torch.equal(tta_logits(middle_row, images, "none"), middle_row(images))


def test_flip_averages_image_and_mirror_image() -> None:
    images = torch.randint(0, 256, (5, 1, 7, 7), dtype=torch.uint8)
    expected = (middle_row(images) + middle_row(images).flip(1)) / 2
    torch.testing.assert_close(tta_logits(middle_row, images, "flip"), expected)


@pytest.mark.parametrize("tta", ["three", "six"])
@pytest.mark.parametrize("count", [3, 4096 + 3])
def test_shifted_views_have_half_the_weight_of_the_unshifted_one(count: int, tta: TTA) -> None:
    images = torch.zeros(count, 1, 7, 7, dtype=torch.uint8)
    images[:, 0, 3, 3] = 240
    images[:, 0, 2, 2] = 80  # reaches the middle row when the image is shifted down and right
    logits = tta_logits(middle_row, images, tta)
    assert logits.shape == (count, 7)
    # Unshifted: 240, weight 1/2. Shifted down: 80, weight 1/4. Shifted up: 0.
    torch.testing.assert_close(logits[-1], torch.tensor([0, 0, 0, 140.0, 0, 0, 0]))


def test_three_views_are_not_mirrored_and_six_are() -> None:
    images = torch.zeros(2, 1, 7, 7, dtype=torch.uint8)
    images[:, 0, 3, 5] = 240
    torch.testing.assert_close(tta_logits(middle_row, images, "three")[0], torch.tensor([0, 0, 0, 0, 0, 120.0, 0]))
    torch.testing.assert_close(tta_logits(middle_row, images, "six")[0], torch.tensor([0, 60.0, 0, 0, 0, 60.0, 0]))


def test_ten_views_are_shifted_along_both_diagonals() -> None:
    images = torch.zeros(2, 1, 7, 7, dtype=torch.uint8)
    images[:, 0, 3, 3], images[:, 0, 2, 4], images[:, 0, 4, 4] = 240, 60, 30
    # Unshifted: 240, weight 1/3. Shifted left and down: 60, left and up: 30, weight 1/6 each. Shifted right: 0.
    torch.testing.assert_close(tta_logits(middle_row, images, "ten")[0], torch.tensor([0, 7.5, 0, 95.0, 0, 7.5, 0]))
