"""Colour augmentation compared with torchvision and Pillow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torch import Tensor

from peers import register_torchvision_ops
from vitral.ssl.colors import ColorDraws, adjust_brightness_and_contrast, adjust_colors, shift_hue, solarize

register_torchvision_ops()
from torchvision.transforms.v2 import functional as torchvision  # noqa: E402

TOLERANCE: dict[str, Any] = {
    "atol": 1e-4,
    "rtol": 0.0,
}  # of values in [0, 1]; torchvision's luma weight of red is 0.2989


def random_views(channels: int = 3, seed: int = 0) -> Tensor:
    """(2, 3, C, 8, 9) in [0, 1]."""
    return torch.rand(2, 3, channels, 8, 9, generator=torch.Generator().manual_seed(seed))


def strengths(brightness: float = 1.0, contrast: float = 1.0, saturation: float = 1.0) -> ColorDraws:
    values = (brightness, contrast, saturation, 0.0)
    return ColorDraws(*(torch.full((2, 3), value) for value in values))


@settings(max_examples=20, deadline=None)
@given(hue=st.floats(-0.5, 0.5), seed=st.integers(0, 100))
def test_hue_matches_torchvision(hue: float, seed: int) -> None:
    views = random_views(seed=seed)
    torch.testing.assert_close(
        shift_hue(views, torch.full((2, 3), hue)), torchvision.adjust_hue(views, hue), **TOLERANCE
    )


def test_hue_keeps_grey_black_and_white_and_does_not_depend_on_the_scale() -> None:
    gray = torch.tensor([0.0, 0.3, 1.0]).view(1, 1, 1, 1, 3).expand(1, 1, 3, 1, 3)
    assert torch.equal(shift_hue(gray, torch.full((1, 1), 0.2)), gray)
    views, hue = random_views(), torch.full((2, 3), 0.07)
    torch.testing.assert_close(shift_hue(views * 255, hue) / 255, shift_hue(views, hue), **TOLERANCE)


def test_a_third_of_a_turn_maps_red_to_green_to_blue() -> None:
    red = torch.tensor([1.0, 0.0, 0.0]).view(1, 1, 3, 1, 1)
    green = shift_hue(red, torch.full((1, 1), 1 / 3))
    torch.testing.assert_close(green.flatten(), torch.tensor([0.0, 1.0, 0.0]), **TOLERANCE)
    torch.testing.assert_close(
        shift_hue(green, torch.full((1, 1), 1 / 3)).flatten(), torch.tensor([0.0, 0.0, 1.0]), **TOLERANCE
    )


@pytest.mark.parametrize("factor", [0.0, 0.6, 1.0, 1.4])
@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_each_operation_matches_torchvision_after_clipping(name: str, factor: float) -> None:
    views = random_views()
    adjusted = adjust_colors(views, strengths(**{name: factor})).clamp(0, 1)
    expected = getattr(torchvision, f"adjust_{name}")(views.flatten(0, 1), factor).view_as(views)
    torch.testing.assert_close(adjusted, expected, **TOLERANCE)


def test_operations_together_match_torchvision_in_any_order_where_nothing_is_clipped() -> None:
    views = 0.3 + 0.4 * random_views()
    adjusted = adjust_colors(views, strengths(brightness=1.1, contrast=0.8, saturation=0.7))
    factors = {"brightness": 1.1, "contrast": 0.8, "saturation": 0.7}
    for order in (("brightness", "contrast", "saturation"), ("saturation", "contrast", "brightness")):
        expected = views.flatten(0, 1)
        for name in order:
            expected = getattr(torchvision, f"adjust_{name}")(expected, factors[name])
        torch.testing.assert_close(adjusted, expected.view_as(views), **TOLERANCE)


def test_saturation_0_is_greyscale() -> None:
    views = random_views()
    expected = torchvision.rgb_to_grayscale(views, num_output_channels=3)
    torch.testing.assert_close(adjust_colors(views, strengths(saturation=0.0)), expected, **TOLERANCE)


def test_solarisation_matches_pillow() -> None:
    image = torch.arange(256, dtype=torch.uint8).view(16, 16)
    expected = np.asarray(ImageOps.solarize(Image.fromarray(image.numpy())))
    views = image.float().expand(1, 2, 1, 16, 16)
    solarized = solarize(views, torch.tensor([[True, False]]), 255.0)
    assert np.array_equal(solarized[0, 0, 0].numpy(), expected)
    assert torch.equal(solarized[0, 1], views[0, 1])


def test_each_view_has_its_own_strengths() -> None:
    views = random_views()[:1, :1].expand(2, 3, -1, -1, -1)
    draws = ColorDraws(torch.linspace(0.5, 1.5, 6).view(2, 3), torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3))
    adjusted = adjust_colors(views, draws)
    torch.testing.assert_close(adjusted, views * draws.brightness[..., None, None, None])


@pytest.mark.parametrize("channels", [1, 5])
def test_brightness_and_contrast_of_other_channels(channels: int) -> None:
    """Contrast keeps the mean of each channel and scales deviations from it."""
    views = random_views(channels)
    adjusted = adjust_brightness_and_contrast(views, strengths(brightness=1.2, contrast=0.5))
    mean = views.mean(dim=(3, 4), keepdim=True)
    torch.testing.assert_close(adjusted, 1.2 * (mean + 0.5 * (views - mean)))
    if channels == 1:
        expected = torchvision.adjust_contrast(torchvision.adjust_brightness(0.5 * views, 1.2), 0.5)
        actual = adjust_brightness_and_contrast(0.5 * views, strengths(brightness=1.2, contrast=0.5))
        torch.testing.assert_close(actual, expected, **TOLERANCE)
