"""Views of unlabelled images: shapes, independent draws, repeatability, and every kind of pixel."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Generator, Tensor

from vitral.data.preprocess import Preprocessing
from vitral.ssl.views import (
    ViewConfig,
    Views,
    draw_views,
    image_content,
    make_views,
    render_views,
    view_constants,
)

NOTHING = ViewConfig(
    local_views=0, global_min_area=1.0, flip=0.0, jitter_prob=0.0, grayscale=0.0, blur_first=0.0, blur_second=0.0,
    blur_local=0.0, solarize_second=0.0,
)  # fmt: skip
PIXELS = {"uint8": (torch.uint8, 256), "uint16": (torch.uint16, 65536), "float32": (torch.float32, 1)}


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def preprocessing_for(height: int, width: int, channels: int = 3, **options: Any) -> Preprocessing:
    mean, std = (tuple(base + 0.01 * c for c in range(channels)) for base in (0.45, 0.25))
    return Preprocessing(image_size=(height, width), channels=channels, mean=mean, std=std, **options)


def random_pixels(*shape: int, dtype: str = "uint8", seed: int = 1) -> Tensor:
    kind, limit = PIXELS[dtype]
    values = torch.rand(shape, generator=seeded(seed))
    return values if dtype == "float32" else (values * limit).int().to(kind)


def views_of(
    images: Tensor, config: ViewConfig, seed: int = 0, patch_size: int = 4, preprocessing: Preprocessing | None = None
) -> Views:
    preprocessing = preprocessing or preprocessing_for(images.shape[2], images.shape[3], images.shape[1])
    return make_views(config, preprocessing, images, seeded(seed), patch_size=patch_size)


def pixels_of(views: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Undo the normalisation."""
    mean, std = preprocessing.mean_and_std(views.device)
    return views * std + mean


@settings(max_examples=25, deadline=None)
@given(
    num_images=st.integers(1, 3),
    channels=st.sampled_from([1, 3, 5]),
    dtype=st.sampled_from(list(PIXELS)),
    grid=st.tuples(st.integers(2, 6), st.integers(2, 6)),
    counts=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    stored=st.tuples(st.integers(8, 40), st.integers(8, 40)),
)
def test_views_of_any_pixels_have_the_configured_shape_and_are_finite(
    num_images: int,
    channels: int,
    dtype: Any,
    grid: tuple[int, int],
    counts: tuple[int, int],
    stored: tuple[int, int],
) -> None:
    """Stored images may be larger or smaller than the model's image size."""
    size, config = (grid[0] * 4, grid[1] * 4), ViewConfig(global_views=counts[0], local_views=counts[1], local_size=0.5)
    preprocessing = preprocessing_for(*size, channels=channels, dtype=dtype)
    images = random_pixels(num_images, channels, *stored, dtype=dtype)
    global_views, local_views = make_views(config, preprocessing, images, seeded(), patch_size=4)
    assert global_views.shape == (num_images, counts[0], channels, *size)
    assert local_views.shape == (num_images, counts[1], channels, *config.local_image_size(size, 4))
    for views in (global_views, local_views):
        assert views.dtype == torch.float32
        assert views.is_contiguous()
        assert views.isfinite().all()
        if dtype != "float32" and views.numel():
            values = pixels_of(views, preprocessing) / preprocessing.pixel_scale
            assert values.min() > -1e-5
            assert values.max() < 1 + 1e-5


@pytest.mark.parametrize("dtype", list(PIXELS))
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_the_identity_is_plain_normalisation_bit_for_bit(channels: int, dtype: Any) -> None:
    preprocessing = preprocessing_for(12, 20, channels, dtype=dtype)
    images = random_pixels(3, channels, 12, 20, dtype=dtype)
    views = views_of(images, NOTHING, preprocessing=preprocessing)
    assert torch.equal(views.global_views, preprocessing.normalise(images)[:, None].expand(-1, 2, -1, -1, -1))
    assert views.local_views.shape[1] == 0


def test_the_same_generator_state_gives_the_same_bits_and_another_one_does_not() -> None:
    images, config = random_pixels(4, 3, 16, 16), ViewConfig(local_views=2)
    first, again, other = (views_of(images, config, seed) for seed in (0, 0, 1))
    assert torch.equal(first.global_views, again.global_views)
    assert torch.equal(first.local_views, again.local_views)
    assert not torch.equal(first.global_views, other.global_views)


def test_views_do_not_depend_on_the_default_generator() -> None:
    images, config = random_pixels(2, 3, 16, 16), ViewConfig(local_views=2)
    torch.manual_seed(0)
    first = views_of(images, config)
    torch.manual_seed(1)
    assert torch.equal(first.global_views, views_of(images, config).global_views)


