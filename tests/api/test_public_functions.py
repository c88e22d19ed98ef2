"""The public Python functions, end to end on small models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import vitral
from vitral.data import datasets
from vitral.data.datasets import Split
from vitral.errors import VitralError
from vitral.recipes.builtin import RECIPES, get_recipe
from vitral.reporting.terminal.training import vitral_command
from vitral.runs.run import Run
from vitral.training.trainer import Trainer

TINY: dict[str, Any] = {"epochs": 1, "model.depth": 1, "model.width": 32}


def test_train_load_and_predict_in_three_lines(tmp_path: Path) -> None:
    model = vitral.train("digits", out=tmp_path / "run", **TINY)
    image = tmp_path / "run" / "figures" / "example.png"
    prediction = model.predict(image)
    assert prediction.best == vitral.load(tmp_path / "run").predict(image).best
    assert 0 < prediction.best.probability <= 1
    figures = {file.name for file in (tmp_path / "run" / "figures").iterdir()}
    expected = {
        "augmented.png",
        "curves.png",
        "confusion.png",
        "attention.png",
        "attention_overview.png",
        "example.png",
    }
    assert figures == expected
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.usefixtures("no_figures")
def test_validation_images_are_cropped_once_before_calibration(tmp_path: Path) -> None:
    overrides: dict[str, Any] = TINY | {"data.crop": 0.8}
    model = vitral.train("digits", out=tmp_path / "run", **overrides)
    after_training = model.model_config.calibration
    assert vitral.calibrate(tmp_path / "run") == after_training


@pytest.mark.usefixtures("no_figures")
def test_training_is_quiet_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vitral.train("digits", out=tmp_path / "run", **TINY)
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("no_figures")
def test_the_terminal_output_summarises_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vitral.train("digits", out=tmp_path / "run", quiet=False, **TINY)
    output = capsys.readouterr().out
    for text in (
        f"vitral {vitral.__version__}",
        "Data      digits: 1,294 train, 144 validation",
        "Model     ViT 8x8/2, width 32, depth 1, heads 4",
        "Recipe    digits: AdamW, lr 0.006, 1 epoch, batch size 64",
        "Hardware  ",
        f"Run       {tmp_path / 'run'}",
        "Epoch   Train loss     Acc.   Val. loss     Acc.    Images/s   Remaining",
        "   best\n",
        "Test accuracy   ",
        "359 images",
        "Most confused     ",
        "Next steps\n",
    ):
        assert text in output


@pytest.mark.usefixtures("no_figures")
def test_an_accuracy_with_tta_is_named_as_such_next_to_that_of_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vitral.train("digits", out=tmp_path / "run", quiet=False, tta="flip", **TINY)
    output = capsys.readouterr().out
    plain = vitral.evaluate(tmp_path / "run").headline.accuracy
    values = json.loads((tmp_path / "run" / "test.json").read_text())
    assert values["tta"] == "flip"
    assert values["accuracy_without_tta"] == {"value": plain.value, "low": plain.low, "high": plain.high}
    assert values["top1"] != plain.value, "mirror images of digits change predictions"
    interval = f"95% CI {100 * plain.low:.2f}-{plain.high:.2%}"
    with_tta = "This is with test-time augmentation (logits averaged over the image and its mirror image)."
    without_tta = f"predict, evaluate and serve do not use it: {plain.value:.2%} ({interval})."
    assert f"{with_tta}\n                {without_tta}\n" in output


@pytest.mark.usefixtures("no_figures")
def test_the_test_set_is_read_only_after_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    digits = datasets.load_builtin_dataset("digits")
    export = Trainer.export_best_model

    def load_test() -> Split:
        events.append("test set read")
        return digits.test

    def record_export(self: Trainer) -> None:
        export(self)
        events.append("model exported")

    monkeypatch.setattr(
        "vitral.training.setup.load_builtin_dataset", lambda *_, **__: replace(digits, load_test=load_test)
    )
    monkeypatch.setattr(Trainer, "export_best_model", record_export)
    vitral.train("digits", out=tmp_path / "run", **TINY)
    assert events[:2] == ["model exported", "test set read"]


@pytest.mark.usefixtures("no_figures")
def test_evaluate_reproduces_the_evaluation_after_training(tmp_path: Path) -> None:
    vitral.train("digits", out=tmp_path / "run", **TINY)
    evaluation = vitral.evaluate(tmp_path / "run")
    assert json.loads(json.dumps(evaluation.as_dict())) == json.loads((tmp_path / "run" / "test.json").read_text())


def test_an_unknown_field_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    misspelt: dict[str, Any] = {"optim.lrr": 1.0}
    with pytest.raises(VitralError, match=r"no field named 'optim\.lrr'\. Did you mean 'lr'\?"):
        vitral.train("digits", out=tmp_path / "run", **misspelt)


@pytest.mark.usefixtures("no_figures")
def test_the_demo_falls_back_to_digits_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = datasets.load_builtin_dataset

    def offline(name: str, **options: Any) -> datasets.Dataset:
        if name == "mnist":
            raise VitralError("cannot download mnist: no route to host", "Try again later")
        return load(name, **options)

    monkeypatch.setattr("vitral.api.training.load_builtin_dataset", offline)
    quick = get_recipe("digits").with_overrides(TINY)
    monkeypatch.setitem(RECIPES, "digits", lambda: quick)
    vitral.demo(out=tmp_path / "run", quiet=False)
    output = capsys.readouterr().out
    assert "no route to host" in output
    assert "Using scikit-learn's digits instead" in output
    assert "Next steps" in output
    assert "of 359 correct with your model" in output
    assert (tmp_path / "run" / "figures" / "bundled.png").is_file()


@pytest.mark.usefixtures("no_figures")
def test_the_normalisation_of_the_training_set_is_stored_with_the_model(tmp_path: Path) -> None:
    model = vitral.train("digits", out=tmp_path / "run", **TINY)
    pixels = datasets.load_builtin_dataset("digits").train.images[:].double() / 255
    assert model.model_config.preprocessing.mean[0] == pytest.approx(pixels.mean().item(), abs=1e-4)
    assert model.model_config.preprocessing.std[0] == pytest.approx(pixels.std(correction=0).item(), abs=1e-4)


def test_a_model_can_be_built_from_a_preset() -> None:
    model = vitral.ViT.from_preset("Ti/16", num_classes=7, depth=1)
    assert model(torch.rand(1, 3, 224, 224)).shape == (1, 7)


def test_an_existing_out_folder_is_refused_before_data_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    monkeypatch.setattr("vitral.training.setup.load_builtin_dataset", lambda *_, **__: pytest.fail("data was loaded"))
    with pytest.raises(VitralError, match="already exists and is not empty"):
        vitral.train("mnist", out=tmp_path / "taken")


def test_figures_that_cannot_be_written_do_not_lose_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vitral.reporting.run_report.write_figures", no_space)
    with pytest.raises(VitralError, match="No space left on device") as error:
        vitral.train("digits", out=tmp_path / "run", **TINY)
    assert "The model is complete" in error.value.hint
    assert vitral.evaluate(tmp_path / "run").images == 359


@pytest.mark.usefixtures("no_figures")
def test_a_changed_recipe_is_refused_on_resume(tmp_path: Path) -> None:
    vitral.train("digits", out=tmp_path / "run", **TINY)
    run = Run(tmp_path / "run")
    run.write_environment({key: value for key, value in run.load_environment().items() if key != "finished"})
    recipe = tmp_path / "run" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("epochs = 1\n", "epochs = 2\n"))
    with pytest.raises(VitralError, match=r"does not match .*recipe\.toml"):
        vitral.train(resume=tmp_path / "run")


def test_printed_commands_name_the_program_as_the_shell_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [".venv/bin/vitral", "demo"])
    monkeypatch.setenv("PATH", "")
    assert vitral_command() == ".venv/bin/vitral"
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/vitral")
    assert vitral_command() == "vitral"


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_data_may_be_a_path(tmp_path: Path) -> None:
    for name in ("0", "1"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(12):
            pixels = torch.randint(0, 256, (8, 8), dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    data = tmp_path / "photos"
    model = vitral.train(data, out=tmp_path / "run", recipe="digits", **TINY)
    assert vitral.evaluate(model, data=data).images == 24
    comparison = vitral.compare_models(model, model, data=data)
    assert (comparison.images, comparison.noun) == (24, "images")
    assert vitral.report(model, data=data, ood=data / "0", fast=True, out=tmp_path / "report.html").is_file()
    assert vitral.probe(data, model).rows
    assert vitral.bench(model, data=data, threads=[1], batch_sizes=[1], seconds=0.01).images
    assert vitral.find_lr(data, recipe="digits", **TINY).suggestion > 0
