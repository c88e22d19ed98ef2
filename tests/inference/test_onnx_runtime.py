"""An exported model predicts without torch what the Predictor predicts."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.models import build_calibrated_model, comparison_images, images_of_many_sizes, reference_predictor
from vitral.export.export import export_model
from vitral.inference.predictor import Predictor
from vitral.runs.model_io import save_model

ROOT = Path(__file__).parents[2]
BLOCKED = {"torch", "rich", "safetensors", "matplotlib", "sklearn", "filelock"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model (model/), its export (model.onnx) and images (photos/)."""
    folder = tmp_path_factory.mktemp("runtime")
    model, model_config = build_calibrated_model()
    save_model(folder / "model", model, model_config)
    (folder / "photos").mkdir()
    for index, image in enumerate(images_of_many_sizes(12)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / "photos" / f"{index:02}.png")
    predictor = reference_predictor(model, model_config)
    export_model(
        predictor,
        folder / "model.onnx",
        to="onnx",
        precision="fp32",
        preprocessing=False,
        comparison=comparison_images(predictor, images_of_many_sizes(8)),
    )
    return folder


def parse_predictions(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def check_agreement(predictions: list[dict[str, Any]], folder: Path) -> None:
    expected = Predictor.load(folder / "model", device="cpu").predict_files([folder / "photos"])
    assert [prediction["file"] for prediction in predictions] == [prediction.source for prediction in expected]
    for actual, prediction in zip(predictions, expected, strict=True):
        assert actual["ood"] == prediction.is_ood
        assert actual["engine"] == "onnxruntime"
        assert prediction.prediction_set is not None
        assert actual["prediction_set"] == {"labels": list(prediction.prediction_set.labels), "coverage": 0.9}
        probabilities = {label["name"]: label["probability"] for label in actual["labels"]}
        assert probabilities == pytest.approx({x.name: x.probability for x in prediction.labels}, abs=1e-4)


@pytest.mark.slow
def test_predicting_with_an_onnx_file_does_not_import_torch(exported: Path) -> None:
    script = (
        f"import sys\nfor name in {sorted(BLOCKED)!r}: sys.modules[name] = None\n"
        "from vitral.cli.main import main\nmain(sys.argv[1:])"
    )
    command = ["predict", str(exported / "model.onnx"), str(exported / "photos"), "--json", "--top", "5"]
    result = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True)
    check_agreement(parse_predictions(result), exported)


@pytest.mark.slow
def test_a_clean_environment_without_torch_can_predict(exported: Path, tmp_path: Path, network: None) -> None:
    """As documented: pip install --no-deps vitral, and numpy, pillow, onnxruntime."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"

    def pip_install(*arguments: str) -> None:
        result = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments],
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert result.returncode == 0, result.stderr

    pip_install("-c", str(ROOT / "constraints.txt"), "numpy", "pillow", "onnxruntime")
    pip_install("--no-deps", str(ROOT))
    torch_import = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
    assert "No module named 'torch'" in torch_import.stderr
    command = ["predict", str(exported / "model.onnx"), str(exported / "photos"), "--json", "--top", "5"]
    vitral = tmp_path / "env" / "bin" / "vitral"
    result = subprocess.run([vitral, *command], capture_output=True, text=True, cwd=tmp_path)
    check_agreement(parse_predictions(result), exported)
