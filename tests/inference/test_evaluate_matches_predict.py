"""Evaluation and prediction use one path: the accuracy of `evaluate` is that of the output of `predict --out`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from support.models import save_random_model, smooth_photo
from support.training import run_vitral
from vitral.device import cpu as cpu_info
from vitral.evaluation.data import load_eval_target
from vitral.inference.engine import EngineName
from vitral.inference.int8_calibration import collect_activation_ranges, save_activation_ranges
from vitral.inference.predictor import Predictor
from vitral.runs.model_io import load_model, save_model

CLASSES = ("ant", "bee", "cat")
IMAGES_PER_CLASS = 24


def needs(is_supported: bool, feature: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_supported, reason=f"needs {feature}")


ENGINES = [
    "reference",
    "fp32",
    pytest.param("bf16", marks=needs(cpu_info.cpu_has_bf16(), "bf16 instructions")),
    pytest.param("int8", marks=needs(cpu_info.cpu_has_int8(), "8-bit dot products")),
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of JPEG and PNG files in many sizes. Training would decode the large JPEGs at a reduced size."""
    folder = tmp_path_factory.mktemp("photos")
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir()
        for index in range(IMAGES_PER_CLASS):
            seed = 100 * label + index
            height, width = (30, 40) if index % 2 else (150 + seed % 37, 190 - seed % 41)
            pixels = np.asarray(smooth_photo(seed, height, width), dtype=np.int64)
            noise = np.random.default_rng(seed).integers(-60, 60, pixels.shape)
            photo = Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8))
            photo.save(folder / name / f"{index:02}.{'png' if index % 3 == 0 else 'jpg'}")
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    """A random model whose class biases spread its predictions over the three classes, with int8 ranges."""
    folder = save_random_model(tmp_path_factory.mktemp("model"), width=128)  # wide enough for FP8
    model, model_config = load_model(folder)
    predictor = Predictor.load(folder, device="cpu", engine="reference")
    decoded = (predictor.decode_image(path)[1] for path in sorted(photos.rglob("*.*")))
    images = torch.stack([pixels for pixels in decoded if isinstance(pixels, torch.Tensor)])
    with torch.no_grad():
        bias = model.get_parameter("head.out.bias")
        bias.sub_(predictor.logits(images).mean(dim=0))
        bias[len(CLASSES) :] = -100.0
    save_model(folder, model, model_config)
    save_activation_ranges(folder, collect_activation_ranges(model, images.split(16), model_config.preprocessing))
    return folder


def confusion_of_predictions(out: Path, classes: tuple[str, ...]) -> list[list[int]]:
    """Confusion matrix of a JSON Lines file, with the folder names as true classes."""
    confusion = [[0] * len(classes) for _ in classes]
    for line in out.read_text().splitlines():
        prediction = json.loads(line)
        true, predicted = Path(prediction["file"]).parent.name, prediction["labels"][0]["name"]
        confusion[classes.index(true)][classes.index(predicted)] += 1
    return confusion


def check_evaluate_matches_predict(
    model_dir: Path, photos: Path, out: Path, engine: EngineName, device: str = "cpu"
) -> None:
    run_vitral("predict", model_dir, photos, "--out", out, "--engine", engine, "--device", device)
    predictor = vitral.load(model_dir, engine=engine, device=device)  # type: ignore[arg-type]
    evaluation = vitral.evaluate(predictor, data=str(photos))
    confusion = confusion_of_predictions(out, predictor.classes)
    num_images = sum(map(sum, confusion))
    num_correct = sum(row[index] for index, row in enumerate(confusion))
    assert num_images == evaluation.images == len(CLASSES) * IMAGES_PER_CLASS
    assert evaluation.top1 == num_correct / num_images
    assert [list(row) for row in evaluation.confusion] == confusion
    assert evaluation.engine["name"] == engine
    assert {json.loads(line)["engine"] for line in out.read_text().splitlines()} == {engine}
    assert sum(1 for predicted in zip(*confusion, strict=True) if sum(predicted)) > 1  # the comparison means something


@pytest.mark.parametrize("engine", ENGINES)
def test_evaluate_reports_the_accuracy_of_predict_out(
    model_dir: Path, photos: Path, tmp_path: Path, engine: EngineName
) -> None:
    check_evaluate_matches_predict(model_dir, photos, tmp_path / "predictions.jsonl", engine)


@needs(torch.cuda.is_available(), "a GPU")
@pytest.mark.parametrize("engine", ["reference", "fp32", "bf16", "fp8"])
def test_evaluate_reports_the_accuracy_of_predict_out_on_a_gpu(
    model_dir: Path, photos: Path, tmp_path: Path, engine: EngineName
) -> None:
    check_evaluate_matches_predict(model_dir, photos, tmp_path / "predictions.jsonl", engine, device="gpu")


def test_evaluated_pixels_are_the_predicted_pixels(model_dir: Path, photos: Path) -> None:
    target = load_eval_target(Predictor.load(model_dir, device="cpu"), str(photos))
    assert isinstance(target.split.images, torch.Tensor)
    labelled = zip(target.split.labels.tolist(), target.split.images, strict=True)
    evaluated = {(label, image.numpy().tobytes()) for label, image in labelled}
    for path in sorted(photos.rglob("*.*")):
        _, pixels = target.predictor.decode_image(path)
        assert isinstance(pixels, torch.Tensor)
        assert (CLASSES.index(path.parent.name), pixels.numpy().tobytes()) in evaluated
