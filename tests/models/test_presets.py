"""Presets: parameter counts of the published models, names and overrides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vitral.errors import VitralError
from vitral.models.presets import PRESETS, PUBLISHED_ACCURACY, preset
from vitral.models.variants.distilled import DistilledViT
from vitral.models.vit import ViT, ViTConfig

# Computed from the papers' tables; they agree with the counts that torchvision and DeiT publish.
PARAMETERS: list[tuple[str, dict[str, Any], int]] = [
    ("Ti/16", {}, 5_717_416),
    ("S/32", {}, 22_878_952),
    ("S/16", {}, 22_050_664),
    ("B/32", {}, 88_224_232),
    ("B/16", {}, 86_567_656),
    ("B/8", {}, 86_576_872),
    ("L/32", {}, 306_535_400),
    ("L/16", {}, 304_326_632),
    ("H/14", {}, 632_045_800),
    ("g/14", {}, 1_012_611_432),
    ("G/14", {}, 1_844_440_680),
    ("B/16", {"image_size": (384, 384)}, 86_859_496),
    ("L/16", {"image_size": (512, 512)}, 305_174_504),
    ("H/14", {"image_size": (518, 518)}, 633_470_440),
    ("plain-S/16", {}, 22_122_472),
    ("plain-S/16", {"head": "linear"}, 21_974_632),
    # timm's counts; of DINOv3, plus the masked biases of the keys: depth times width
    ("dinov2-S/14", {}, 22_441_192),
    ("dinov2-B/14", {}, 87_348_712),
    ("dinov2-L/14", {}, 305_392_616),
    ("dinov2-g/14", {}, 1_138_016_232),
    ("dinov3-S/16", {}, 21_981_160 + 12 * 384),
    ("dinov3-S+/16", {}, 29_077_480 + 12 * 384),
    ("dinov3-B/16", {}, 86_428_648 + 12 * 768),
    ("dinov3-L/16", {}, 304_153_576 + 24 * 1024),
    ("dinov3-H+/16", {}, 841_872_360 + 32 * 1280),
    ("dinov3-7B/16", {"qkv_bias": False}, 6_720_127_976),
]


def count_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "overrides", "count"), PARAMETERS)
def test_preset_has_the_published_number_of_parameters(name: str, overrides: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        assert count_parameters(ViT.from_preset(name, **overrides)) == count


@pytest.mark.parametrize(("name", "count"), [("Ti/16", 5_910_800), ("S/16", 22_436_432), ("B/16", 87_338_192)])
def test_distilled_preset_has_the_published_number_of_parameters(name: str, count: int) -> None:
    with torch.device("meta"):
        assert count_parameters(DistilledViT.from_preset(name)) == count


def test_every_preset_has_an_expected_parameter_count() -> None:
    assert {name for name, _, _ in PARAMETERS} == {*PRESETS}
    assert {*PUBLISHED_ACCURACY} < {*PRESETS}
    assert "77.91" in PUBLISHED_ACCURACY["B/16"]


@pytest.mark.parametrize("name", PRESETS)
def test_name_ends_with_the_patch_size(name: str) -> None:
    assert preset(name).patch_size == int(name.split("/")[1])
    assert preset(name) == PRESETS[name]


def test_overrides_do_not_change_the_preset() -> None:
    config = preset("S/16", image_size=(32, 32), patch_size=4, num_classes=10, dropout=0.1)
    assert config == ViTConfig(image_size=(32, 32), patch_size=4, num_classes=10, dropout=0.1, width=384, heads=6)
    assert PRESETS["S/16"].num_classes == 1000
    assert ViT.from_preset("Ti/16", depth=1, num_classes=10)(torch.zeros(1, 3, 224, 224)).shape == (1, 10)


@pytest.mark.parametrize(("name", "expected"), [("b/16", "B/16"), ("TI/16", "Ti/16"), ("Plain-s/16", "plain-S/16")])
def test_names_are_case_insensitive(name: str, expected: str) -> None:
    assert preset(name) == PRESETS[expected]


def test_lower_and_upper_case_g_are_distinct() -> None:
    assert (preset("g/14").width, preset("G/14").width) == (1408, 1664)


@pytest.mark.parametrize(("name", "expected"), [("S/61", "S/16"), ("B16", "B/16"), ("plain-S16", "plain-S/16")])
def test_unknown_preset_suggests_the_closest_name(name: str, expected: str) -> None:
    with pytest.raises(VitralError) as error:
        preset(name)
    assert error.value.what == f"no preset named {name!r}. Did you mean '{expected}'?"
    assert error.value.hint == f"Available: {', '.join(PRESETS)}"


def test_unknown_preset_without_a_close_name() -> None:
    with pytest.raises(VitralError, match=r"^no preset named 'resnet50'\nAvailable"):
        preset("resnet50")


@pytest.mark.parametrize(
    ("name", "expected"), [("num_clases", "num_classes"), ("patchsize", "patch_size"), ("head_s", "heads")]
)
def test_unknown_override_suggests_the_closest_field(name: str, expected: str) -> None:
    with pytest.raises(VitralError) as error:
        preset("S/16", **{name: 10})
    assert error.value.what == f"no field of ViTConfig named {name!r}. Did you mean '{expected}'?"
    assert "image_size" in error.value.hint


def test_invalid_override_names_the_field() -> None:
    with pytest.raises(ValueError, match="image height 324 is not divisible by the patch size 16; try 320 or 336"):
        preset("B/16", image_size=(324, 324))
