"""`vitral.pretrain`: from images to a run folder and a model that other functions take."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitral
from support.common import identical
from support.pretrain_runs import CENTER, METHODS, PRETRAIN_RECIPE, save_arrays, save_textures
from support.training import RaiseSigint, final_weights, load_newest_checkpoint, metrics_without_timing
from vitral import api
from vitral.api.pretraining import PretrainResult
from vitral.data.preprocess import Preprocessing
from vitral.errors import Interrupted, VitralError
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.schema import read_recipe
from vitral.runs.model_io import ModelConfig, save_model
from vitral.runs.run import Run
from vitral.training.pretraining.setup import resolve_pretrain_recipe, setup_pretraining

TINY: dict[str, Any] = {"batch_size": 8, "epochs": 2, "model.channels": 3}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_textures(tmp_path_factory.mktemp("photos"))


@pytest.fixture
def pretrain(photos: Path, tmp_path: Path) -> Any:
    def run(name: str = "run", images: Any = None, **overrides: Any) -> PretrainResult:
        images = str(photos) if images is None else images
        return vitral.pretrain(images, recipe=PRETRAIN_RECIPE, out=tmp_path / name, **{**TINY, **overrides})

    return run


@pytest.fixture(scope="module")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> PretrainResult:
    out = tmp_path_factory.mktemp("finished") / "run"
    return vitral.pretrain(str(photos), recipe=PRETRAIN_RECIPE, out=out, labels=str(photos), **TINY)


def test_the_run_folder_is_complete(finished: PretrainResult, photos: Path) -> None:
    run = Run.open(finished.run)
    assert run.is_finished
    assert [row["epoch"] for row in run.load_metrics()] == [1, 2]
    assert all("knn_top1" in row for row in run.load_metrics())
    assert run.load_environment()["data"]["name"] == str(photos)
    files = ["config.json", "training_images.npz", "weights.safetensors"]
    assert sorted(path.name for path in run.model_dir.iterdir()) == files


@pytest.mark.slow
def test_a_comparison_says_that_test_images_were_pretrained_on(finished: PretrainResult, photos: Path) -> None:
    result = vitral.compare_label_efficiency(str(photos), finished.run, fine_tuning=False, seeds=1, fractions=(1.0,))
    assert result.leaks["after"].count == result.test_images > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_recipe_repeats_the_run_bit_for_bit(pretrain: Any, tmp_path: Path, method: str, photos: Path) -> None:
    first = Run(pretrain("first", method=method, labels=str(photos)).run)
    second = Run(vitral.pretrain(recipe=first.recipe_file, out=tmp_path / "second").run)
    assert identical(final_weights(first), final_weights(second))
    assert metrics_without_timing(first) == metrics_without_timing(second)  # also the k-NN accuracy


def test_the_model_has_features_and_no_classifier(finished: PretrainResult, photos: Path) -> None:
    model, image = finished.model, next(photos.rglob("*.png"))
    assert model.features(torch.zeros(2, 3, 16, 16, dtype=torch.uint8)).shape == (2, 32)
    assert "features only" in repr(model)
    with pytest.raises(VitralError, match="has no classification head") as error:
        model.predict(image)
    assert "vitral train DATA --init-from" in error.value.hint
    assert "vitral embed" in error.value.hint
    explanation = model.explain(image)
    assert [heat.method.name for heat in explanation.heatmaps] == ["rollout"]
    assert explanation.prediction == ()
    with pytest.raises(VitralError, match="gradcam explains the logit of a class, but the model has no classifier"):
        model.explain(image, methods="gradcam")


@pytest.mark.parametrize("function", ["evaluate", "bench", "export", "report"])
def test_functions_that_need_predictions_refuse_it(finished: PretrainResult, function: str) -> None:
    with pytest.raises(VitralError, match="has no classification head"):
        getattr(api, function)(finished.run)


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_fine_tuning_starts_with_the_pretrained_weights(finished: PretrainResult, photos: Path, tmp_path: Path) -> None:
    vitral.train(
        str(photos), init_from=finished.run, out=tmp_path / "tuned", epochs=1, batch_size=8, device="cpu", threads=1,
        **dict[str, Any]({"optim.lr": 1e-12}),
    )  # fmt: skip
    pretrained, tuned = final_weights(Run(finished.run)), final_weights(Run(tmp_path / "tuned"))
    backbone = [name for name in pretrained if not name.startswith("head.")]
    assert all(torch.allclose(pretrained[name], tuned[name]) for name in backbone)


def test_a_sequence_of_images_can_be_learned_from(pretrain: Any) -> None:
    images = [np.random.default_rng(i).integers(0, 255, (20, 24, 3), dtype=np.uint8) for i in range(9)]
    result = pretrain(images=images, epochs=1)
    assert Run(result.run).is_finished


def test_several_sources(pretrain: Any, photos: Path, tmp_path: Path) -> None:
    more = save_textures(tmp_path / "more", count=8)
    result = pretrain(images=[str(photos), str(more)], epochs=1)
    environment = Run(result.run).load_environment()
    assert environment["data"]["name"] == f"{photos} + {more}"


@pytest.mark.parametrize("channels", [1, 5])
def test_pretraining_continues_from_a_checkpoint_with_other_channels_and_size(
    finished: PretrainResult, tmp_path: Path, channels: int
) -> None:
    folder = save_arrays(tmp_path / "arrays", channels)
    result = vitral.pretrain(
        str(folder), init_from=finished.run, out=tmp_path / "run", epochs=1, batch_size=4, device="cpu", threads=1,
        **dict[str, Any]({"model.image_size": (16, 24), "pretrain.lejepa.hidden_width": 16}),
    )  # fmt: skip
    config = result.model.model_config
    assert config.architecture.image_size == (16, 24)
    assert config.architecture.channels == config.preprocessing.channels
    assert config.preprocessing.channels == (channels if channels > 3 else 3)


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_a_tiny_learning_rate_keeps_the_weights_of_the_checkpoint(tmp_path: Path, photos: Path, pooling: Any) -> None:
    torch.manual_seed(5)
    config = ViTConfig(image_size=(16, 16), patch_size=8, num_classes=3, width=32, depth=1, heads=2, pooling=pooling)
    vit = ViT(config)
    model_config = ModelConfig(
        architecture=config,
        preprocessing=Preprocessing(image_size=(16, 16), channels=3, mean=(0.5,) * 3, std=(0.2,) * 3),
        classes=("a", "b", "c"),
        trained_on="photos",
        epoch=1,
    )
    save_model(tmp_path / "model", vit, model_config)
    result = vitral.pretrain(
        str(photos), init_from=tmp_path / "model", out=tmp_path / "run", epochs=1, batch_size=8, device="cpu",
        threads=1, **dict[str, Any]({"optim.lr": 1e-12, "pretrain.lejepa.hidden_width": 16}),
    )  # fmt: skip
    state = vit.state_dict()
    weights = final_weights(Run(result.run))
    assert all(torch.allclose(state[name], weights[name]) for name in state if not name.startswith("head."))


def test_a_finished_run_is_continued_with_its_heads_and_its_centre(pretrain: Any, photos: Path, tmp_path: Path) -> None:
    """Another run starts where the first one ended, and not only with its ViT. The method is that of the run."""
    first = Run(pretrain("first", epochs=1, **CENTER, checkpoint_epochs=5).run)
    second = vitral.pretrain(
        str(photos), init_from=first.path, out=tmp_path / "second", epochs=1, batch_size=8, device="cpu", threads=1,
        **dict[str, Any]({"optim.lr": 1e-12, "pretrain.dino.momentum": 0.0}),
    )  # fmt: skip
    saved, continued = (load_newest_checkpoint(run)["model"] for run in (first, Run(second.run)))
    heads = [name for name in saved if name.startswith("student.") and ".vit." not in name]
    assert {"student.prototypes.weight", "student.mask_token", "student.head.0.weight"} <= {*heads}
    assert all(torch.allclose(saved[name], continued[name], atol=1e-6) for name in heads)


@pytest.mark.parametrize(
    ("changes", "steps_before", "note"),
    [
        ({"optim.lr": 1e-5, "optim.warmup": 0.5}, 3, "the optimizer continues with its moments"),
        ({"optim.layer_decay": 0.9}, 0, "the optimizer starts again: optim.layer_decay was 1.0"),
        ({"optim.weight_decay": 0.2}, 0, "the optimizer starts again: optim.weight_decay was"),
        ({"model.image_size": (16, 24), "keep_image_size": True}, 0, None),
    ],
)
def test_the_optimizer_continues_if_its_settings_are_those_of_the_run(
    pretrain: Any, tmp_path: Path, changes: dict[str, Any], steps_before: int, note: str | None
) -> None:
    """AdamW counts its steps; the learning rate is that of the new run. A resumed run continues its own moments."""
    first = Run(pretrain("first", epochs=1, checkpoint_epochs=1).run)
    recipe = read_recipe(first.recipe_file).with_overrides({"init_from": str(first.path), **changes})
    notes = setup_pretraining(recipe).notes
    about_optimizer = [line for line in notes if line.startswith("the optimizer")]
    assert [line.startswith(note or "?") for line in about_optimizer] == [True] * (note is not None)
    with pytest.raises(Interrupted):
        vitral.pretrain(recipe=recipe, out=tmp_path / "second", callbacks=[RaiseSigint(1)])
    second = Run(tmp_path / "second")
    state = load_newest_checkpoint(second)["optimizers"][-1]
    assert {int(values["step"]) for values in state["state"].values()} == {steps_before + 1}
    assert {group["weight_decay"] for group in state["param_groups"]} <= {0.0, recipe.optim.weight_decay}
    vitral.pretrain(resume=second.path)
    state = load_newest_checkpoint(second)["optimizers"][-1]
    assert {int(values["step"]) for values in state["state"].values()} == {steps_before + 3}


def test_what_is_continued_depends_on_method_sizes_and_weights(pretrain: Any) -> None:
    first = Run(pretrain("first", epochs=1, method="dino").run)
    recipe = read_recipe(first.recipe_file).with_overrides({"init_from": str(first.path)})
    setup = setup_pretraining(recipe)
    saved = load_newest_checkpoint(first)["model"]
    assert setup.method_state is not None
    assert identical(setup.method_state, saved)
    assert f"the heads of the method continue those of {first.path}" in setup.notes
    larger = setup_pretraining(recipe.with_overrides({"model.image_size": (16, 24), "keep_image_size": True}))
    assert larger.method_state is not None  # the positions are resampled, so both encoders start from them
    assert {*larger.method_state} == {name for name in saved if ".vit." not in name}
    for change, reason in (
        ({"pretrain.dino.prototypes": 8}, "have other sizes"),
        ({"pretrain.method": "moco"}, "was trained with dino"),
    ):
        other = setup_pretraining(recipe.with_overrides(change))
        assert other.method_state is None
        assert any(note.startswith("the heads of the method are new") and reason in note for note in other.notes)


@pytest.mark.parametrize("inner", ["", "model", "model/weights.safetensors"])
def test_model_folder_and_weights_inside_a_run_are_continued_like_the_run(
    pretrain: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: str
) -> None:
    run = Run(pretrain("first", epochs=1, method="moco").run)
    source = run.path / inner
    recipe = resolve_pretrain_recipe([str(photos)], None, str(source)).with_overrides({"batch_size": 8})
    assert recipe.pretrain is not None
    assert recipe.pretrain.method == "moco"
    assert f"the heads of the method continue those of {run}" in setup_pretraining(recipe).notes
    monkeypatch.chdir(source if source.is_dir() else source.parent)
    relative = resolve_pretrain_recipe([str(photos)], None, "." if source.is_dir() else source.name)
    assert relative.pretrain == recipe.pretrain
    notes = setup_pretraining(relative.with_overrides({"batch_size": 8})).notes
    up = {"": ".", "model": "..", "model/weights.safetensors": ".."}[inner]
    assert f"the heads of the method continue those of {up}" in notes


def test_model_without_its_run_says_which_method_continues_it(pretrain: Any, photos: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(pretrain("first", epochs=1, method="moco").run / "model", tmp_path / "copy")
    recipe = resolve_pretrain_recipe([str(photos)], None, str(folder)).with_overrides({"batch_size": 8})
    (note,) = [note for note in setup_pretraining(recipe).notes if note.startswith("the heads of the method are new")]
    assert note.endswith(f"{folder} is a model without its run, which names its method; --method is lejepa")


def test_unknown_options_of_the_comparison_are_refused_before_the_training(
    pretrain: Any, photos: Path, tmp_path: Path
) -> None:
    with pytest.raises(VitralError, match="no field named 'epoch'"):
        pretrain(judge=str(photos), judge_options={"seeds": 2, "epoch": 1})
    assert not (tmp_path / "run").exists()


def test_an_interruption_names_the_command_that_also_judges(pretrain: Any, photos: Path, tmp_path: Path) -> None:
    command = f"Resume it with: vitral pretrain --resume {tmp_path / 'run'} --judge {photos}"
    with pytest.raises(Interrupted) as stop:
        pretrain(judge=str(photos), callbacks=[RaiseSigint(1)])
    assert stop.value.hint == command
    with pytest.raises(Interrupted) as stop:
        vitral.pretrain(resume=tmp_path / "run", judge=photos, judge_options={"seeds": 2}, callbacks=[RaiseSigint(1)])
    assert stop.value.hint == f"{command}, and the same --judge flags"


@pytest.mark.slow
def test_a_resumed_run_keeps_its_labels(pretrain: Any, photos: Path, tmp_path: Path) -> None:
    run = Run(pretrain(labels=str(photos), **CENTER, keep_checkpoints=9, checkpoint_epochs=1).run)
    reference, rows = final_weights(run), metrics_without_timing(run)
    max(run.checkpoint_dir.glob("step-*.pt")).unlink()
    (run.model_dir / "config.json").unlink()
    resumed = Run(vitral.pretrain(resume=run.path).run)
    assert identical(final_weights(resumed), reference)
    assert metrics_without_timing(resumed) == rows


def test_a_finished_run_is_not_changed(finished: PretrainResult) -> None:
    before = (finished.run / "metrics.jsonl").read_bytes()
    result = vitral.pretrain(resume=finished.run)
    assert (finished.run / "metrics.jsonl").read_bytes() == before
    assert result.run == finished.run


def test_train_and_pretrain_refuse_runs_and_recipes_of_each_other(finished: PretrainResult, photos: Path) -> None:
    with pytest.raises(VitralError, match="is a run of vitral pretrain") as error:
        vitral.train(resume=finished.run)
    assert f"vitral pretrain --resume {finished.run}" in error.value.hint
    for start in ({"recipe": finished.run / "recipe.toml"}, {"data": str(photos), "recipe": "pretrain-small"}):
        with pytest.raises(VitralError, match="learns without labels") as error:
            vitral.train(**start)
        assert "vitral pretrain" in error.value.hint
    with pytest.raises(VitralError, match="the recipe digits learns labels"):
        vitral.pretrain(str(photos), recipe="digits")


@pytest.mark.parametrize(
    "given",
    [{"images": "photos"}, {"images": Path("photos")}, {"preset": "Ti/16"}, {"recipe": "pretrain"}, {"out": "x"}],
)
def test_a_resumed_run_keeps_its_images_and_recipe(finished: PretrainResult, given: dict[str, Any]) -> None:
    with pytest.raises(VitralError, match="a resumed run keeps its images, recipe and folder"):
        vitral.pretrain(resume=finished.run, **given)
    with pytest.raises(VitralError, match="epochs cannot be changed"):
        vitral.pretrain(resume=finished.run, epochs=9)


def test_a_resumed_run_keeps_its_micro_batches(finished: PretrainResult) -> None:
    """LeJEPA compares the images of a micro-batch."""
    with pytest.raises(VitralError, match="grad_accum cannot be changed"):
        vitral.pretrain(resume=finished.run, grad_accum=2)
    assert vitral.pretrain(resume=finished.run, grad_accum=1).run == finished.run


def test_files_can_be_left_out(pretrain: Any, photos: Path, tmp_path: Path) -> None:
    names = [str(path.relative_to(photos)) for path in sorted(photos.rglob("*.png"))[:4]]
    (tmp_path / "list.txt").write_text("\n".join(names))
    result = pretrain(epochs=1, exclude=tmp_path / "list.txt")
    assert Run(result.run).load_environment()["data"]["images"] == 20


@pytest.mark.parametrize("argument", ["labels", "judge"])
def test_labelled_images_have_a_name(pretrain: Any, argument: str) -> None:
    items = [(np.zeros((20, 20, 3), dtype=np.uint8), name) for name in ("ants", "bees")]
    with pytest.raises(VitralError, match=f"expected a name or path for {argument}, got an object of type list"):
        pretrain(**{argument: items})
