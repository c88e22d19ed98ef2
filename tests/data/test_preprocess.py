"""Resizing, cropping and normalisation compared with Pillow, NumPy and timm's rules."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitral import data
from vitral.data.preprocess import Preprocessing, channel_stats, to_model_input
from vitral.errors import VitralError
from vitral.utils.serialization import from_dict, to_dict

Array = np.ndarray[Any, Any]
CACHE = {name: os.environ.get(name) for name in ("VITRAL_HOME", "VITRAL_DATA")}  # before a fixture changes them


def make_preprocessing(height: int, width: int, channels: int = 3, **options: Any) -> Preprocessing:
    return Preprocessing(
        image_size=(height, width), channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels, **options
    )


def make_photo(height: int, width: int) -> Image.Image:
    """Smooth and asymmetric, with a little noise."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(3 * x / width + k) + np.cos(2 * y / height - k) for k in range(3)]
    noise = np.random.default_rng(0).normal(0, 6, (height, width, 3))
    return Image.fromarray((120 + 50 * np.stack(waves, axis=-1) + noise).clip(0, 255).astype(np.uint8))


def resize_and_crop_as_timm(
    image: Image.Image, height: int, width: int, crop: float, filter: Image.Resampling
) -> Array:
    """Resize so that both sides reach floor(side / crop_pct), rounding the longer one down, then crop the centre,
    rounding half a pixel to even."""
    min_h, min_w = math.floor(height / crop), math.floor(width / crop)
    w, h = image.size
    by_height = min_h / h >= min_w / w
    resized = (int(min_h * w / h), min_h) if by_height else (min_w, int(min_w * h / w))
    left, top = round((resized[0] - width) / 2), round((resized[1] - height) / 2)
    return np.asarray(image.resize(resized, filter).crop((left, top, left + width, top + height)))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop", [1.0, 0.9, 0.875])
@pytest.mark.parametrize("target", [(32, 32), (24, 48), (48, 24), (31, 17)])
@pytest.mark.parametrize("size", [(90, 160), (160, 90), (77, 77), (5, 7), (1, 1), (32, 32), (33, 300)])
def test_resize_and_crop_matches_pillow(
    size: tuple[int, int], target: tuple[int, int], crop: float, interpolation: Any
) -> None:
    image = make_photo(*size)
    pixels = make_preprocessing(*target, crop=crop, interpolation=interpolation).resize_and_crop(image)
    expected = resize_and_crop_as_timm(image, *target, crop, Image.Resampling[interpolation.upper()])
    assert pixels.shape == (3, *target)
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous()
    difference = np.abs(pixels.permute(1, 2, 0).numpy().astype(int) - expected)
    assert difference.max() <= 2
    assert difference.mean() < 0.25  # rounding only: a crop that is off by half a pixel gives more than 1


