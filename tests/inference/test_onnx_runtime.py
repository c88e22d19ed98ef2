"""An exported model in an environment without torch says what the Predictor says."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from PIL import Image

from export.test_export import carded, photographs
from vitral.export.export import ship
from vitral.inference.predictor import Predictor
from vitral.runs.run import save_model

ROOT = Path(__file__).parents[2]
BLOCKED = {"torch", "tyro", "rich", "safetensors", "matplotlib", "sklearn", "filelock"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its export, and pictures."""
    place = tmp_path_factory.mktemp("runtime")
    model, card = carded()
    save_model(place / "model", model, card)
    (place / "photos").mkdir()
    for index, picture in enumerate(photographs(12)):
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(place / "photos" / f"{index:02}.png")
    learn = Predictor.load(place / "model", device="cpu").card.preprocessing.pixels(Image.new("RGB", (9, 9)))[None]
    how = {"precision": "fp32", "learn_from": learn, "pictures": photographs(8), "labels": None}
    ship(model, card, place / "model.onnx", to="onnx", preprocessing=False, **how)  # type: ignore[arg-type]
    return place


def said(answer: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    assert answer.returncode == 0, answer.stderr
    return [json.loads(line) for line in answer.stdout.splitlines()]


def agrees(answers: list[dict[str, object]], place: Path) -> None:
    ours = Predictor.load(place / "model", device="cpu").predict_files([place / "photos"])
    assert [a["file"] for a in answers] == [a.source for a in ours]
    for theirs, our in zip(answers, ours, strict=True):
        assert theirs["unknown"] == our.unknown
        found = {label["name"]: label["probability"] for label in theirs["labels"]}  # type: ignore[attr-defined]
        assert found == pytest.approx({label.name: label.probability for label in our.labels}, abs=1e-4)


def test_predicting_with_an_onnx_file_imports_no_torch(exported: Path) -> None:
    code = (
        f"import sys\nfor name in {sorted(BLOCKED)!r}: sys.modules[name] = None\n"
        "from vitral.cli.main import main\nmain(sys.argv[1:])"
    )
    words = ["predict", str(exported / "model.onnx"), str(exported / "photos"), "--json", "--top", "5"]
    agrees(said(subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)), exported)


@pytest.mark.slow
def test_a_clean_environment_without_torch_is_enough(exported: Path, tmp_path: Path, network: None) -> None:
    """As docs say: pip install --no-deps vitral, and numpy, pillow, onnxruntime."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"

    def pip(*words: str) -> None:
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words],
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr

    pip("-c", str(ROOT / "constraints.txt"), "numpy", "pillow", "onnxruntime")
    pip("--no-deps", str(ROOT))
    there = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
    assert "No module named 'torch'" in there.stderr
    words = ["predict", str(exported / "model.onnx"), str(exported / "photos"), "--json", "--top", "5"]
    vitral = tmp_path / "env" / "bin" / "vitral"
    agrees(said(subprocess.run([vitral, *words], capture_output=True, text=True, cwd=tmp_path)), exported)
