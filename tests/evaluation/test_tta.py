"""Several looks at one image."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vitral.evaluation.tta import Views, answers


def columns(images: Tensor) -> Tensor:
    """A model that says what the pixels of the middle row are."""
    return images[:, 0, images.shape[2] // 2].float()


def test_one_view_is_the_answer_itself() -> None:
    images = torch.randint(0, 256, (5, 1, 7, 7), dtype=torch.uint8)
    assert torch.equal(answers(columns, images, "one"), columns(images))


def test_the_mirror_image_counts_half() -> None:
    images = torch.randint(0, 256, (5, 1, 7, 7), dtype=torch.uint8)
    expected = (columns(images) + columns(images).flip(1)) / 2
    torch.testing.assert_close(answers(columns, images, "flip"), expected)


@pytest.mark.parametrize("views", ["three", "six"])
@pytest.mark.parametrize("count", [3, 4096 + 3])
def test_views_of_a_dot_spread_it_along_the_diagonal(count: int, views: Views) -> None:
    images = torch.zeros(count, 1, 7, 7, dtype=torch.uint8)
    images[:, 0, 3, 3] = 240
    images[:, 0, 2, 2] = 80  # arrives in the middle row when the image moves down and right
    said = answers(columns, images, views)
    assert said.shape == (count, 7)
    # in place: 240 in the middle, weight 1/2; moved down: 80 in the middle, weight 1/4; moved up: nothing
    torch.testing.assert_close(said[-1], torch.tensor([0, 0, 0, 140.0, 0, 0, 0]))


def test_three_views_are_not_mirrored() -> None:
    images = torch.zeros(2, 1, 7, 7, dtype=torch.uint8)
    images[:, 0, 3, 5] = 240
    torch.testing.assert_close(answers(columns, images, "three")[0], torch.tensor([0, 0, 0, 0, 0, 120.0, 0]))
    torch.testing.assert_close(answers(columns, images, "six")[0], torch.tensor([0, 60.0, 0, 0, 0, 60.0, 0]))


def test_ten_views_go_along_both_diagonals() -> None:
    images = torch.zeros(2, 1, 7, 7, dtype=torch.uint8)
    images[:, 0, 3, 3], images[:, 0, 2, 4], images[:, 0, 4, 4] = 240, 60, 30
    # in place 240, weight 1/3; moved to the left, down 60 and up 30, weight 1/6 each; to the right they miss it
    torch.testing.assert_close(answers(columns, images, "ten")[0], torch.tensor([0, 7.5, 0, 95.0, 0, 7.5, 0]))
