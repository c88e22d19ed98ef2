"""`Predictor.predict` takes one image, a batch, several images or a folder, and wrong use names the right call."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
import vitral.export as vitral_export
from support.models import save_random_model, smooth_photo
from vitral.data.datasets import Split
from vitral.data.decode import SUPPORTED_FORMATS, ImageDecodeError
from vitral.data.files.walk import SkipReason
from vitral.errors import VitralError
from vitral.inference.prediction import Prediction, Predictions
from vitral.inference.predictor import Predictor

NUM_PHOTOS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return Predictor.load(save_random_model(tmp_path_factory.mktemp("model")), device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for seed in range(NUM_PHOTOS):
        smooth_photo(seed).save(folder / f"{seed}.png")
    return folder


def batch_NHWC(folder: Path) -> np.ndarray[Any, Any]:
    return np.stack([np.asarray(Image.open(file)) for file in sorted(folder.iterdir())])


SEVERAL: dict[str, Callable[[Path], Any]] = {
    "folder": lambda folder: folder,
    "folder as a string": str,
    "list of paths": lambda folder: sorted(folder.iterdir()),
    "list of strings": lambda folder: [str(file) for file in sorted(folder.iterdir())],
    "list of a folder": lambda folder: [folder],
    "generator": lambda folder: (file for file in sorted(folder.iterdir())),
    "list of Pillow images": lambda folder: [Image.open(file) for file in sorted(folder.iterdir())],
    "list of bytes": lambda folder: [file.read_bytes() for file in sorted(folder.iterdir())],
    "list of arrays": lambda folder: list(batch_NHWC(folder)),
    "array (B, H, W, C)": batch_NHWC,
    "array (B, C, H, W)": lambda folder: batch_NHWC(folder).transpose(0, 3, 1, 2),
    "float array": lambda folder: batch_NHWC(folder) / 255,
    "tensor (B, C, H, W)": lambda folder: torch.from_numpy(batch_NHWC(folder)).permute(0, 3, 1, 2),
    "float tensor": lambda folder: torch.from_numpy(batch_NHWC(folder)).permute(0, 3, 1, 2) / 255,
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_images_give_the_predictions_of_each(model: Predictor, folder: Path, kind: str) -> None:
    predictions = model.predict(SEVERAL[kind](folder), top=2)
    assert isinstance(predictions, Predictions)
    expected = [model.predict(file, top=2) for file in sorted(folder.iterdir())]
    assert [[label.name for label in prediction.labels] for prediction in predictions] == [
        [label.name for label in prediction.labels] for prediction in expected
    ]
    for prediction, reference in zip(predictions, expected, strict=True):
        assert prediction.best.probability == pytest.approx(reference.best.probability, abs=1e-5)


def test_one_image_gives_one_prediction(model: Predictor, folder: Path) -> None:
    file = folder / "0.png"
    for image in (file, str(file), file.read_bytes(), Image.open(file), batch_NHWC(folder)[0]):
        assert isinstance(model.predict(image), Prediction)
    assert isinstance(model.predict([file]), Predictions), "a list of one is several"


def test_an_unreadable_image_among_several_has_an_error(model: Predictor, folder: Path) -> None:
    predictions = model.predict([folder / "0.png", folder / "gone.png"])
    assert [prediction.error is None for prediction in predictions] == [True, False]


def test_one_unreadable_image_raises_with_the_hint_for_its_problem(
    model: Predictor, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes.png").write_text("a note")
    cases: list[tuple[str | Path, str, str]] = [
        (folder / "gone.png", f"{folder}/gone.png: no such file", "Check the path"),
        ("https://example.com/a.png", "https://example.com/a.png: a URL, not a file", "Download the image first"),
        (tmp_path / "notes.png", f"{tmp_path}/notes.png: not an image", SUPPORTED_FORMATS),
    ]
    for image, message, hint in cases:
        with pytest.raises(ImageDecodeError) as caught:
            model.predict(image)
        assert (caught.value.what, caught.value.hint) == (message, hint)


def test_predictions_are_a_list(model: Predictor, folder: Path) -> None:
    predictions = model.predict(folder)
    assert len(predictions) == NUM_PHOTOS
    assert isinstance(predictions[:2], Predictions)
    assert predictions[:2] == [predictions[0], predictions[1]]
    assert model.predict([]) == []


def test_predictions_of_folders_name_the_skipped_files(model: Predictor, folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(folder, tmp_path / "photos")
    (folder / "notes.txt").write_text("a note")
    (folder / ".hidden.png").write_bytes(b"x")
    expected = ((folder / ".hidden.png", SkipReason.HIDDEN), (folder / "notes.txt", SkipReason.NOT_AN_IMAGE))
    for predictions in (model.predict(folder), model.predict([folder]), model.predict_files([folder])):
        assert len(predictions) == NUM_PHOTOS
        assert predictions.skipped == expected
    assert model.predict([folder / "0.png"]).skipped == ()
    result = vitral.embed(model, [folder], tmp_path / "features.npy")
    assert (result.images, result.errors, tuple(result.skipped)) == (NUM_PHOTOS, [], expected)


def test_predictions_become_a_dataframe(model: Predictor, folder: Path) -> None:
    pytest.importorskip("pandas")
    predictions = model.predict([folder / "0.png", folder / "gone.png"], top=2)
    table = predictions.to_dataframe()
    assert list(table.columns) == [
        "file", "label", "probability", "labels", "probabilities", "ood", "error", "engine",
        "prediction_set", "coverage", "present",
    ]  # fmt: skip
    assert table["file"].tolist() == [str(folder / "0.png"), str(folder / "gone.png")]
    first = predictions[0]
    assert table["label"][0] == first.best.name
    assert table["labels"][0] == [label.name for label in first.labels]
    assert table["probability"][0] == first.best.probability
    assert table["error"].notna().tolist() == [False, True]
    assert table["label"].isna().tolist() == [False, True]


def test_a_dataframe_without_pandas_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(VitralError, match="requires pandas") as caught:
        Predictions().to_dataframe()
    assert caught.value.hint == "pip install 'vitral[pandas]'"


def pairs() -> Iterator[tuple[Image.Image, int]]:
    yield smooth_photo(0), 1


WRONG: dict[str, tuple[Any, str, str]] = {
    "number": (3, "expected images, got 3", "Pass a path"),
    "nothing": (None, "expected images, got None", "Pass a path"),
    "mapping": ({"image": 1}, "expected images, got a dict", "Pass a path"),
    "labelled split": (
        Split(images=torch.zeros(1, 3, 16, 24, dtype=torch.uint8), labels=torch.zeros(1).long()),
        "got a labelled dataset",
        "model.evaluate(split)",
    ),
    "pairs": (pairs(), "item 0 is a tuple of 2 values", "model.predict([image for image, label in items])"),
    "batch of a DataLoader": (
        (torch.zeros(2, 3, 16, 24), torch.zeros(2)),
        "item 0 is an array of shape 2×3×16×24",
        "model.predict(batch[0])",
    ),
    "grey batch": (np.zeros((10, 28, 28)), "got an array of shape 10×28×28", "model.predict(images[:, None])"),
    "five dimensions": (np.zeros((1, 2, 3, 4, 5)), "got an array of shape 1×2×3×4×5", "a batch is (B, H, W, C)"),
    "normalised": (torch.randn(2, 3, 16, 24), "seems to be normalised already", "without normalisation"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_input_names_the_right_call(model: Predictor, kind: str) -> None:
    value, what, hint = WRONG[kind]
    with pytest.raises(VitralError) as caught:
        model.predict(value)
    assert what in caught.value.what
    assert hint in caught.value.hint


def test_calling_the_model_itself_names_predict(model: Predictor) -> None:
    with pytest.raises(VitralError) as caught:
        model(smooth_photo(0))
    assert "model.predict(image)" in caught.value.hint


@pytest.mark.parametrize(("name", "call"), [("report", "vitral.report(model)"), ("classify", "model.predict(image)")])
def test_a_missing_method_names_the_function(model: Predictor, name: str, call: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; use ") as caught:
        getattr(model, name)
    assert str(caught.value).endswith(call)
    assert not hasattr(model, "nonsense")


def test_a_missing_function_of_vitral_names_the_right_call() -> None:
    with pytest.raises(AttributeError, match=r"use vitral\.load\(MODEL\)\.predict\(IMAGE\)"):
        _ = vitral.predict


def test_explain_returns_heatmaps_of_the_predicted_class(model: Predictor, folder: Path, tmp_path: Path) -> None:
    explanation = model.explain(folder / "0.png")
    assert [heat.method.name for heat in explanation.heatmaps] == ["rollout", "relevance"]
    assert {heat.label and heat.label.name for heat in explanation.heatmaps} == {
        model.predict(folder / "0.png").best.name
    }
    assert explanation.heatmaps[0].values.shape == (16, 24)
    one = model.explain(smooth_photo(0), methods="occlusion", targets="cat")
    assert [(heat.method.name, heat.label and heat.label.name) for heat in one.heatmaps] == [("occlusion", "cat")]
    assert model.explain(np.asarray(smooth_photo(0)), methods="attention", layer=1).source == "image"
    with Image.open(one.save(tmp_path / "cat.png")) as sheet:
        assert sheet.width > 100
    with pytest.raises(VitralError, match="explain takes one image") as caught:
        model.explain(folder)
    assert "model.explain(image) for image in images" in caught.value.hint


def test_packages_called_as_functions_name_the_right_call(model: Predictor, folder: Path) -> None:
    packages: list[tuple[Any, str]] = [
        (vitral.explain, "model.explain(image)"),
        (vitral_export, "vitral.api.export(model)"),
    ]
    for package, right_call in packages:
        with pytest.raises(VitralError, match=r"vitral\.\w+ is a module, not a function") as caught:
            package(model, folder / "0.png")
        assert f"Use {right_call}" in caught.value.hint
