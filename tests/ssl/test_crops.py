"""Crops compared with Pillow and torchvision, and blur with torchvision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from torch import Tensor

from peers import register_torchvision_ops
from vitral.ssl.crops import Boxes, blur_matrix, blur_radius, blur_taps, crop_boxes, resample, resample_matrices

register_torchvision_ops()
from torchvision.transforms.v2 import functional as torchvision  # noqa: E402

CPU = torch.device("cpu")


def noise(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 255


def uniform(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2))


def one_box(top: float, left: float, height: float, width: float) -> Boxes:
    return Boxes(*(torch.tensor([[float(value)]]) for value in (top, left, height, width)))


def whole(num_images: int, height: int, width: int) -> Boxes:
    zero = torch.zeros(num_images, 1)
    return Boxes(zero, zero, zero + height, zero + width)


def crop(images_BCHW: Tensor, boxes: Boxes, is_flipped: Tensor, size: tuple[int, int]) -> Tensor:
    H, W = images_BCHW.shape[2:]
    return resample(images_BCHW, *resample_matrices(boxes, is_flipped, (H, W), size), torch.float32)


@settings(max_examples=40, deadline=None)
@given(
    edges=st.tuples(*[st.floats(0, 1)] * 4),
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    is_flipped=st.booleans(),
)
def test_crops_of_fractional_boxes_match_pillow(
    edges: tuple[float, ...], size: tuple[int, int], is_flipped: bool
) -> None:
    image, (H, W) = noise(1, 1, 40, 60), (40, 60)
    height, width = 1 + edges[0] * (H - 1), 1 + edges[1] * (W - 1)
    top, left = edges[2] * (H - height), edges[3] * (W - width)
    view = crop(image, one_box(top, left, height, width), torch.tensor([[is_flipped]]), size)[0, 0, 0]
    box = (left, top, min(left + width, W), min(top + height, H))
    expected = np.asarray(
        Image.fromarray(image[0, 0].numpy()).resize((size[1], size[0]), Image.Resampling.BILINEAR, box=box)
    )
    expected = expected[:, ::-1] if is_flipped else expected
    # A filter's edge that falls on a pixel's centre may include the pixel or not, with a weight of about 0.
    np.testing.assert_allclose(view.numpy(), expected, atol=0.05)


@pytest.mark.parametrize("size", [(12, 12), (24, 32), (80, 64)])
def test_crops_of_whole_pixels_match_torchvision_inside_their_border(size: tuple[int, int]) -> None:
    """torchvision cuts the box out first. The filter then does not reach the pixels next to the box."""
    images = noise(2, 3, 64, 64)
    top, left, height, width = 10, 4, 40, 48
    boxes = Boxes(*(torch.full((2, 1), float(value)) for value in (top, left, height, width)))
    views = crop(images, boxes, torch.zeros(2, 1, dtype=torch.bool), size)[:, 0]
    expected = torchvision.resized_crop(images, top, left, height, width, list(size), antialias=True)
    border_y, border_x = (math.ceil(max(1.0, s / b)) for s, b in zip(size, (height, width), strict=True))
    inner = (..., slice(border_y, -border_y), slice(border_x, -border_x))
    torch.testing.assert_close(views[inner], expected[inner], atol=1e-3, rtol=0)


def test_views_of_one_image_do_not_mix_with_those_of_another() -> None:
    images = torch.stack([torch.full((3, 16, 16), value) for value in (10.0, 20.0, 30.0)])
    boxes = crop_boxes(uniform(4, 3, 5), whole(3, 16, 16), 0.1, 1.0, 4 / 3, (8, 8))
    views = crop(images, boxes, uniform(3, 5) < 0.5, (8, 8))
    torch.testing.assert_close(views, images[:, None, :, :8, :8].expand(-1, 5, -1, -1, -1))


def test_8_bit_images_in_fp16_stay_within_0_3_of_255() -> None:
    images = noise(4, 3, 224, 224).round()
    boxes = crop_boxes(uniform(4, 4, 3), whole(4, 224, 224), 0.05, 1.0, 4 / 3, (96, 96))
    matrices = resample_matrices(boxes, uniform(4, 3) < 0.5, (224, 224), (96, 96))
    exact, half = (resample(images.to(torch.uint8), *matrices, dtype) for dtype in (torch.float32, torch.float16))
    assert (exact - half.float()).abs().max() < 0.3


def test_crop_areas_are_uniform_and_ratios_log_uniform() -> None:
    draw = torch.rand(4, 400, 10, generator=torch.Generator().manual_seed(0))
    boxes = crop_boxes(draw, whole(400, 50, 100), 0.05, 0.25, 4 / 3, (20, 40))
    areas = (boxes.height * boxes.width / 5000).flatten()
    log_ratios = (boxes.width / boxes.height / 2).log().flatten()
    limit = math.log(4 / 3)
    assert stats.kstest(areas, "uniform", (0.05, 0.20)).pvalue > 0.01
    assert stats.kstest(log_ratios, "uniform", (-limit, 2 * limit)).pvalue > 0.01
    tops = (boxes.top / (50 - boxes.height)).flatten()
    assert stats.kstest(tops, "uniform").pvalue > 0.01


@settings(max_examples=50, deadline=None)
@given(
    shape=st.tuples(st.integers(4, 100), st.integers(4, 100)),
    size=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    area=st.tuples(st.floats(0.01, 1), st.floats(0, 1)),
    max_ratio=st.floats(1, 4),
    seed=st.integers(0, 1000),
)
def test_boxes_stay_inside_the_image_and_have_the_drawn_area(
    shape: tuple[int, int], size: tuple[int, int], area: tuple[float, float], max_ratio: float, seed: int
) -> None:
    """Also for images whose aspect ratio is far from that of the views."""
    (H, W), low = shape, area[0]
    high = low + area[1] * (1 - low)
    draw = torch.rand(4, 20, 3, generator=torch.Generator().manual_seed(seed))
    boxes = crop_boxes(draw, whole(20, H, W), low, high, max_ratio, size)
    assert (boxes.top >= 0).all()
    assert (boxes.left >= 0).all()
    assert (boxes.top + boxes.height <= H * (1 + 1e-5)).all()
    assert (boxes.left + boxes.width <= W * (1 + 1e-5)).all()
    torch.testing.assert_close(boxes.height * boxes.width / (H * W), low + draw[0] * (high - low), rtol=1e-4, atol=1e-5)


def test_a_crop_of_the_whole_image_is_the_image_bit_for_bit() -> None:
    images = noise(3, 2, 17, 23)
    boxes = crop_boxes(uniform(4, 3, 2), whole(3, 17, 23), 1.0, 1.0, 4 / 3, (17, 23))
    is_flipped = torch.tensor([[False, True]]).expand(3, 2)
    views = crop(images, boxes, is_flipped, (17, 23))
    assert torch.equal(views[:, 0], images)
    assert torch.equal(views[:, 1], images.flip(3))


def test_the_kernel_spans_a_tenth_of_the_shorter_side_and_at_least_3_pixels() -> None:
    assert [2 * blur_radius(size) + 1 for size in ((224, 224), (96, 224), (32, 32), (8, 8))] == [23, 9, 3, 3]


@pytest.mark.parametrize(("shape", "sigma"), [((32, 32), 0.1), ((32, 48), 1.3), ((96, 96), 0.7), ((224, 224), 2.0)])
def test_blur_matches_torchvision(shape: tuple[int, int], sigma: float) -> None:
    image, radius = noise(3, *shape), blur_radius(shape)
    sigma_BV, is_blurred = torch.tensor([[sigma]]), torch.tensor([[True]])
    rows, columns = (blur_matrix(sigma_BV, is_blurred, blur_taps(side, radius, CPU))[0, 0] for side in shape)
    expected = torchvision.gaussian_blur(image, [2 * radius + 1] * 2, [sigma] * 2)
    torch.testing.assert_close(rows @ image @ columns.T, expected, atol=2e-3, rtol=0)


def test_views_that_are_not_blurred_have_the_identity_matrix() -> None:
    matrix = blur_matrix(torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]]), blur_taps(9, 1, CPU))
    assert torch.equal(matrix[0, 1], torch.eye(9))
    assert not torch.equal(matrix[0, 0], torch.eye(9))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_blur_of_very_short_sides_keeps_constant_images(length: int) -> None:
    matrix = blur_matrix(torch.tensor([[1.5]]), torch.tensor([[True]]), blur_taps(length, 1, CPU))
    torch.testing.assert_close(matrix.sum(dim=-1), torch.ones(1, 1, length))
