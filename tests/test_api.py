"""The same from Python."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import vitral
from vitral import api_train as making
from vitral.data import datasets
from vitral.errors import VitralError
from vitral.evaluation import evaluate as judge
from vitral.recipes.builtin import RECIPES, named
from vitral.training import setup as plan

TINY = {"epochs": 1, "model.depth": 1, "model.width": 32}


def test_train_load_and_predict_in_three_lines(tmp_path):
    model = vitral.train("digits", out=tmp_path / "run", **TINY)
    answer = model.predict(tmp_path / "run" / "figures" / "example.png")
    again = vitral.load(tmp_path / "run").predict(tmp_path / "run" / "figures" / "example.png")
    assert answer.best == again.best
    assert 0 < answer.best.probability <= 1


@pytest.mark.usefixtures("no_pictures")
def test_training_says_nothing_unless_asked(tmp_path, capsys):
    vitral.train("digits", out=tmp_path / "run", **TINY)
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("no_pictures")
def test_the_test_set_is_not_read_before_training_is_over(tmp_path, monkeypatch):
    order = []
    digits = datasets.load("digits")

    def read_test():
        order.append("test")
        return digits.test

    monkeypatch.setattr(plan, "load", lambda *_, **__: replace(digits, read_test=read_test))
    fit = making.fit
    monkeypatch.setattr(making, "fit", lambda *a, **k: (fit(*a, **k), order.append("trained"))[0])
    vitral.train("digits", out=tmp_path / "run", **TINY)
    assert order == ["trained", "test"]


@pytest.mark.usefixtures("no_pictures")
def test_evaluate_gives_what_training_wrote_down(tmp_path):
    vitral.train("digits", out=tmp_path / "run", **TINY)
    metrics = vitral.evaluate(tmp_path / "run")
    assert {"split": "test"} | metrics.as_dict() == json.loads((tmp_path / "run" / "test.json").read_text())


@pytest.mark.usefixtures("no_pictures")
def test_a_set_with_other_classes_is_refused(tmp_path, monkeypatch):
    vitral.train("digits", out=tmp_path / "run", **TINY)
    digits = datasets.load("digits")
    other = replace(digits, name="letters", classes=("7s", *"bcdefghij"))
    monkeypatch.setattr(judge, "load_dataset", lambda *_, **__: other)
    with pytest.raises(VitralError, match="letters has classes that the model does not know: 7s, b, ") as refused:
        vitral.evaluate(tmp_path / "run", data="letters")
    assert refused.value.hint.startswith("did you mean 7s → 7? The model knows 0, 1, ")


@pytest.mark.usefixtures("no_pictures")
def test_the_written_recipe_repeats_the_run_bit_for_bit(tmp_path):
    vitral.train("digits", out=tmp_path / "a", **TINY)
    vitral.train(recipe=tmp_path / "a" / "recipe.toml", out=tmp_path / "b")
    first, second = ((tmp_path / name / "model" / "weights.safetensors").read_bytes() for name in "ab")
    assert first == second


def test_unknown_settings_are_refused_with_the_nearest(tmp_path):
    with pytest.raises(VitralError, match=r"no field 'optim\.lrr'\. Did you mean lr\?"):
        vitral.train("digits", out=tmp_path / "run", **{"optim.lrr": 1.0})


def test_resume_takes_no_other_settings(tmp_path):
    with pytest.raises(VitralError, match="takes no data"):
        vitral.train("digits", resume=tmp_path)


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_fits_the_set_it_names(name):
    recipe = named(name)
    if not name.startswith("folder-") and not recipe.data.name.startswith(
        "imagenet"
    ):  # the papers' sets: folders of yours
        assert recipe.data.name in datasets.KNOWN
        assert recipe.model.classes == len(datasets.CLASSES[recipe.data.name])


@pytest.mark.usefixtures("no_pictures")
def test_the_demo_falls_back_to_the_digits_and_says_why(tmp_path, monkeypatch, capsys):
    load = datasets.load

    def offline(name, **more):
        if name == "mnist":
            raise VitralError("mnist cannot be had: no route to host", "try later")
        return load(name, **more)

    monkeypatch.setattr(making, "load_dataset", offline)
    quick = named("digits").changed(TINY)
    monkeypatch.setitem(RECIPES, "digits", lambda: quick)
    vitral.demo(out=tmp_path / "run", quiet=False)
    printed = capsys.readouterr().out
    assert "no route to host" in printed
    assert "scikit-learn's digits instead" in printed
    assert "Next:" in printed
    assert "Of 359 of these test images yours has" in printed
    assert (tmp_path / "run" / "figures" / "box.png").is_file()


@pytest.mark.usefixtures("no_pictures")
def test_normalisation_is_measured_on_the_training_images_and_travels_with_the_model(tmp_path):
    model = vitral.train("digits", out=tmp_path / "run", **TINY)
    pixels = datasets.load("digits").train.images.double() / 255
    assert model.card.preprocessing.mean[0] == pytest.approx(pixels.mean().item(), abs=1e-4)
    assert model.card.preprocessing.std[0] == pytest.approx(pixels.std(correction=0).item(), abs=1e-4)


def test_a_bare_model_is_a_torch_module():
    model = vitral.ViT.from_preset("Ti/16", classes=7, depth=1)
    assert model(torch.rand(1, 3, 224, 224)).shape == (1, 7)


def test_a_folder_that_is_taken_is_refused_before_anything_is_fetched(tmp_path, monkeypatch):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    monkeypatch.setattr(plan, "load", lambda *_, **__: pytest.fail("data was asked for"))
    with pytest.raises(VitralError, match="already exists and is not empty"):
        vitral.train("mnist", out=tmp_path / "taken")


def test_pictures_that_cannot_be_written_cost_no_result(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(making, "draw", full)
    with pytest.raises(VitralError, match="No space left on device") as caught:
        vitral.train("digits", out=tmp_path / "run", **TINY)
    assert "the model is whole" in caught.value.hint
    assert vitral.evaluate(tmp_path / "run").images == 359


@pytest.mark.usefixtures("no_pictures")
def test_a_changed_recipe_is_noticed_on_resume(tmp_path):
    vitral.train("digits", out=tmp_path / "run", **TINY)
    (tmp_path / "run" / "test.json").unlink()
    recipe = tmp_path / "run" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("epochs = 1\n", "epochs = 2\n"))
    with pytest.raises(VitralError, match=r"does not fit .*recipe\.toml"):
        vitral.train(resume=tmp_path / "run")


def test_the_next_commands_can_be_typed_as_they_stand(monkeypatch):
    monkeypatch.setattr("sys.argv", [".venv/bin/vitral", "demo"])
    monkeypatch.setenv("PATH", "")
    assert making.command() == ".venv/bin/vitral"
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/vitral")
    assert making.command() == "vitral"
