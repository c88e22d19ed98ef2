"""`vitral.distill`: students of any teacher, exact resume, cached features and clear errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import vitral
from support.common import identical
from support.distillation import TEACHER, TINY_RUN, save_photos, save_teacher
from support.training import (
    RaiseSigint,
    RecordMessages,
    final_weights,
    load_newest_checkpoint,
    metrics_without_timing,
    weight_bytes,
)
from vitral import weights
from vitral.data.preprocess import Preprocessing
from vitral.data.registry.cache import cache_dir
from vitral.errors import Interrupted, VitralError
from vitral.recipes.builtin import get_recipe
from vitral.recipes.checkpoint_options import CheckpointOptions
from vitral.runs.run import Run
from vitral.training.callbacks import Callback
from vitral.training.distillation.feature_cache import FOLDER
from vitral.utils.atomic import atomic_write

CENTRAL: dict[str, Any] = {"pretrain.distill.augment": False}


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return save_teacher(tmp_path / "teacher")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return save_photos(tmp_path / "photos")


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAL_HOME", str(tmp_path / "cache"))


def distill(photos: Any, out: Path, teacher: Any, callback: Callback | None = None, **overrides: Any) -> Run:
    callbacks = [callback] if callback else []
    vitral.distill(photos, teacher=teacher, out=out, callbacks=callbacks, **{**TINY_RUN, **overrides})
    return Run(out)


def resume(out: Path, callback: Callback | None = None, **arguments: Any) -> Run:
    vitral.distill(resume=out, callbacks=[callback] if callback else [], **arguments)
    return Run(out)


@pytest.mark.slow
def test_student_is_a_model_without_a_classifier(tmp_path: Path, photos: Path, teacher: Path, no_figures: None) -> None:
    run = distill(photos, tmp_path / "run", teacher)
    rows = run.load_metrics()
    assert len(rows) == 3
    assert all(-1 <= row["train_cosine"] <= 1 for row in rows)
    assert not any(name.startswith(("pooled", "patch_proj")) for name in final_weights(run))
    assert vitral.load(run.path).embed_files([photos / "ants" / "0.png"])[1].shape == (1, 16)
    tuned = vitral.train(
        photos, init_from=run.path, out=tmp_path / "tuned", epochs=1, batch_size=8, device="cpu", threads=1,
        **dict[str, Any]({"data.validation": 0.0}),
    )  # fmt: skip
    assert tuned.model_config.classes == ("ants", "bees")


def test_student_approaches_its_teacher(tmp_path: Path, photos: Path, teacher: Path) -> None:
    run = distill(photos, tmp_path / "run", teacher, epochs=25, **CENTRAL, **dict[str, Any]({"optim.lr": 1e-2}))
    first, *_, last = run.load_metrics()
    assert last["train_cosine"] > first["train_cosine"] + 0.3
    assert last["train_loss"] < first["train_loss"]


@pytest.mark.parametrize(
    ("overrides", "after"),
    [
        (CENTRAL, [2]),
        ({"pretrain.views.global_views": 2, "grad_accum": 2}, [1, 6]),
        pytest.param({}, [2], marks=pytest.mark.slow),
        pytest.param({}, [1, 6], marks=pytest.mark.slow),
        pytest.param(CENTRAL, [1, 6], marks=pytest.mark.slow),
        pytest.param({"pretrain.views.global_views": 2, "grad_accum": 2}, [2], marks=pytest.mark.slow),
    ],
)
def test_interrupted_distillation_resumes_bit_for_bit(
    tmp_path: Path, photos: Path, teacher: Path, overrides: dict[str, Any], after: list[int]
) -> None:
    whole = distill(photos, tmp_path / "whole", teacher, **overrides)
    with pytest.raises(Interrupted) as error:
        distill(photos, tmp_path / "parts", teacher, RaiseSigint(after[0]), **overrides)
    assert "vitral distill --resume" in error.value.hint
    for steps in after[1:]:
        with pytest.raises(Interrupted):
            resume(tmp_path / "parts", RaiseSigint(steps))
        torch.rand(7)
    parts = resume(tmp_path / "parts")
    assert identical(final_weights(whole), final_weights(parts))
    assert metrics_without_timing(whole) == metrics_without_timing(parts)


def test_cached_features_give_the_bits_of_computed_ones(tmp_path: Path, photos: Path, teacher: Path) -> None:
    """Computed and stored, read from the cache, and computed again for a damaged file."""
    messages = RecordMessages()
    first = distill(photos, tmp_path / "first", teacher, messages, **CENTRAL)
    assert messages.messages == ["Computing the teacher's features of 16 images"]
    messages = RecordMessages()
    second = distill(photos, tmp_path / "second", teacher, messages, **CENTRAL)
    assert messages.messages == []
    (file,) = (cache_dir() / FOLDER).iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    third = distill(photos, tmp_path / "third", teacher, **CENTRAL)
    weights = final_weights(first)
    assert identical(weights, final_weights(second))
    assert identical(weights, final_weights(third))


def test_features_of_every_step_are_the_cached_ones_up_to_rounding(tmp_path: Path, photos: Path, teacher: Path) -> None:
    """Matrix multiplications of batches of other sizes may add in another order."""
    cached = distill(photos, tmp_path / "cached", teacher, **CENTRAL)
    computed = distill(
        photos, tmp_path / "computed", teacher, **CENTRAL, **dict[str, Any]({"pretrain.distill.cache": 0.0})
    )
    for one, other in zip(cached.load_metrics(), computed.load_metrics(), strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)
        assert one["train_cosine"] == pytest.approx(other["train_cosine"], abs=1e-5)


def test_features_that_exceed_the_limit_are_computed_in_every_step(tmp_path: Path, photos: Path, teacher: Path) -> None:
    messages = RecordMessages()
    distill(photos, tmp_path / "run", teacher, messages, **CENTRAL, **{"pretrain.distill.cache": 1e-9})
    assert messages.messages[0].startswith("Teacher features are computed in every step: all of them need")
    assert not (cache_dir() / FOLDER).exists()


def test_checkpoint_does_not_contain_the_teacher_and_refuses_another_one(
    tmp_path: Path, photos: Path, teacher: Path
) -> None:
    with pytest.raises(Interrupted):
        distill(photos, tmp_path / "run", teacher, RaiseSigint(2))
    saved = load_newest_checkpoint(Run(tmp_path / "run"))
    teacher_shapes = {tuple(tensor.shape) for tensor in vitral.weights.read(teacher).state.values()}
    assert (48, 24) not in {tuple(tensor.shape) for tensor in saved["model"].values()}
    assert (24, 48) in teacher_shapes
    assert len(saved["teacher_sha256"]) == 64
    save_teacher(teacher, seed=1)
    with pytest.raises(VitralError, match=r"the weights of the teacher .* have changed"):
        resume(tmp_path / "run")


def test_cnn_is_a_teacher(tmp_path: Path, photos: Path) -> None:
    torch.manual_seed(0)
    cnn = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    run = distill(photos, tmp_path / "run", cnn)
    assert 'teacher = "python:Sequential"' in run.recipe_file.read_text()
    assert len(run.load_metrics()) == 3


def test_predictor_is_a_teacher(tmp_path: Path, photos: Path, teacher: Path) -> None:
    """By the name of its folder; or its network, if a checkpoint of another library was read."""
    named = distill(photos, tmp_path / "named", teacher, epochs=1)
    loaded = distill(photos, tmp_path / "loaded", vitral.load(teacher), epochs=1)
    assert f'teacher = "{teacher}"' in loaded.recipe_file.read_text()
    weights.convert(teacher, tmp_path / "timm.safetensors", "timm")
    preprocessing = vitral.load(teacher).model_config.preprocessing
    options = CheckpointOptions(heads=TEACHER.heads, mean=preprocessing.mean, std=preprocessing.std, crop=1.0)
    predictor = vitral.load(tmp_path / "timm.safetensors", options=options)
    converted = distill(photos, tmp_path / "converted", predictor, epochs=1)
    assert 'teacher = "python:ViT"' in converted.recipe_file.read_text()
    assert weight_bytes(named.path) == weight_bytes(loaded.path) == weight_bytes(converted.path)


def test_function_with_a_feature_map_is_a_teacher_and_is_passed_again_to_resume(tmp_path: Path, photos: Path) -> None:
    def blocks(images: torch.Tensor) -> torch.Tensor:
        assert images.shape[1:] == (1, 8, 8)
        return nn.functional.unfold(images, 2, stride=2).unflatten(2, (4, 4))

    arguments: dict[str, Any] = {
        "teacher_preprocessing": Preprocessing(image_size=(8, 8), channels=1, mean=(0.5,), std=(0.5,)),
        **CENTRAL,
    }
    whole = distill(photos, tmp_path / "whole", blocks, **arguments)
    with pytest.raises(Interrupted):
        distill(photos, tmp_path / "parts", blocks, RaiseSigint(5), **arguments)
    with pytest.raises(VitralError, match="the teacher of this recipe is a Python object, blocks"):
        resume(tmp_path / "parts")
    preprocessing = arguments["teacher_preprocessing"]
    parts = resume(tmp_path / "parts", teacher=blocks, teacher_preprocessing=preprocessing)
    assert weight_bytes(whole.path) == weight_bytes(parts.path)
    assert not (cache_dir() / FOLDER).exists()  # its weights are unknown


def test_sequence_of_images(tmp_path: Path, teacher: Path) -> None:
    images = [np.random.default_rng(seed).integers(0, 255, (20, 24, 3), dtype=np.uint8) for seed in range(8)]
    assert len(distill(images, tmp_path / "run", teacher, epochs=1).load_metrics()) == 1


def test_student_gets_the_input_of_its_teacher(tmp_path: Path, photos: Path) -> None:
    teacher = save_teacher(tmp_path / "other", replace(TEACHER, image_size=(24, 24)))
    overrides = {name: value for name, value in TINY_RUN.items() if name != "model.image_size"}
    vitral.distill(photos, teacher=teacher, out=tmp_path / "run", **{**overrides, "epochs": 1})
    preprocessing = vitral.load(tmp_path / "run").model_config.preprocessing
    assert preprocessing.image_size == (32, 32)  # patches of 16 in the recipe: the next multiple of 24
    assert preprocessing.mean == (0.5, 0.5, 0.5)
    assert preprocessing.std == (0.25, 0.25, 0.25)


def test_notes_tell_what_is_converted(
    tmp_path: Path, photos: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vitral.distill(
        photos, teacher=teacher, out=tmp_path / "run", quiet=False,
        **{**TINY_RUN, "epochs": 1, "model.image_size": (32, 32), "model.width": 32, "data.mean": (0.4,) * 3},
    )  # fmt: skip
    printed = " ".join(capsys.readouterr().out.split())
    assert "views are converted for the teacher: 16x16 pixels, mean 0.5 0.5 0.5, std 0.25 0.25 0.25" in printed
    assert "the student is wider than its teacher (32 and 24): a projection adapts it" in printed


def test_teacher_without_patch_features_is_a_note(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def brightness(images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(2, 3))

    vitral.distill(photos, teacher=brightness, out=tmp_path / "run", quiet=False, **{**TINY_RUN, "epochs": 1})
    assert "the teacher has no patch features: only its pooled features are learned" in capsys.readouterr().out


@pytest.mark.parametrize("overrides", [{}, CENTRAL])
def test_teacher_that_returns_nan_is_refused(tmp_path: Path, photos: Path, overrides: dict[str, Any]) -> None:
    with pytest.raises(VitralError, match="gives 16 of 16 images features that are NaN or infinite"):
        distill(photos, tmp_path / "run", lambda images: images.flatten(1) * float("nan"), **overrides)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"images": None}, "no images to learn from"),
        ({"teacher": None}, "no teacher to learn from"),
        ({"teacher": "nowhere"}, "nowhere"),
        ({"teacher": 3}, "a teacher of type int cannot be called"),
        ({"recipe": "pretrain-small"}, "the recipe pretrain-small has no teacher"),
        ({"recipe": "folder-scratch"}, "the recipe folder-scratch has no teacher"),
        ({"batch_size": 17}, "has 16 images, fewer than the batch size of 17"),
    ],
)
def test_errors_are_two_lines(
    tmp_path: Path, photos: Path, teacher: Path, arguments: dict[str, Any], message: str
) -> None:
    options = {"images": photos, "teacher": teacher, "out": tmp_path / "run", **TINY_RUN, **arguments}
    with pytest.raises(VitralError, match=message) as error:
        vitral.distill(options.pop("images"), **options)
    assert error.value.hint
    assert not (tmp_path / "run").exists()


def test_empty_folder_and_mixed_channels_are_refused(tmp_path: Path, photos: Path, teacher: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(VitralError):
        distill(tmp_path / "empty", tmp_path / "run", teacher)
    (tmp_path / "bands").mkdir()
    for index in range(4):
        np.save(tmp_path / "bands" / f"{index}.npy", np.zeros((5, 16, 16), np.uint16))
    with pytest.raises(VitralError, match="different channels or types"):
        distill([photos, tmp_path / "bands"], tmp_path / "run", teacher)
    with pytest.raises(VitralError, match="the teacher expects 3 channels, and the images have 5"):
        distill(tmp_path / "bands", tmp_path / "run", teacher)


def test_grey_images_and_an_rgb_teacher(tmp_path: Path, teacher: Path) -> None:
    photos = save_photos(tmp_path / "grey", mode="L")
    run = distill(
        photos,
        tmp_path / "run",
        teacher,
        **dict[str, Any]({"model.channels": 1, "data.mean": (0.5,), "data.std": (0.3,)}),
    )
    assert len(run.load_metrics()) == 3


def test_runs_of_other_commands_are_not_resumed(tmp_path: Path, photos: Path, teacher: Path) -> None:
    run = distill(photos, tmp_path / "run", teacher, epochs=1)
    for resume_other in (vitral.pretrain, vitral.train):
        with pytest.raises(VitralError, match="is a run of vitral distill") as error:
            resume_other(resume=run.path)
        assert "vitral distill --resume" in error.value.hint
    for learn in (vitral.pretrain, vitral.train):
        with pytest.raises(VitralError, match="the recipe distill learns") as error:
            learn(photos, recipe="distill")
        assert "vitral distill IMAGES --teacher MODEL" in error.value.hint
    atomic_write(run.recipe_file, get_recipe("pretrain").to_toml())
    with pytest.raises(VitralError, match="is not a run of vitral distill") as error:
        vitral.distill(resume=run.path)
    assert "vitral pretrain --resume" in error.value.hint


@pytest.mark.parametrize("sizes", [(24, 16), (16, 40)])
def test_images_need_not_be_square(tmp_path: Path, photos: Path, teacher: Path, sizes: tuple[int, int]) -> None:
    assert distill(photos, tmp_path / "run", teacher, epochs=1, **dict[str, Any]({"model.image_size": sizes})).has_model


@pytest.mark.parametrize("resize", ["pad", "native"])
@pytest.mark.parametrize("augment", [True, False])
def test_other_ways_to_resize(tmp_path: Path, teacher: Path, resize: str, augment: bool) -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (16, 16 + 8 * (index % 2), 3), dtype=np.uint8) for index in range(16)]
    overrides: dict[str, Any] = {"data.resize": resize, "pretrain.distill.augment": augment, "epochs": 1}
    assert distill(images, tmp_path / "run", teacher, **overrides).has_model