@pytest.mark.parametrize(("crop", "side"), [(0.9, 248), (0.875, 256), (0.95, 235), (1.0, 224)])
def test_resized_side_matches_timm(crop: float, side: int) -> None:
    preprocessing = make_preprocessing(224, 224, crop=crop)
    corner = round((side - 224) / 2)
    assert preprocessing.geometry(500, 500)[:3] == ((side, side), corner, corner)
    assert preprocessing.geometry(480, 640).resized == (side, side * 640 // 480)
    assert preprocessing.geometry(640, 480).resized == (side * 640 // 480, side)


def test_image_of_the_right_size_is_unchanged() -> None:
    image = make_photo(28, 28)
    assert np.array_equal(make_preprocessing(28, 28).resize_and_crop(image).permute(1, 2, 0).numpy(), np.asarray(image))


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    target=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    crop=st.floats(0.3, 1),
)
def test_crop_is_inside_the_resized_image(height: int, width: int, target: tuple[int, int], crop: float) -> None:
    preprocessing = make_preprocessing(*target, crop=crop)
    (H, W), top, left, _ = preprocessing.geometry(height, width)
    assert 0 <= top <= H - target[0]
    assert 0 <= left <= W - target[1]
    assert abs(H / W - height / width) <= max(1 / W, 1 / H, (H + 1) / W - H / (W + 1))
    assert preprocessing.resize_and_crop(Image.new("RGB", (width, height), (9, 8, 7))).unique().tolist() == [7, 8, 9]


def test_long_strip_is_not_resized_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    resize = Image.Image.resize

    def small_only(self: Image.Image, size: tuple[int, int], *args: Any, **kwargs: Any) -> Image.Image:
        assert size[0] * size[1] < 1_000_000, "the whole strip would be 6,720,000 × 224 pixels, 1.5 GB"
        return resize(self, size, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "resize", small_only)
    assert make_preprocessing(224, 224, channels=1).resize_and_crop(
        Image.new("L", (60_000, 2), 7)
    ).unique().tolist() == [7]


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize(("channels", "target_mode"), [(1, "L"), (3, "RGB")])
def test_gray_and_rgb_images_are_converted_into_each_other(mode: str, channels: int, target_mode: str) -> None:
    image = make_photo(10, 14).convert(mode)
    pixels = make_preprocessing(10, 14, channels=channels).resize_and_crop(image)
    array = np.asarray(image.convert(target_mode)).reshape(10, 14, channels)
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), array)


def test_unsupported_channel_count_is_an_error() -> None:
    for channels in (2, 4):
        with pytest.raises(VitralError, match=f"3 channels; the model expects {channels}"):
            make_preprocessing(8, 8, channels=channels).resize_and_crop(make_photo(8, 8))


