"""Frozen teachers: their input is converted, their output is checked, their classes are mapped by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.distillation import STUDENT, TEACHER, preprocessing_of, tiny_teacher
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.ssl.teacher import Teacher, as_features, conversion_note, convert_images, for_views

IMAGES = torch.randint(0, 256, (3, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_images_with_the_preprocessing_of_the_teacher_are_not_touched() -> None:
    images = torch.randn(2, 3, 16, 16)
    same = preprocessing_of(STUDENT)
    assert convert_images(images, same, replace(same, crop=0.9)) is images


def test_other_mean_and_std_give_what_the_teacher_computes_from_the_pixels() -> None:
    source = preprocessing_of(STUDENT, mean=0.3, std=0.2)
    target = preprocessing_of(STUDENT, mean=0.5, std=0.5)
    converted = convert_images(source.normalise(IMAGES), source, target)
    torch.testing.assert_close(converted, target.normalise(IMAGES), atol=1e-5, rtol=0)


def test_other_size_is_resized_with_antialiasing() -> None:
    source, target = preprocessing_of(STUDENT), replace(preprocessing_of(STUDENT), image_size=(8, 8))
    expected = nn.functional.interpolate(source.normalise(IMAGES), size=(8, 8), mode="bilinear", antialias=True)
    torch.testing.assert_close(convert_images(source.normalise(IMAGES), source, target), expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_grey_and_rgb_are_converted_as_in_pillow(channels: int) -> None:
    source = preprocessing_of(replace(STUDENT, channels=channels))
    target = preprocessing_of(replace(STUDENT, channels=4 - channels), mean=0.0, std=1.0)
    images = IMAGES[:, :channels]
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    expected = (images / 255).expand(-1, 3, -1, -1) if channels == 1 else (images / 255 * weights).sum(1, keepdim=True)
    torch.testing.assert_close(convert_images(source.normalise(images), source, target), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("student_size", "expected"), [((32, 32), (16, 16)), ((16, 64), (8, 32)), ((48, 12), (32, 8))])
def test_input_of_the_teacher_has_the_aspect_ratio_of_the_view_in_whole_patches(
    student_size: tuple[int, int], expected: tuple[int, int]
) -> None:
    student = replace(preprocessing_of(STUDENT), image_size=student_size)
    assert for_views(preprocessing_of(TEACHER), student, patch_size=4).image_size == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channels": 5, "mean": (0.5,) * 5, "std": (0.5,) * 5}, "expects 3 channels, and the images have 5"),
        ({"dtype": "float32"}, "expects"),
    ],
)
def test_pixels_that_cannot_be_converted_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(VitralError, match=message) as error:
        for_views(preprocessing_of(TEACHER), replace(preprocessing_of(STUDENT), **changes), patch_size=4)
    assert error.value.hint


def test_note_names_each_difference_of_the_preprocessing() -> None:
    student = preprocessing_of(STUDENT)
    assert conversion_note(student, student) is None
    grey = Preprocessing(image_size=(32, 48), channels=1, mean=(0.1,), std=(0.2,))
    assert conversion_note(grey, student) == (
        "views are converted for the teacher: greyscale, 32x48 pixels, mean 0.1, std 0.2"
    )


def test_vit_gives_its_pooled_features_and_its_patch_tokens() -> None:
    teacher = tiny_teacher()
    vit, images = teacher.network, torch.randn(2, 3, 16, 16)
    features = teacher.features(images, teacher.preprocessing)
    trace = vit.trace(images)  # type: ignore[attr-defined]
    torch.testing.assert_close(features.pooled, trace.pooled)
    tokens = vit.encoder.norm(trace.tokens[-1])[:, trace.num_prefix_tokens :]  # type: ignore[attr-defined]
    assert features.patches is not None
    torch.testing.assert_close(features.patches, tokens.transpose(1, 2).reshape(2, 24, 4, 4))


def test_distilled_vit_has_two_prefix_tokens() -> None:
    features = tiny_teacher(variant="distilled").features(torch.randn(2, 3, 16, 16), preprocessing_of(TEACHER))
    assert features.pooled.shape == (2, 48)
    assert features.patches is not None
    assert features.patches.shape == (2, 24, 4, 4)


def test_teacher_is_frozen_and_in_evaluation_mode() -> None:
    teacher = Teacher(nn.Sequential(nn.Dropout(), nn.Linear(2, 2)), preprocessing_of(TEACHER), name="x")
    assert isinstance(teacher.network, nn.Module)
    assert not teacher.network.training
    assert not any(parameter.requires_grad for parameter in teacher.network.parameters())


POOLED, MAP, TOKENS = torch.ones(2, 5), torch.rand(2, 5, 3, 4), torch.rand(2, 9, 5)


@pytest.mark.parametrize(
    ("output", "pooled", "grid"),
    [
        (POOLED, POOLED, None),
        (MAP, MAP.mean(dim=(2, 3)), (3, 4)),
        ((POOLED, MAP), POOLED, (3, 4)),
        ((POOLED, None), POOLED, None),
        ({"pooled": POOLED, "patches": TOKENS}, POOLED, (3, 3)),
        ([POOLED, TOKENS], POOLED, (3, 3)),
    ],
)
def test_outputs_of_a_callable(output: Any, pooled: Tensor, grid: tuple[int, int] | None) -> None:
    features = as_features(output, 2, "f")
    assert torch.equal(features.pooled, pooled)
    assert (None if features.patches is None else tuple(features.patches.shape[2:])) == grid


def test_tokens_of_a_square_grid_are_in_row_major_order() -> None:
    features = as_features((POOLED, TOKENS), 2, "f")
    assert features.patches is not None
    assert torch.equal(features.patches[1, :, 2, 0], TOKENS[1, 6])


@pytest.mark.parametrize(
    ("output", "actual"),
    [
        (torch.ones(3, 5), "shape (3, 5)"),
        (torch.ones(2), "shape (2,)"),
        ((POOLED, torch.ones(2, 7, 5)), "shape (2, 7, 5)"),
        ({"last_hidden_state": TOKENS, "pooler_output": POOLED}, "dict with last_hidden_state, pooler_output"),
        ("text", "str"),
    ],
)
def test_other_outputs_of_a_callable_are_refused(output: Any, actual: str) -> None:
    with pytest.raises(VitralError) as error:
        as_features(output, 2, "resnet")
    assert error.value.what == f"the teacher resnet returned {actual} for 2 images"
    assert error.value.hint.startswith("Expected features (B, E)")


def test_logits_follow_the_order_of_the_students_classes() -> None:
    teacher = tiny_teacher(classes=("ants", "bees"))
    images = torch.randn(2, 3, 16, 16)
    expected = teacher.logits(images, teacher.preprocessing)
    teacher.use_classes(("bees", "ants"))
    assert torch.equal(teacher.logits(images, teacher.preprocessing), expected.flip(1))


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (None, "has no classifier with named classes"),
        (("ants", "wasps"), "has no class 'bees'"),
        (("ants", "bees", "wasps"), "has a class that the images do not have, 'wasps'"),
    ],
)
def test_teacher_with_other_classes_is_refused(known: tuple[str, ...] | None, message: str) -> None:
    with pytest.raises(VitralError, match=message) as error:
        tiny_teacher(classes=known).use_classes(("ants", "bees"))
    assert "vitral distill" in error.value.hint