def test_every_image_and_view_has_its_own_draw() -> None:
    """Views of 16 copies of one image all differ, also if only one parameter is random."""
    images = random_pixels(1, 3, 16, 16).expand(16, -1, -1, -1)
    changes: list[dict[str, Any]] = [
        {"global_min_area": 0.3}, {"jitter_prob": 1.0, "contrast": 0, "saturation": 0, "hue": 0},
        {"jitter_prob": 1.0, "brightness": 0, "saturation": 0, "hue": 0},
        {"jitter_prob": 1.0, "brightness": 0, "contrast": 0, "hue": 0},
        {"jitter_prob": 1.0, "brightness": 0, "contrast": 0, "saturation": 0},
        {"blur_first": 1.0, "blur_second": 1.0, "blur_min_sigma": 0.5},
    ]  # fmt: skip
    for change in changes:
        views = views_of(images, replace(NOTHING, **change)).global_views.flatten(0, 1)
        distances = torch.cdist(views.flatten(1), views.flatten(1), p=math.inf) + torch.eye(32)
        assert distances.min() > 1e-5, change


def test_a_parameter_does_not_change_the_draws_of_the_others() -> None:
    images = random_pixels(4, 3, 16, 16)
    cropped = replace(NOTHING, global_min_area=0.3, flip=0.5)
    solarized = replace(cropped, solarize_first=1.0)
    with_first, without = views_of(images, solarized).global_views, views_of(images, cropped).global_views
    assert torch.equal(with_first[:, 1], without[:, 1])
    assert not torch.equal(with_first[:, 0], without[:, 0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("flip", (0.5, 0.5)), ("solarize_first", (0.5, 0.0)), ("solarize_second", (0.0, 0.5)), ("grayscale", (0.5, 0.5)),
     ("blur_first", (0.5, 0.0)), ("blur_second", (0.0, 0.5)), ("jitter_prob", (0.5, 0.5))],
)  # fmt: skip
def test_operations_occur_with_their_probability_in_the_first_and_second_view(
    name: str, expected: tuple[float, float]
) -> None:
    images = random_pixels(1, 3, 8, 8).expand(400, -1, -1, -1)
    preprocessing = preprocessing_for(8, 8)
    config = replace(NOTHING, **{name: 0.5})  # type: ignore[arg-type]
    views = views_of(images, config, preprocessing=preprocessing).global_views
    is_changed = (views - preprocessing.normalise(images)[:, None]).abs().amax(dim=(2, 3, 4)) > 1e-3
    for view, probability in enumerate(expected):
        count = int(is_changed[:, view].sum())
        assert stats.binomtest(count, 400, max(probability, 1e-9)).pvalue > 1e-3


def test_strengths_do_not_depend_on_whether_an_operation_occurs() -> None:
    """The blur of the views that are blurred has the same distribution with probability 1 and 0.3."""
    images, preprocessing = random_pixels(1, 3, 8, 8).expand(600, -1, -1, -1), preprocessing_for(8, 8)
    always, sometimes = (replace(NOTHING, blur_first=probability) for probability in (1.0, 0.3))
    contrasts = []
    for seed, config in enumerate((always, sometimes)):
        first = views_of(images, config, seed, preprocessing=preprocessing).global_views[:, 0]
        is_blurred = (first - preprocessing.normalise(images)).abs().amax(dim=(1, 2, 3)) > 1e-4
        contrasts.append(first[is_blurred].std(dim=(1, 2, 3)))
    assert stats.ks_2samp(*contrasts).pvalue > 0.01


def test_local_views_have_their_own_probabilities_and_areas() -> None:
    """A ramp shows the area of each crop: the range of its values is the fraction of the width."""
    ramp = torch.linspace(0, 255, 64).expand(200, 3, 64, 64)
    preprocessing = preprocessing_for(64, 64, dtype="float32")
    config = replace(NOTHING, local_views=2, local_min_area=0.04, local_max_area=0.25, max_ratio=1.0)
    views = make_views(config, preprocessing, ramp, seeded(), patch_size=4)
    local_values = pixels_of(views.local_views, preprocessing)[:, :, 0, 0] / 255 * 63  # column of the source
    side = (local_values[..., 20] - local_values[..., 8]).abs() / 12 * 28 / 64  # 28 pixels wide
    areas = side.square().flatten()
    assert views.local_views.shape == (200, 2, 3, 28, 28)
    assert stats.kstest(areas, "uniform", (0.04, 0.21)).pvalue > 0.01


def test_crops_of_padded_images_show_no_padding() -> None:
    preprocessing = preprocessing_for(24, 24, resize="pad")
    color = torch.tensor(preprocessing.pad_color, dtype=torch.uint8).view(1, 3, 1, 1)
    images = color.repeat(64, 1, 24, 24)
    images[:, :, 8:16] = torch.randint(200, 255, (64, 3, 8, 24), generator=seeded(), dtype=torch.uint8)
    config = replace(NOTHING, local_views=3, global_min_area=0.3, flip=0.5)
    for views in make_views(config, preprocessing, images, seeded(), patch_size=4):
        assert pixels_of(views, preprocessing).min() > 199.9