def test_normalise_matches_numpy() -> None:
    images = torch.randint(0, 256, (5, 3, 4, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    mean, std = (0.1, 0.5, 0.7), (0.2, 0.3, 0.9)
    preprocessing = Preprocessing(image_size=(4, 6), channels=3, mean=mean, std=std)
    expected = (images.numpy() / 255 - np.array(mean)[:, None, None]) / np.array(std)[:, None, None]
    for dtype in (torch.uint8, torch.float32, torch.bfloat16):
        normalised = preprocessing.normalise(images.to(dtype))
        assert normalised.dtype == torch.float32
        np.testing.assert_allclose(normalised.numpy(), expected, atol=1e-5)


def test_channel_stats_normalise_to_mean_0_and_std_1() -> None:
    images = torch.randint(20, 220, (40, 3, 9, 9), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    mean, std = channel_stats(images)
    normalised = Preprocessing(image_size=(9, 9), channels=3, mean=mean, std=std).normalise(images)
    assert normalised.mean(dim=(0, 2, 3)).abs().max() < 1e-3
    assert (normalised.std(dim=(0, 2, 3)) - 1).abs().max() < 2e-3


@settings(max_examples=25, deadline=None)
@given(
    N=st.integers(1, 5),
    C=st.sampled_from([1, 3, 4]),
    low=st.integers(0, 254),
    value_range=st.integers(1, 255),
    seed=st.integers(0, 99),
)
def test_channel_stats_match_numpy(N: int, C: int, low: int, value_range: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    images = random.integers(low, min(low + value_range, 256), (N, C, 5, 7), dtype=np.uint8)
    mean, std = channel_stats(torch.from_numpy(images))
    np.testing.assert_allclose(mean, (images / 255).mean(axis=(0, 2, 3)), atol=6e-5)
    np.testing.assert_allclose(std, (images / 255).std(axis=(0, 2, 3)).clip(1e-4), atol=6e-5)
    assert min(std) > 0


def test_channel_stats_of_mnist_are_the_published_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CACHE.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    if not data.local_files("mnist"):
        pytest.skip("MNIST is not in the cache")
    dataset = data.load("mnist")
    images = torch.cat([dataset.train.images[:], dataset.validation.images[:]])
    assert channel_stats(images) == ((0.1307,), (0.3081,))


def rgb_images(N: int, H: int, W: int) -> torch.Tensor:
    return torch.stack([torch.from_numpy(np.roll(np.asarray(make_photo(H, W)), k, axis=1)) for k in range(N)]).permute(
        0, 3, 1, 2
    )


def test_matching_images_are_returned_unchanged() -> None:
    images = rgb_images(3, 8, 12)
    assert torch.equal(to_model_input(images, make_preprocessing(8, 12)), images)


def test_gray_to_rgb_repeats_the_channel() -> None:
    images = rgb_images(3, 8, 8)[:, :1]
    converted = to_model_input(images, make_preprocessing(8, 8))
    assert converted.shape == (3, 3, 8, 8)
    assert all(torch.equal(converted[:, c], images[:, 0]) for c in range(3))


def test_rgb_to_gray_matches_pillow() -> None:
    images = torch.randint(0, 256, (4, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    converted = to_model_input(images, make_preprocessing(16, 16, channels=1))
    assert converted.dtype == torch.uint8
    for image, gray in zip(images, converted, strict=True):
        expected = np.asarray(Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L")).astype(int)
        assert np.abs(gray[0].numpy() - expected).max() <= 1


def test_incompatible_channel_counts_are_an_error() -> None:
    with pytest.raises(VitralError, match="4 channels cannot be converted for a model with 3"):
        to_model_input(torch.zeros(1, 4, 8, 8, dtype=torch.uint8), make_preprocessing(8, 8))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop", [1.0, 0.875])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("target", [(16, 16), (64, 64), (24, 40), (40, 24)])
@pytest.mark.parametrize("size", [(32, 32), (28, 44)])
def test_batch_conversion_matches_the_conversion_of_single_images(
    size: tuple[int, int], target: tuple[int, int], channels: int, crop: float, interpolation: Any
) -> None:
    images = rgb_images(2, *size)
    preprocessing = make_preprocessing(*target, channels=channels, crop=crop, interpolation=interpolation)
    converted = to_model_input(images, preprocessing)
    assert converted.shape == (2, channels, *target)
    for image, pixels in zip(images, converted, strict=True):
        expected = preprocessing.resize_and_crop(Image.fromarray(image.permute(1, 2, 0).numpy()))
        assert (pixels.int() - expected.int()).abs().max() <= 2


def test_channels_and_size_are_converted_together() -> None:
    converted = to_model_input(rgb_images(2, 28, 28)[:, :1], make_preprocessing(32, 32))
    assert converted.shape == (2, 3, 32, 32)
    assert torch.equal(converted[:, 0], converted[:, 2])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image_size", (0, 8)),
        ("mean", (0.5,)),
        ("std", (0.5, 0.5)),
        ("std", (0.5, 0.0, 0.5)),
        ("crop", 0.0),
        ("crop", 1.5),
        ("crop", math.nan),
        ("interpolation", "lanczos9"),
    ],
)
def test_invalid_value_is_an_error_with_the_field_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"preprocessing\.{field} "):
        replace(make_preprocessing(8, 8), **{field: value})
    with pytest.raises(VitralError, match=field):
        from_dict(Preprocessing, json.loads(json.dumps(to_dict(make_preprocessing(8, 8)) | {field: value})))


def test_json_round_trip() -> None:
    preprocessing = make_preprocessing(24, 40, crop=0.9, interpolation="bicubic")
    assert from_dict(Preprocessing, json.loads(json.dumps(to_dict(preprocessing)))) == preprocessing


@pytest.mark.parametrize(("size", "crop"), [((24, 24), 0.9), ((24, 40), 0.875), ((17, 8), 0.3), ((28, 28), 1.0)])
def test_padded_image_is_restored_by_resize_and_crop(size: tuple[int, int], crop: float) -> None:
    preprocessing = Preprocessing(
        image_size=size, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, crop=crop, interpolation="bicubic"
    )
    image = torch.randint(0, 256, (3, *size), dtype=torch.uint8)
    padded = preprocessing.pad_for_roundtrip(image)
    assert padded.shape[1:] == tuple(int(side / crop) for side in size)
    assert torch.equal(preprocessing.resize_and_crop(Image.fromarray(padded.permute(1, 2, 0).numpy())), image)
