"""The papers' tables: sizes to the last parameter, names as people type them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vitral.errors import VitralError
from vitral.models.presets import PRESETS, PUBLISHED, preset
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
]


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "changes", "count"), PARAMETERS)
def test_a_preset_has_the_parameters_of_the_published_model(name: str, changes: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        assert parameters(ViT.from_preset(name, **changes)) == count


@pytest.mark.parametrize(("name", "count"), [("Ti/16", 5_910_800), ("S/16", 22_436_432), ("B/16", 87_338_192)])
def test_a_distilled_preset_has_the_parameters_of_the_published_model(name: str, count: int) -> None:
    with torch.device("meta"):
        assert parameters(DistilledViT.from_preset(name)) == count


def test_every_preset_is_held_to_its_count_and_published_results_belong_to_presets() -> None:
    assert {name for name, _, _ in PARAMETERS} == {*PRESETS}
    assert {*PUBLISHED} < {*PRESETS}
    assert "77.91" in PUBLISHED["B/16"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_number_behind_the_slash_is_the_patch_size(name: str) -> None:
    assert preset(name).patch_size == int(name.split("/")[1])
    assert preset(name) == PRESETS[name]


def test_changes_are_made_to_a_copy() -> None:
    changed = preset("S/16", image_size=(32, 32), patch_size=4, classes=10, dropout=0.1)
    assert changed == ViTConfig(image_size=(32, 32), patch_size=4, classes=10, dropout=0.1, width=384, heads=6)
    assert PRESETS["S/16"].classes == 1000
    assert ViT.from_preset("Ti/16", depth=1, classes=10)(torch.zeros(1, 3, 224, 224)).shape == (1, 10)


@pytest.mark.parametrize(("typed", "meant"), [("b/16", "B/16"), ("TI/16", "Ti/16"), ("Plain-s/16", "plain-S/16")])
def test_case_does_not_matter(typed: str, meant: str) -> None:
    assert preset(typed) is not None
    assert preset(typed) == PRESETS[meant]


def test_little_g_and_big_g_are_told_apart() -> None:
    assert (preset("g/14").width, preset("G/14").width) == (1408, 1664)


@pytest.mark.parametrize(("typed", "meant"), [("S/61", "S/16"), ("B16", "B/16"), ("plain-S16", "plain-S/16")])
def test_an_unknown_preset_is_refused_with_the_nearest_name_and_the_whole_table(typed: str, meant: str) -> None:
    with pytest.raises(VitralError) as refused:
        preset(typed)
    assert refused.value.what == f"no preset named {typed!r}. Did you mean {meant}?"
    assert refused.value.hint == f"Known: {', '.join(PRESETS)}"


def test_a_name_like_no_preset_gets_no_suggestion() -> None:
    with pytest.raises(VitralError, match=r"^no preset named 'resnet50'\.\nKnown"):
        preset("resnet50")


@pytest.mark.parametrize(("typed", "meant"), [("clases", "classes"), ("patchsize", "patch_size"), ("head_s", "heads")])
def test_an_unknown_setting_is_refused_with_the_nearest_name(typed: str, meant: str) -> None:
    with pytest.raises(VitralError) as refused:
        preset("S/16", **{typed: 10})
    assert refused.value.what == f"a ViT has no setting {typed!r}. Did you mean {meant}?"
    assert "image_size" in refused.value.hint


def test_a_change_that_does_not_fit_is_refused_with_its_field() -> None:
    with pytest.raises(ValueError, match="image height 324 is not a multiple of patch_size 16; 320 and 336 are"):
        preset("B/16", image_size=(324, 324))