def test_native_views_have_the_size_of_the_batch() -> None:
    preprocessing = preprocessing_for(32, 32, resize="native", patch_size=4)
    views = views_of(random_pixels(2, 3, 16, 64), ViewConfig(local_size=0.5), preprocessing=preprocessing)
    assert views.global_views.shape[3:] == (16, 64)
    assert views.local_views.shape[3:] == (8, 32)


def test_local_size_is_rounded_to_whole_patches_and_keeps_the_aspect_ratio() -> None:
    assert ViewConfig().local_image_size((224, 224), 16) == (96, 96)
    assert ViewConfig(local_size=0.5).local_image_size((32, 64), 4) == (16, 32)
    assert ViewConfig(local_size=0.01).local_image_size((32, 64), 4) == (4, 4)


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_colours_of_pixels_without_a_known_meaning_keep_their_ratio(dtype: Any) -> None:
    """Only brightness and contrast change: greyscale and solarisation with probability 1 have no effect."""
    preprocessing = preprocessing_for(12, 12, dtype=dtype)
    images = random_pixels(2, 3, 12, 12, dtype=dtype)
    config = replace(NOTHING, grayscale=1.0, solarize_first=1.0, jitter_prob=1.0, brightness=0.0, contrast=0.0, hue=0.5)
    views = views_of(images, config, preprocessing=preprocessing).global_views
    torch.testing.assert_close(views[:, 0], preprocessing.normalise(images), atol=1e-4, rtol=1e-4)
    brighter = views_of(images, replace(config, brightness=0.4), preprocessing=preprocessing).global_views
    assert (brighter - views).abs().mean() > 0.01


def test_greyscale_views_have_equal_channels() -> None:
    preprocessing = preprocessing_for(12, 12)
    views = views_of(random_pixels(2, 3, 12, 12), replace(NOTHING, grayscale=1.0), preprocessing=preprocessing)
    red, green, blue = pixels_of(views.global_views, preprocessing).unbind(2)
    torch.testing.assert_close(red, green)
    torch.testing.assert_close(red, blue)


def test_bf16_autocast_does_not_round_pixels() -> None:
    images = random_pixels(2, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        views = views_of(images, ViewConfig())
    assert torch.equal(views.global_views, views_of(images, ViewConfig()).global_views)


@pytest.mark.slow
@pytest.mark.parametrize("resize", ["crop", "pad"])
def test_views_neither_synchronise_with_the_host_nor_depend_on_data_for_their_shape(resize: Any) -> None:
    """Tensors on the meta device have no values that could be read. Like a GPU's, 8-bit images are sampled in fp16."""
    meta, preprocessing = torch.device("meta"), preprocessing_for(16, 16, resize=resize)
    images = torch.empty(2, 3, 16, 16, dtype=torch.uint8, device=meta)
    config = ViewConfig(local_size=0.5)
    draws, constants = draw_views(config, 2, seeded(), meta), view_constants(preprocessing, (16, 16), (8, 8), meta)
    views = render_views(config, preprocessing, images, image_content(images, preprocessing), draws, constants)
    assert views.global_views.shape == (2, 2, 3, 16, 16)
    assert views.local_views.shape == (2, 8, 3, 8, 8)
    assert views.global_views.dtype == views.local_views.dtype == torch.float32


@pytest.mark.slow
def test_rendering_is_one_graph_for_torch_compile() -> None:
    images, config, preprocessing = random_pixels(2, 3, 16, 16), ViewConfig(local_views=2), preprocessing_for(16, 16)
    compiled: Any = torch.compile(render_views, backend="eager", fullgraph=True)
    views = make_views(config, preprocessing, images, seeded(), patch_size=4, render_fn=compiled)
    expected = make_views(config, preprocessing, images, seeded(), patch_size=4)
    torch.testing.assert_close(views.global_views, expected.global_views)
    torch.testing.assert_close(views.local_views, expected.local_views)


INVALID: dict[str, Any] = {
    "global_views": 0, "local_views": -1, "local_size": 0.0, "global_min_area": 0.0, "global_max_area": 0.2,
    "local_min_area": math.nan, "local_max_area": 1.5, "max_ratio": 0.9, "flip": 1.1, "jitter_prob": -0.1,
    "brightness": 1.5, "contrast": -1.0, "saturation": math.nan, "hue": 0.6, "grayscale": 2.0, "blur_first": -1.0,
    "blur_second": 2.0, "blur_local": math.inf, "blur_min_sigma": 0.0, "blur_max_sigma": 0.05,
    "solarize_first": 2.0, "solarize_second": -0.5, "solarize_local": math.nan,
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(ViewConfig)])
def test_invalid_values_are_refused_and_named(name: str) -> None:
    with pytest.raises(ValueError, match=rf"views\.{name} must be .* got {INVALID[name]}"):
        ViewConfig(**{name: INVALID[name]})
