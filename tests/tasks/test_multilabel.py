"""Multi-label from a CSV list to training, evaluation, prediction, export and serving, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from support.common import Command
from vitral.data.augment import AugmentConfig, augment_batch
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.inference.prediction import Label, Prediction, prediction_from_dict, prediction_to_dict, rank_labels
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import read_recipe
from vitral.runs.model_io import load_model

NAMES = ("red", "green", "blue")
TINY: dict[str, Any] = {
    "model.image_size": (8, 8), "model.patch_size": 4, "model.width": 16, "model.depth": 1, "model.heads": 2,
    "augment.crop": 0.0, "augment.cutmix": 0.0, "batch_size": 20, "epochs": 30, "device": "cpu", "threads": 1,
    "optim.lr": 0.01,
}  # fmt: skip


def colour_image(labels: tuple[str, ...], random: np.random.RandomState) -> Image.Image:
    """Noise in which each label is a bright channel."""
    pixels = random.randint(0, 60, (8, 8, 3))
    for name in labels:
        pixels[:, :, NAMES.index(name)] += 180
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a list of images with none to three of three labels."""
    folder, random = tmp_path_factory.mktemp("colours"), np.random.RandomState(0)
    rows = ["path,labels,split"]
    for index in range(160):
        labels = tuple(name for name in NAMES if random.rand() < 0.45)
        colour_image(labels, random).save(folder / f"{index}.png")
        rows.append(f"{index}.png,{'|'.join(labels)},{'train' if index < 80 else 'val' if index < 120 else 'test'}")
    (folder / "list.csv").write_text("\n".join(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAL_HOME", str(folder / "cache"))
        vitral.train(folder / "list.csv", out=folder / "run", **TINY)
    return folder / "run"


def test_a_tiny_model_learns_independent_labels(run: Path) -> None:
    recipe, (_, config) = read_recipe(run / "recipe.toml"), load_model(run)
    assert (recipe.task, recipe.loss, recipe.label_smoothing) == ("multilabel", "sigmoid", 0.0)
    assert config.task == "multilabel"
    assert config.classes == ("blue", "green", "red")
    assert len(config.calibration.thresholds) == 3
    test = json.loads((run / "test.json").read_text())
    assert test["mean_average_precision"]["value"] > 0.95
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"train_f1", "validation_map", "validation_f1", "validation_loss"} <= last.keys()
    assert "Labels that occur together" in (run / "report.html").read_text()


def test_predictions_are_the_labels_above_their_thresholds(run: Path, tmp_path: Path) -> None:
    model, random = vitral.load(run), np.random.RandomState(9)
    for labels in ((), ("red",), ("green", "blue"), NAMES):
        prediction = model.predict(colour_image(labels, random), top=1)
        assert {label.name for label in prediction.present} == set(labels)
        assert len(prediction.labels) == max(len(labels), 1)
        assert not prediction.is_ood
        assert prediction_from_dict(prediction_to_dict(prediction)) == prediction
    p = model.probabilities(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    assert p.sum() < 0.9, "probabilities are independent and need not sum to 1"


def test_command_line_prints_labels_or_the_nearest_one(run: Path, tmp_path: Path, command: Command) -> None:
    random = np.random.RandomState(3)
    colour_image(("red", "blue"), random).save(tmp_path / "both.png")
    colour_image((), random).save(tmp_path / "none.png")
    code, out, _ = command("predict", run, tmp_path / "both.png", tmp_path / "none.png")
    both, none = out.splitlines()
    assert code == 0
    assert "red" in both and "blue" in both and "green" not in both  # noqa: PT018
    assert "no label (nearest: " in none
    code, out, _ = command("evaluate", run, "--full")
    assert code == 0
    assert "mAP" in out and "Threshold" in out and "Images with both labels" in out  # noqa: PT018
    code, out, _ = command("evaluate", run, "--json")
    assert json.loads(out)["task"] == "multilabel"


@pytest.mark.parametrize(
    "words", [("bench", "RUN"), ("compare", "RUN", "RUN"), ("push", "RUN", "hf:a/b", "--dry-run"), ("doctor", "LIST"),
              ("evaluate", "RUN", "--robustness"), ("evaluate", "RUN", "--ood", "digits")],
    ids=lambda words: " ".join(words),
)  # fmt: skip
def test_commands_that_need_one_class_per_image_say_so(run: Path, command: Command, words: tuple[str, ...]) -> None:
    replaced = [{"RUN": run, "LIST": run.parent / "list.csv"}.get(word, word) for word in words]
    code, _, err = command(*replaced)
    assert code == 2
    assert "one class" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_exported_file_agrees_on_every_label(run: Path, tmp_path: Path) -> None:
    from vitral.api import export
    from vitral.inference.onnx_runtime import OnnxModel

    path, parity = export(run, out=tmp_path / "model.onnx", images=40)
    assert parity.agreement.value == 1
    assert parity.agreement.label in NAMES
    image = colour_image(("red", "green"), np.random.RandomState(5))
    expected, actual = vitral.load(run).predict(image), OnnxModel(path).predict(image)
    assert [label.name for label in actual.present] == [label.name for label in expected.present]
    assert actual.labels[0].probability == pytest.approx(expected.labels[0].probability, abs=1e-4)


def test_explanation_of_a_chosen_label(run: Path) -> None:
    image = colour_image(("red", "blue"), np.random.RandomState(5))
    explanation = vitral.load(run).explain(image, "gradcam", targets=["blue"])
    (heat,) = explanation.heatmaps
    assert heat.label is not None
    assert heat.label.name == "blue"
    assert isinstance(heat.label, Label)
    assert heat.label.threshold is not None


def test_present_labels_come_first_and_are_never_cut_off() -> None:
    labels = rank_labels(("a", "b", "c", "d"), (0.9, 0.4, 0.5, 0.1), 1, (0.95, 0.3, 0.2, 0.9))
    assert [(label.name, label.is_present) for label in labels] == [("c", True), ("b", True)]
    nearest = rank_labels(("a", "b"), (0.9, 0.4), 1, (0.95, 0.8))
    assert Prediction(source="x", labels=nearest).present == ()
    assert nearest[0].name == "a"


def test_mixup_blends_multi_hot_targets_of_neighbours() -> None:
    half = (0.5,) * 3
    preprocessing = Preprocessing(image_size=(8, 8), channels=3, mean=half, std=half)
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    images[1:3] = 255
    labels = torch.tensor([[1.0, 0], [1, 1], [0, 1], [0, 0]])
    generator = torch.Generator().manual_seed(0)
    mixed, targets = augment_batch(AugmentConfig(mixup=0.8), preprocessing, 2, images, labels, generator)
    share = (mixed[1, 0, 0, 0] + 1) / 2  # of the second image in the mix with the first, which is black
    torch.testing.assert_close(targets[1], torch.tensor([1.0, 0.0]).lerp(labels[1], share.item()))
    assert targets[0].tolist() == pytest.approx([targets[0][0].item(), 0])


def test_losses_of_another_task_are_refused() -> None:
    recipe = get_recipe("folder-scratch")
    assert recipe.with_task("multilabel").loss == "sigmoid"
    assert recipe.with_task("regression").loss == "mse"
    with pytest.raises(VitralError, match="the losses of multilabel are sigmoid, asymmetric, focal"):
        recipe.with_overrides({"loss": "softmax"}).with_task("multilabel")
