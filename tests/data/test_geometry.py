"""Geometry of the resize modes: known values, and properties for images of any size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitral.data.geometry import (
    Geometry,
    Resize,
    bucket_sizes,
    fit_inside,
    input_geometry,
    mean_color,
    native_grid,
    nearest_bucket,
)
from vitral.data.preprocess import Preprocessing, to_model_input

SIDES = st.integers(1, 5000)


def make_preprocessing(resize: Resize, size: tuple[int, int] = (32, 48), patch_size: int = 8) -> Preprocessing:
    mean = (0.2, 0.5, 0.8)
    return Preprocessing(image_size=size, channels=3, mean=mean, std=(0.25,) * 3, resize=resize, patch_size=patch_size)


@pytest.mark.parametrize(
    ("resize", "height", "width", "expected"),
    [
        ("crop", 480, 640, Geometry((224, 298), 0, 37, (224, 224))),
        ("pad", 480, 640, Geometry((168, 224), -28, 0, (224, 224))),
        ("pad", 640, 480, Geometry((224, 168), 0, -28, (224, 224))),
        ("pad", 3, 9000, Geometry((1, 224), -111, 0, (224, 224))),
        ("stretch", 480, 640, Geometry((224, 224), 0, 0, (224, 224))),
        ("native", 480, 640, Geometry((192, 256), 0, 0, (192, 256))),
        ("native", 500, 500, Geometry((224, 224), 0, 0, (224, 224))),
        ("native", 1, 9000, Geometry((16, 3136), 0, 0, (16, 3136))),
    ],
)
def test_geometry_of_photographs(resize: Resize, height: int, width: int, expected: Geometry) -> None:
    assert input_geometry(height, width, (224, 224), resize, crop=1.0, patch_size=16) == expected


def test_nine_training_buckets_from_tall_to_wide() -> None:
    sizes = bucket_sizes((224, 224), 16)
    assert sizes[0] == (384, 128)
    assert sizes[4] == (224, 224)
    assert [size[::-1] for size in sizes] == list(reversed(sizes))
    assert len(sizes) == 9
    assert nearest_bucket(480, 640, sizes) == (192, 256)
    assert nearest_bucket(100, 9000, sizes) == (128, 384)


@settings(max_examples=150, deadline=None)
@given(height=SIDES, width=SIDES, max_patches=st.integers(1, 1024))
def test_native_grid_has_at_most_the_patches_and_the_aspect_ratio_within_one_patch(
    height: int, width: int, max_patches: int
) -> None:
    rows, columns = native_grid(height, width, max_patches)
    assert min(rows, columns) >= 1
    assert rows * columns <= max_patches
    assert min(abs(rows - columns * height / width), abs(columns - rows * width / height)) <= 1
    assert height == width or native_grid(width, height, max_patches) == (columns, rows)


@settings(max_examples=100, deadline=None)
@given(height=SIDES, width=SIDES, H=st.integers(1, 300), W=st.integers(1, 300), x=st.floats(0, 1), y=st.floats(0, 1))
def test_a_point_of_the_image_is_found_again_in_the_padded_input(
    height: int, width: int, H: int, W: int, x: float, y: float
) -> None:
    geometry = input_geometry(height, width, (H, W), "pad", crop=1.0, patch_size=1)
    top, left, bottom, right = geometry.content
    assert (bottom - top, right - left) == geometry.resized == fit_inside(height, width, (H, W))
    padded_y, padded_x = top + y * (bottom - top), left + x * (right - left)  # in the model input
    resized_y, resized_x = padded_y + geometry.top, padded_x + geometry.left
    assert resized_y / geometry.resized[0] == pytest.approx(y)
    assert resized_x / geometry.resized[1] == pytest.approx(x)
    assert abs((top + bottom) - H) <= 1  # centred
    assert abs((left + right) - W) <= 1


def test_padding_is_the_mean_colour_and_the_content_is_the_resized_image() -> None:
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 100, 3), dtype=np.uint8))
    preprocessing = make_preprocessing("pad")
    pixels = preprocessing.resize_and_crop(photo)
    top, left, bottom, right = preprocessing.geometry(40, 100).content
    expected = np.asarray(photo.resize((right - left, bottom - top), Image.Resampling.BILINEAR))
    assert np.array_equal(pixels[:, top:bottom, left:right].permute(1, 2, 0).numpy(), expected)
    padding = torch.cat([pixels[:, :top], pixels[:, bottom:]], dim=1).flatten(1)
    assert padding.unique(dim=1).T.tolist() == [list(mean_color(preprocessing.mean))]
    assert preprocessing.normalise(pixels[None])[0, :, :top].abs().max() <= 0.5 / 255 / 0.25 + 1e-6


@pytest.mark.parametrize("resize", ["pad", "stretch", "native"])
def test_arrays_and_photographs_get_the_same_input_size(resize: Resize) -> None:
    preprocessing = make_preprocessing(resize)
    images = torch.randint(0, 256, (2, 3, 30, 90), dtype=torch.uint8)
    inputs = to_model_input(images, preprocessing)
    photo = Image.fromarray(images[0].permute(1, 2, 0).numpy())
    pixels = preprocessing.resize_and_crop(photo)
    assert inputs.shape[1:] == pixels.shape
    assert (inputs[0].int() - pixels.int()).abs().max() <= 1
