"""`vitral explain`: heatmaps, JSON, faithfulness and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.vit_kinds import KINDS, random_model
from vitral.cli.commands.explain import COMMAND
from vitral.cli.main import load_command
from vitral.data import decode
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor
from vitral.models.calibration import Calibration
from vitral.runs.model_io import ModelConfig, load_model, save_model
from vitral.weights.checkpoint import NO_HEAD


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder and two pictures of the same name."""
    variant, config = KINDS["class"]
    preprocessing = Preprocessing(image_size=(8, 12), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    names = ("ant", "bee", "wasp", "fly", "T-shirt/top")
    model_config = ModelConfig(architecture=config, preprocessing=preprocessing, classes=names, trained_on="x", epoch=1)
    save_model(tmp_path / "model", random_model(variant, config), model_config)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.effect_noise((60, 30), 80).convert("RGB").save(tmp_path / name / "photo.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_methods_and_classes_are_drawn_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "model a b --method rollout relevance occlusion --target bee T-shirt/top --out out --overlays --npy --json"
    assert COMMAND(words.split()) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(record["file"]).name for record in records] == ["photo.png", "photo.png"]
    assert [(m["method"], m["class"]) for m in records[0]["heatmaps"]][2:4] == [
        ("occlusion", "bee"),
        ("rollout", "T-shirt/top"),
    ]
    values = np.load("out/photo-relevance-bee.npy")
    assert values.shape == (8, 12)
    patches = np.array(records[0]["heatmaps"][1]["patches"])
    assert patches.shape == (2, 3)
    assert patches.mean() == pytest.approx(values.mean(), rel=1e-5)
    assert {*map(str, Path("out").iterdir())} == {file for record in records for file in record["files"]}
    assert len(records[0]["files"]) == 1 + 6 + 6
    with Image.open("out/photo-2.png") as sheet:
        assert sheet.width > 4 * 200
    with Image.open("out/photo-rollout-T-shirt_top.png") as over:
        assert over.size == (60, 30)


def test_a_model_without_classifier_has_no_prediction(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variant, config = KINDS["class"]
    _, model_config = load_model(folder / "model")
    headless = replace(model_config, architecture=replace(config, num_classes=1), classes=(NO_HEAD,))
    save_model(folder / "headless", random_model(variant, headless.architecture), headless)
    assert COMMAND(["headless", "a", "--method", "rollout", "--out", "out"]) == 0
    assert capsys.readouterr().out.split() == ["a/photo.png", "out/photo.png"]


def test_prints_one_line_per_image_and_reports_unreadable_ones(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.png").write_bytes(b"no")
    assert COMMAND(["model", "a/photo.png", "broken.png", "--top", "2", "--no-residual", "--fusion", "max"]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("a/photo.png   ")
    assert printed.err.endswith("1 of 2 files could not be read\n")
    assert printed.out.rstrip().endswith("explained/photo.png")
    assert "broken.png: not an image" in printed.err


def test_ood_images_are_reported_as_unknown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predictor = Predictor.load("model")
    save_model(
        folder / "strict",
        predictor.model,
        replace(predictor.model_config, calibration=Calibration(ood_threshold=1e9)),
    )
    for model, is_unknown in (("model", False), ("strict", True)):
        assert COMMAND([model, "a/photo.png"]) == 0
        assert (
            "unknown (unlike anything in the training set; closest class: " in capsys.readouterr().out
        ) is is_unknown
        assert COMMAND([model, "a/photo.png", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ood"] is is_unknown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no images given"),
        ("a --method attention --layer 3", "no layer 3: the model has 2"),
        ("a --method attention --head 7", "no head 7: the model has 2"),
        ("a --target hornet", "no class named 'hornet'"),
        ("a --method relevence", "Did you mean 'relevance'"),
        ("a --top 0", "--top must be at least 1"),
        ("a --layer 1", "no option of rollout, relevance named 'layer'"),
        ("empty", "no images in empty"),
        ("a --out a/photo.png", "cannot write to a/photo.png"),
        ("--faithfulness photos --layer 1 --method attention", "--faithfulness cannot be combined with --layer"),
    ],
)
def test_errors(folder: Path, words: str, message: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(VitralError, match=message):
        COMMAND(["model", *words.split()])


@pytest.mark.parametrize("words", [["explain", "m.onnx", "a"], ["figures", "m.onnx"], ["walk", "a", "--model", "m.pt2"],
                                   ["explain", "m.onnx", "--faithfulness", "a"]])  # fmt: skip
def test_exported_models_cannot_be_explained(folder: Path, words: list[str]) -> None:
    for name in ("m.onnx", "m.pt2"):
        (folder / name).write_bytes(b"graph")
    with pytest.raises(VitralError, match="is an exported model") as refused:
        load_command(words[0])(words[1:])
    assert "the run it was exported from" in refused.value.hint


def test_faithfulness_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ant", "bee"):
        for index in range(6):
            (folder / "photos" / name).mkdir(parents=True, exist_ok=True)
            Image.effect_noise((24, 16), 20 + 30 * index).convert("RGB").save(folder / "photos" / name / f"{index}.png")
    words = ["model", "--faithfulness", "photos", "--images", "4", "--method", "rollout", "gradcam"]
    assert COMMAND(words) == 0
    out, err = capsys.readouterr()
    assert "4 of 12 images of photos" in err
    assert all(name in out for name in ("rollout", "gradcam", "random", "4 images are too few", "--images 200"))
    assert max(map(len, out.splitlines())) <= 80 or "…" not in out
    assert (folder / "explained" / "faithfulness.png").is_file()
    assert COMMAND([*words, "--json"]) == 0
    assert [row["method"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["rollout", "gradcam", "random"]


def test_faithfulness_decodes_only_what_it_uses(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ant", "bee"):
        for index in range(40):
            (folder / "photos" / name).mkdir(parents=True, exist_ok=True)
            Image.effect_noise((24, 16), 20 + index).convert("RGB").save(folder / "photos" / name / f"{index:02}.png")
    decoded: list[str] = []

    def decode_image(source: object, **options: Any) -> Image.Image:
        decoded.append(str(source))
        return original(source, **options)

    original = decode.decode_image
    monkeypatch.setattr(decode, "decode_image", decode_image)
    assert COMMAND(["model", "--faithfulness", "photos", "--images", "2", "--method", "gradcam"]) == 0
    assert "2 of 80 images of photos" in capsys.readouterr().err
    assert len(decoded) == len(set(decoded)) == 2 + 2 * 8  # images, and pairs to choose from
