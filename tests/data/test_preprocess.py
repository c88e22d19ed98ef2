"""Scaling, cropping and normalising against Pillow, NumPy and the rules of timm written down here."""

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
CACHE = {name: os.environ.get(name) for name in ("VITRAL_HOME", "VITRAL_DATA")}  # before the tests get their own


def wanting(height: int, width: int, channels: int = 3, **more: Any) -> Preprocessing:
    return Preprocessing(
        image_size=(height, width), channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels, **more
    )


def photograph(height: int, width: int) -> Image.Image:
    """Smooth and asymmetric, with a little noise."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(3 * x / width + k) + np.cos(2 * y / height - k) for k in range(3)]
    noise = np.random.default_rng(0).normal(0, 6, (height, width, 3))
    return Image.fromarray((120 + 50 * np.stack(waves, axis=-1) + noise).clip(0, 255).astype(np.uint8))


def by_timm(picture: Image.Image, height: int, width: int, crop: float, filter: Image.Resampling) -> Array:
    """Scale so that both sides reach floor(side / crop_pct), the other rounded down; then cut out the middle, rounding
    half a pixel to even."""
    least_h, least_w = math.floor(height / crop), math.floor(width / crop)
    w, h = picture.size
    tall = least_h / h >= least_w / w
    scaled = (int(least_h * w / h), least_h) if tall else (least_w, int(least_w * h / w))
    left, top = round((scaled[0] - width) / 2), round((scaled[1] - height) / 2)
    return np.asarray(picture.resize(scaled, filter).crop((left, top, left + width, top + height)))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop", [1.0, 0.9, 0.875])
@pytest.mark.parametrize("target", [(32, 32), (24, 48), (48, 24), (31, 17)])
@pytest.mark.parametrize("size", [(90, 160), (160, 90), (77, 77), (5, 7), (1, 1), (32, 32), (33, 300)])
def test_pixels_are_those_of_pillows_resize_and_crop(
    size: tuple[int, int], target: tuple[int, int], crop: float, interpolation: Any
) -> None:
    picture = photograph(*size)
    pixels = wanting(*target, crop=crop, interpolation=interpolation).resize_and_crop(picture)
    wanted = by_timm(picture, *target, crop, Image.Resampling[interpolation.upper()])
    assert pixels.shape == (3, *target)
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous()
    off = np.abs(pixels.permute(1, 2, 0).numpy().astype(int) - wanted)
    assert off.max() <= 2
    assert off.mean() < 0.25  # rounding: a crop that is half a pixel off gives more than 1


@pytest.mark.parametrize(("crop", "side"), [(0.9, 248), (0.875, 256), (0.95, 235), (1.0, 224)])
def test_the_scaled_side_is_timms(crop: float, side: int) -> None:
    preprocessing = wanting(224, 224, crop=crop)
    corner = round((side - 224) / 2)
    assert preprocessing.resize_crop_geometry(500, 500) == (side, side, corner, corner)
    assert preprocessing.resize_crop_geometry(480, 640)[:2] == (side, side * 640 // 480)
    assert preprocessing.resize_crop_geometry(640, 480)[:2] == (side * 640 // 480, side)


def test_a_picture_of_the_right_size_is_not_touched() -> None:
    picture = photograph(28, 28)
    assert np.array_equal(wanting(28, 28).resize_and_crop(picture).permute(1, 2, 0).numpy(), np.asarray(picture))


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    target=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    crop=st.floats(0.3, 1),
)
def test_the_crop_lies_inside_the_scaled_picture_whatever_the_sizes(
    height: int, width: int, target: tuple[int, int], crop: float
) -> None:
    preprocessing = wanting(*target, crop=crop)
    H, W, top, left = preprocessing.resize_crop_geometry(height, width)
    assert 0 <= top <= H - target[0]
    assert 0 <= left <= W - target[1]
    assert abs(H / W - height / width) <= max(1 / W, 1 / H, (H + 1) / W - H / (W + 1))
    assert preprocessing.resize_and_crop(Image.new("RGB", (width, height), (9, 8, 7))).unique().tolist() == [7, 8, 9]


def test_a_long_strip_is_not_scaled_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    resize = Image.Image.resize

    def small_only(self: Image.Image, size: tuple[int, int], *more: Any, **settings: Any) -> Image.Image:
        assert size[0] * size[1] < 1_000_000, "as a whole: 6,720,000 × 224 pixels, 1.5 GB"
        return resize(self, size, *more, **settings)

    monkeypatch.setattr(Image.Image, "resize", small_only)
    assert wanting(224, 224, channels=1).resize_and_crop(Image.new("L", (60_000, 2), 7)).unique().tolist() == [7]


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize(("channels", "wanted"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_every_number_of_channels_takes_gray_and_colour(mode: str, channels: int, wanted: str) -> None:
    picture = photograph(10, 14).convert(mode)
    pixels = wanting(10, 14, channels=channels).resize_and_crop(picture)
    array = np.asarray(picture.convert(wanted)).reshape(10, 14, channels)
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), array)


def test_a_number_of_channels_that_no_picture_has_is_an_error() -> None:
    with pytest.raises(VitralError, match="1, 3 or 4 channels; this model wants 2"):
        wanting(8, 8, channels=2).resize_and_crop(photograph(8, 8))


def test_normalising_is_what_numpy_says() -> None:
    images = torch.randint(0, 256, (5, 3, 4, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    mean, std = (0.1, 0.5, 0.7), (0.2, 0.3, 0.9)
    preprocessing = Preprocessing(image_size=(4, 6), channels=3, mean=mean, std=std)
    wanted = (images.numpy() / 255 - np.array(mean)[:, None, None]) / np.array(std)[:, None, None]
    for kind in (torch.uint8, torch.float32, torch.bfloat16):
        normal = preprocessing.normalise(images.to(kind))
        assert normal.dtype == torch.float32
        np.testing.assert_allclose(normal.numpy(), wanted, atol=1e-5)


def test_what_was_measured_normalises_to_mean_zero_and_deviation_one() -> None:
    images = torch.randint(20, 220, (40, 3, 9, 9), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    mean, std = channel_stats(images)
    normal = Preprocessing(image_size=(9, 9), channels=3, mean=mean, std=std).normalise(images)
    assert normal.mean(dim=(0, 2, 3)).abs().max() < 1e-3
    assert (normal.std(dim=(0, 2, 3)) - 1).abs().max() < 2e-3


@settings(max_examples=25, deadline=None)
@given(
    N=st.integers(1, 5),
    C=st.sampled_from([1, 3, 4]),
    low=st.integers(0, 254),
    spread=st.integers(1, 255),
    seed=st.integers(0, 99),
)
def test_mean_and_deviation_are_numpys(N: int, C: int, low: int, spread: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    images = random.integers(low, min(low + spread, 256), (N, C, 5, 7), dtype=np.uint8)
    mean, std = channel_stats(torch.from_numpy(images))
    np.testing.assert_allclose(mean, (images / 255).mean(axis=(0, 2, 3)), atol=6e-5)
    np.testing.assert_allclose(std, (images / 255).std(axis=(0, 2, 3)).clip(1e-4), atol=6e-5)
    assert min(std) > 0


def test_mnists_mean_and_deviation_are_the_ones_everybody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CACHE.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    if not data.local_files("mnist"):
        pytest.skip("MNIST is not in the cache")
    dataset = data.load("mnist")
    images = torch.cat([dataset.train.images, dataset.validation.images])
    assert channel_stats(images) == ((0.1307,), (0.3081,))


def rgb_set(N: int, H: int, W: int) -> torch.Tensor:
    return torch.stack([torch.from_numpy(np.roll(np.asarray(photograph(H, W)), k, axis=1)) for k in range(N)]).permute(
        0, 3, 1, 2
    )


def test_adapting_what_fits_changes_nothing() -> None:
    images = rgb_set(3, 8, 12)
    assert torch.equal(to_model_input(images, wanting(8, 12)), images)


def test_adapting_gray_to_colour_repeats_the_channel() -> None:
    images = rgb_set(3, 8, 8)[:, :1]
    adapted = to_model_input(images, wanting(8, 8))
    assert adapted.shape == (3, 3, 8, 8)
    assert all(torch.equal(adapted[:, c], images[:, 0]) for c in range(3))


def test_adapting_colour_to_gray_is_pillows_conversion() -> None:
    images = torch.randint(0, 256, (4, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    adapted = to_model_input(images, wanting(16, 16, channels=1))
    assert adapted.dtype == torch.uint8
    for image, gray in zip(images, adapted, strict=True):
        wanted = np.asarray(Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L")).astype(int)
        assert np.abs(gray[0].numpy() - wanted).max() <= 1


def test_adapting_channels_that_do_not_go_together_is_an_error() -> None:
    with pytest.raises(VitralError, match="4 channels cannot be shown to a model with 3"):
        to_model_input(torch.zeros(1, 4, 8, 8, dtype=torch.uint8), wanting(8, 8))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop", [1.0, 0.875])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("target", [(16, 16), (64, 64), (24, 40), (40, 24)])
@pytest.mark.parametrize("size", [(32, 32), (28, 44)])
def test_adapting_a_set_gives_what_its_pictures_give_one_by_one(
    size: tuple[int, int], target: tuple[int, int], channels: int, crop: float, interpolation: Any
) -> None:
    images = rgb_set(2, *size)
    preprocessing = wanting(*target, channels=channels, crop=crop, interpolation=interpolation)
    adapted = to_model_input(images, preprocessing)
    assert adapted.shape == (2, channels, *target)
    for image, pixels in zip(images, adapted, strict=True):
        wanted = preprocessing.resize_and_crop(Image.fromarray(image.permute(1, 2, 0).numpy()))
        assert (pixels.int() - wanted.int()).abs().max() <= 2


def test_adapting_gray_to_colour_and_to_another_size_works_at_once() -> None:
    adapted = to_model_input(rgb_set(2, 28, 28)[:, :1], wanting(32, 32))
    assert adapted.shape == (2, 3, 32, 32)
    assert torch.equal(adapted[:, 0], adapted[:, 2])


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
def test_a_preprocessing_that_makes_no_sense_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"preprocessing\.{field} "):
        replace(wanting(8, 8), **{field: value})
    with pytest.raises(VitralError, match=field):
        from_dict(Preprocessing, json.loads(json.dumps(to_dict(wanting(8, 8)) | {field: value})))


def test_a_preprocessing_survives_json() -> None:
    preprocessing = wanting(24, 40, crop=0.9, interpolation="bicubic")
    assert from_dict(Preprocessing, json.loads(json.dumps(to_dict(preprocessing)))) == preprocessing


@pytest.mark.parametrize(("size", "crop"), [((24, 24), 0.9), ((24, 40), 0.875), ((17, 8), 0.3), ((28, 28), 1.0)])
def test_a_framed_image_is_seen_as_it_was(size: tuple[int, int], crop: float) -> None:
    """Saved, opened and cropped, it has the very same pixels."""
    seen = Preprocessing(
        image_size=size, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3, crop=crop, interpolation="bicubic"
    )
    image = torch.randint(0, 256, (3, *size), dtype=torch.uint8)
    framed = seen.pad_for_roundtrip(image)
    assert framed.shape[1:] == tuple(int(side / crop) for side in size)
    assert torch.equal(seen.resize_and_crop(Image.fromarray(framed.permute(1, 2, 0).numpy())), image)
