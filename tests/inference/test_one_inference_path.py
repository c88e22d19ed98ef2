"""Every reported number comes from the engine and the pixels of `predict`: no second path from a file to a logit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vitral
from support.common import skip_figures
from support.models import save_random_model, smooth_photo
from vitral.evaluation.calibration import fit_calibration
from vitral.evaluation.robustness import measure_robustness
from vitral.inference.engine import Engine
from vitral.inference.predictor import Predictor
from vitral.runs.model_io import load_model, save_model

CLASSES = ("ant", "bee", "cat")
IMAGES_PER_CLASS = 8
TINY_MODEL: dict[str, Any] = {
    "model.image_size": (16, 16), "model.patch_size": 8, "model.width": 24, "model.depth": 1, "data.crop": 0.9,
}  # fmt: skip


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noisy JPEGs in train/, val/, test/ and other/. A reduced decode or a second resize would change their pixels."""
    root = tmp_path_factory.mktemp("splits")
    for number, split in enumerate(("data/train", "data/val", "data/test", "other")):
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for index in range(IMAGES_PER_CLASS):
                seed = 1000 * number + 100 * label + index
                pixels = np.asarray(smooth_photo(seed, 131 + seed % 37, 190 - seed % 41), dtype=np.int64)
                noise = np.random.default_rng(seed).integers(-60, 60, pixels.shape)
                photo = Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))
                photo.save(root / split / name / f"{index}.jpg")
    return root


@pytest.fixture
def model_dir(photos: Path, tmp_path: Path) -> Path:
    folder = save_random_model(tmp_path / "model")
    model, model_config = load_model(folder)
    with torch.no_grad():
        model.get_parameter("head.out.bias")[len(CLASSES) :] = -100.0
    save_model(folder, model, replace(model_config, trained_on=str(photos / "data")))
    return folder


class RecordingEngine:
    """Records the pixels of all images that it computes logits or features of."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.seen = engine, set[bytes]()

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        self.seen |= {image.numpy().tobytes() for image in images_BCHW}
        return self.engine(images_BCHW)

    def features(self, images_BCHW: Tensor) -> Tensor:
        self.seen |= {image.numpy().tobytes() for image in images_BCHW}
        return self.engine.features(images_BCHW)


def recording_predictor(folder: Path) -> tuple[Predictor, RecordingEngine]:
    predictor = Predictor.load(folder, device="cpu")
    recorder = RecordingEngine(predictor.engine.engine)
    predictor.engine = replace(predictor.engine, engine=recorder)
    return predictor, recorder


def predicted_pixels(predictor: Predictor, *folders: Path) -> dict[bytes, int]:
    """The pixels that `predict` computes for each image, and its class index."""
    pixels = {}
    for folder in folders:
        for file in sorted(folder.rglob("*.jpg")):
            decoded = predictor.decode_image(file)[1]
            assert isinstance(decoded, Tensor)
            pixels[decoded.numpy().tobytes()] = CLASSES.index(file.parent.name)
    assert len(pixels) == len(folders) * len(CLASSES) * IMAGES_PER_CLASS
    return pixels


def labelled_images(predictor: Predictor, folder: Path) -> tuple[Tensor, Tensor]:
    pixels = predicted_pixels(predictor, folder)
    images = torch.stack([torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in pixels])
    return images.unflatten(1, predictor.model_config.preprocessing.shape), torch.tensor(list(pixels.values()))


COMMANDS: dict[str, tuple[Callable[[Predictor, Path], Any], tuple[str, ...]]] = {
    "evaluate": (lambda model, root: vitral.evaluate(model), ("data/test",)),
    "evaluate on validation": (lambda model, root: vitral.evaluate(model, split="validation"), ("data/val",)),
    "evaluate another folder": (lambda model, root: vitral.evaluate(model, data=str(root / "other")), ("other",)),
    "calibrate": (lambda model, root: vitral.calibrate(model), ("data/val",)),
    "confidence threshold": (lambda model, root: vitral.evaluate(model, max_error=0.5), ("data/test", "data/val")),
    "OOD": (
        lambda model, root: vitral.evaluate(model, ood=str(root / "other")),
        ("data/train", "data/val", "data/test", "other"),
    ),
    "probe": (
        lambda model, root: vitral.probe(str(root / "data"), model),
        ("data/train", "data/val", "data/test"),
    ),
    "report": (lambda model, root: vitral.report(model, fast=True, out=root / "report.html"), ("data/test",)),
}


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=pytest.mark.slow) if name == "probe" else name for name in COMMANDS]
)
def test_the_engine_sees_exactly_the_pixels_of_predict(model_dir: Path, photos: Path, command: str) -> None:
    predictor, recorder = recording_predictor(model_dir)
    run, folders = COMMANDS[command]
    run(predictor, photos)
    assert recorder.seen == predicted_pixels(predictor, *(photos / folder for folder in folders)).keys()


def test_both_models_of_a_comparison_see_the_pixels_of_predict(model_dir: Path, photos: Path) -> None:
    (first, first_engine), (second, second_engine) = (recording_predictor(model_dir) for _ in range(2))
    comparison = vitral.compare_models(first, second)
    assert [engine["name"] for engine in comparison.engines] == [first.engine.name, second.engine.name]
    expected = predicted_pixels(first, photos / "data/test").keys()
    assert first_engine.seen == second_engine.seen == expected


def test_robustness_corrupts_the_pixels_of_predict(model_dir: Path, photos: Path) -> None:
    predictor = Predictor.load(model_dir, device="cpu")
    images, labels = labelled_images(predictor, photos / "data/test")
    expected = measure_robustness(images, labels, lambda x: predictor.logits(x).argmax(dim=1))
    assert vitral.evaluate(predictor, robustness=True).robustness == expected


def test_the_calibration_fits_the_logits_of_predict(model_dir: Path, photos: Path) -> None:
    predictor = Predictor.load(model_dir, device="cpu")
    images, labels = labelled_images(predictor, photos / "data/val")
    expected = fit_calibration(predictor.logits(images), labels, engine=predictor.engine.name)
    calibration = vitral.calibrate(predictor)
    assert calibration.engine == expected.engine == predictor.engine.name
    assert calibration.temperature == pytest.approx(expected.temperature, rel=1e-4)


def test_the_report_states_the_accuracy_and_the_engine_of_predict(model_dir: Path, photos: Path) -> None:
    predictor = Predictor.load(model_dir, device="cpu")
    predictions = predictor.predict(photos / "data/test")
    accuracy = sum(Path(p.source).parent.name == p.best.name for p in predictions) / len(predictions)
    page = vitral.report(predictor, fast=True, out=photos / "report.html").read_text(encoding="utf-8")
    assert f"{accuracy:.2%}" in re.sub(r"\s*%", "%", page)
    assert predictor.engine.name in page


@pytest.mark.parametrize(
    ("splits", "evaluated"), [(("train", "val", "test"), "test"), (("train", "val"), "validation")]
)
def test_the_evaluation_after_training_is_that_of_predict(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, splits: tuple[str, ...], evaluated: str
) -> None:
    """Also for a folder that has validation images only."""
    skip_figures(monkeypatch)
    data = tmp_path / "data"
    data.mkdir()
    for split in splits:
        (data / split).symlink_to(photos / "data" / split)
    overrides = TINY_MODEL | {"tta": "none"}
    model = vitral.train(str(data), out=tmp_path / "run", epochs=1, **overrides)
    report = json.loads((tmp_path / "run" / "test.json").read_text())
    folder = photos / "data" / ("test" if evaluated == "test" else "val")
    predictions = vitral.load(tmp_path / "run").predict(folder)
    confusion = [[0] * len(CLASSES) for _ in CLASSES]
    for prediction in predictions:
        true = CLASSES.index(Path(prediction.source).parent.name)
        confusion[true][model.classes.index(prediction.best.name)] += 1
    assert report["split"] == evaluated
    assert report["confusion"] == confusion
    assert {prediction.engine for prediction in predictions} == {report["engine"]["name"]}
    images, labels = labelled_images(model, photos / "data" / "val")
    fitted = fit_calibration(model.logits(images), labels)
    assert model.model_config.calibration.temperature == pytest.approx(fitted.temperature, rel=1e-4)
