"""Predictor: from pictures of every kind to ranked labels, with a tiny random model."""

from __future__ import annotations

import csv
import io
import json
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitral.data.datasets import Split
from vitral.data.decode import NotAnImage
from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.errors import VitralError
from vitral.inference import prediction as answers
from vitral.inference import predictor as predict
from vitral.inference.predictor import Label, Prediction, Predictor
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.run import ModelCard, save_model

CLASSES = ("ant", "bee", "cat", "dog", "eel", "fox")


def model_folder(folder: Path, channels: int = 3, image_size: tuple[int, int] = (16, 24)) -> Path:
    """A model of random weights that is of different minds about different pictures."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=image_size, patch_size=8, channels=channels, classes=len(CLASSES), width=16, depth=2, heads=2
    )
    model = ViT(config)
    torch.nn.init.normal_(model.head.out.weight)
    card = ModelCard(
        architecture=config,
        preprocessing=Preprocessing(
            image_size=image_size, channels=channels, mean=(0.5,) * channels, std=(0.25,) * channels
        ),
        classes=CLASSES,
        trained_on="nothing",
        epoch=1,
    )
    save_model(folder, model, card)
    return folder


@pytest.fixture(scope="module")
def colour(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return Predictor.load(model_folder(tmp_path_factory.mktemp("colour")), device="cpu")


@pytest.fixture(scope="module")
def gray(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return Predictor.load(model_folder(tmp_path_factory.mktemp("gray"), channels=1), device="cpu")


def photograph(seed: int, height: int = 30, width: int = 40) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Five pictures of different sizes and formats, in a folder with one below."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for seed, name in enumerate(("a.png", "b.bmp", "c.tiff", "more/d e.png", "more/ü.webp")):
        lossless = {"lossless": True} if name.endswith("webp") else {}
        photograph(seed, 20 + 7 * seed, 50 - 5 * seed).save(folder / name, **lossless)
    return folder


def same(one: Prediction, other: Prediction) -> bool:
    near = np.allclose([x.probability for x in one.labels], [x.probability for x in other.labels], atol=1e-5)
    return near and [x.name for x in one.labels] == [x.name for x in other.labels]


def test_probabilities_are_those_of_the_model_ranked_and_sum_to_one(colour: Predictor) -> None:
    picture = photograph(1)
    answer = colour.predict(picture)
    preprocessing = colour.card.preprocessing
    with torch.no_grad():
        wanted = colour.model(preprocessing.normalise(preprocessing.pixels(picture)[None])).softmax(dim=1)[0]
    chances = [label.probability for label in answer.labels]
    assert sum(chances) == pytest.approx(1, abs=1e-5)
    assert chances == sorted(chances, reverse=True)
    assert {label.name: label.probability for label in answer.labels} == pytest.approx(
        dict(zip(CLASSES, wanted.tolist(), strict=True)), abs=1e-5
    )
    assert answer.best == answer.labels[0]
    assert answer.best.name == CLASSES[int(wanted.argmax())]


def test_different_pictures_get_different_answers(colour: Predictor) -> None:
    assert len({colour.predict(photograph(seed)).best.name for seed in range(20)}) > 1


@pytest.mark.parametrize("top", [1, 3, 6, 99, None])
def test_top_is_the_number_of_labels(colour: Predictor, top: int | None) -> None:
    whole, cut = colour.predict(photograph(1)), colour.predict(photograph(1), top=top)
    assert cut.labels == whole.labels[: top or 6]
    assert len(cut.labels) == min(top or 6, 6)


@pytest.mark.parametrize("top", [0, -1])
def test_a_top_below_one_is_refused(colour: Predictor, photos: Path, top: int) -> None:
    with pytest.raises(VitralError, match=f"top must be at least 1, not {top}"):
        colour.predict(photograph(1), top=top)
    with pytest.raises(VitralError, match="top"):
        colour.predict_files([photos], top=top)


def test_a_file_its_name_its_bytes_and_its_picture_get_the_same_answer(colour: Predictor, photos: Path) -> None:
    file = photos / "a.png"
    answers = [colour.predict(source) for source in (file, str(file), file.read_bytes(), Image.open(file))]
    assert all(same(answer, answers[0]) for answer in answers)
    assert [answer.source for answer in answers] == [str(file), str(file), "image", "image"]


def test_an_array_gets_the_answer_of_the_picture_that_it_is_of(colour: Predictor, photos: Path) -> None:
    picture = Image.open(next(photos.glob("*.png"))).convert("RGB")
    wanted, values = colour.predict(picture).labels, np.asarray(picture)
    chw = torch.from_numpy(values.copy()).permute(2, 0, 1)
    for array in (values, values / 255, chw, chw.float() / 255):
        assert colour.predict(array).labels == wanted
    assert colour.predict(np.asarray(picture.convert("L"))).labels == colour.predict(picture.convert("L")).labels
    for wrong, what in ((3, "int is no image"), (np.zeros((2, 3, 4, 5)), "an array of shape 2×3×4×5")):
        with pytest.raises(NotAnImage, match=what):
            colour.predict(wrong)  # type: ignore[arg-type]
    with pytest.raises(VitralError, match="normalised already"):
        colour.predict(chw.float() - 100)


@pytest.mark.parametrize("kind", ["rgba", "palette", "16 bits", "turned"])
def test_a_picture_that_pillow_opened_gets_the_answer_of_its_file(colour: Predictor, kind: str) -> None:
    picture, buffer, exif = photograph(3), io.BytesIO(), Image.Exif()
    if kind == "rgba":
        picture.putalpha(Image.fromarray(np.tile(np.arange(40, dtype=np.uint8) * 6, (30, 1))))
    elif kind == "palette":
        picture = picture.quantize(8)
    elif kind == "16 bits":
        picture = Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257)
    else:
        exif[0x0112] = 6
    picture.save(buffer, "PNG", exif=exif)
    assert same(colour.predict(Image.open(buffer)), colour.predict(buffer.getvalue()))


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 64])
def test_a_batch_of_files_gets_the_answers_of_one_by_one(colour: Predictor, photos: Path, batch: int) -> None:
    files = sorted(photos.rglob("*.*"))
    together = list(colour.predict_many(files, batch=batch))
    assert [answer.source for answer in together] == [str(file) for file in files]
    assert all(same(answer, colour.predict(file)) for answer, file in zip(together, files, strict=True))


def test_answers_come_as_soon_as_a_batch_is_full(colour: Predictor) -> None:
    opened: list[int] = []

    def pictures() -> Any:
        for seed in range(10):
            opened.append(seed)
            yield photograph(seed)

    next(iter(colour.predict_many(pictures(), batch=4)))
    assert opened == [0, 1, 2, 3]


def test_a_file_that_cannot_be_read_is_reported_in_its_place_and_the_others_are_answered(
    colour: Predictor, photos: Path
) -> None:
    (photos / "b.bmp").write_text("no picture")
    (photos / "c.tiff").write_bytes((photos / "c.tiff").read_bytes()[:300])
    answers = colour.predict_files([photos, photos / "gone.png"])
    assert [Path(answer.source).name for answer in answers] == [
        "a.png", "b.bmp", "c.tiff", "d e.png", "ü.webp", "gone.png",
    ]  # fmt: skip
    assert [bool(answer.error) for answer in answers] == [False, True, True, False, False, True]
    assert all(bool(answer.labels) != bool(answer.error) for answer in answers)
    assert same(answers[3], colour.predict(photos / "more/d e.png"))
    assert "not an image" in answers[1].error
    assert "no such file" in answers[5].error
    with pytest.raises(VitralError, match=r"no answer for .*b\.bmp"):
        _ = answers[1].best


def test_nothing_but_unreadable_files_is_no_crash(colour: Predictor, tmp_path: Path) -> None:
    answers = list(colour.predict_many([tmp_path / "x.png", b"", tmp_path], batch=2))
    assert [bool(answer.error) for answer in answers] == [True] * 3
    assert list(colour.predict_many([])) == []


def test_one_picture_that_cannot_be_read_is_an_error(colour: Predictor, tmp_path: Path) -> None:
    with pytest.raises(NotAnImage, match=r"gone\.png: no such file"):
        colour.predict(tmp_path / "gone.png")


def test_a_folder_gives_its_pictures_in_order(colour: Predictor, photos: Path) -> None:
    names = [Path(answer.source).name for answer in colour.predict_files([str(photos)])]
    assert names == ["a.png", "b.bmp", "c.tiff", "d e.png", "ü.webp"]


def test_a_folder_without_pictures_is_an_error(colour: Predictor, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(VitralError, match="no images in") as caught:
        colour.predict_files([tmp_path])
    assert "PNG" in caught.value.hint


def test_a_gray_model_sees_a_colour_photograph_as_pillow_would_print_it(gray: Predictor) -> None:
    assert same(gray.predict(photograph(2)), gray.predict(photograph(2).convert("L")))


def test_a_colour_model_takes_a_gray_picture(colour: Predictor) -> None:
    picture = photograph(2).convert("L")
    assert same(colour.predict(picture), colour.predict(picture.convert("RGB")))


def test_a_model_for_two_channels_says_that_pictures_have_none_such(tmp_path: Path) -> None:
    with pytest.raises(VitralError, match="this model wants 2"):
        Predictor.load(model_folder(tmp_path, channels=2), device="cpu").predict(photograph(1))


def test_loading_twice_gives_the_same_model_in_the_same_mood(colour: Predictor) -> None:
    assert colour.path is not None
    again = Predictor.load(str(colour.path), device="cpu")
    assert again.classes == CLASSES
    assert not again.model.training
    assert again.predict(photograph(5)) == colour.predict(photograph(5))
    assert repr(again) == f"Predictor('{colour.path}', 6 classes, 16×24 pixels, trained on 'nothing')"


def test_evaluating_adapts_the_images_and_counts_right_answers(colour: Predictor) -> None:
    images = torch.stack([torch.from_numpy(np.array(photograph(seed, 16, 24))).permute(2, 0, 1) for seed in range(12)])
    said = [CLASSES.index(colour.predict(photograph(seed, 16, 24)).best.name) for seed in range(12)]
    labels = torch.tensor(said)
    labels[:3] = (labels[:3] + 1) % 6
    assert colour.evaluate(Split(images=images, labels=labels)).top1 == pytest.approx(0.75)
    grays = Split(images=images[:, :1, ::2, ::2], labels=labels)
    assert colour.evaluate(grays).images == 12


def test_evaluating_on_labels_the_model_does_not_know_is_an_error(colour: Predictor) -> None:
    strange = Split(images=torch.zeros(2, 3, 16, 24, dtype=torch.uint8), labels=torch.tensor([0, 6]))
    with pytest.raises(VitralError, match="outside the model's 6 classes: 6"):
        colour.evaluate(strange)


ANSWERS = [
    Prediction(
        source="a.png", labels=(Label(name="cat", probability=0.75), Label(name='a "dog", or so', probability=0.25))
    ),
    Prediction(source="broken, I fear.png", error="broken, I fear.png: not an image"),
]


def test_answers_as_lines_stand_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    answers.as_lines([ANSWERS[0], replace(ANSWERS[0], source="longer name.png"), ANSWERS[1]])
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2
    assert out[0].split() == ["a.png", "cat", "0.75", "·", "a", '"dog",', "or", "so", "0.25"]
    assert out[0].index("cat") == out[1].index("cat")
    decomposed = unicodedata.normalize("NFD", "개미.png")  # as a Mac names its files
    answers.as_lines([replace(ANSWERS[0], source=name) for name in ("개미.png", decomposed, "12345678")])
    out = [unicodedata.normalize("NFC", line) for line in capsys.readouterr().out.splitlines()]
    assert [line.index("cat") for line in out] == [9, 9, 11]  # two letters of double width before it


def test_answers_as_json_and_csv_can_be_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    answers.as_json(ANSWERS)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["labels"][1] == {"name": 'a "dog", or so', "probability": 0.25}
    assert second == {"file": "broken, I fear.png", "labels": [], "error": "broken, I fear.png: not an image"}
    answers.as_csv(ANSWERS)
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["label"] for row in rows] == ["cat", 'a "dog", or so', ""]
    assert rows[2]["error"] == "broken, I fear.png: not an image"


@pytest.mark.parametrize(
    ("how", "compile", "compiled"),
    [
        ({}, "no", False),
        ({"many": True}, "auto", False),  # our kernels, not the compiler's
        ({"precision": "fp8"}, "auto", False),
        ({"compile": "auto"}, "auto", True),
        ({"precision": "int8"}, "no", False),
    ],
)
def test_on_a_gpu_our_kernels_are_for_many_answers_and_the_compilers_for_whoever_asks(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], compile: str, compiled: bool
) -> None:
    asked: dict[str, Any] = {}
    reasons = {"device": "a test", "precision": "a test", "compile": "a test"}

    def choose(**wishes: Any) -> Hardware:
        asked.update(wishes)
        chosen = wishes["compile"] != "no"
        return Hardware(device=torch.device("cpu"), precision="bf16", compile=chosen, reasons=reasons, fused=chosen)

    monkeypatch.setattr(predict, "choose", choose)
    usual: dict[str, Any] = {"precision": "auto", "compile": "no", "many": False}
    chosen = predict._on_gpu("gpu", *(usual | how).values())
    assert asked == {
        "device": "gpu",
        "precision": {"fp8": "fp8"}.get(how.get("precision", ""), "auto"),
        "compile": compile,
    }
    assert (chosen.compile, chosen.fused) == (compiled, compile == "auto")


def test_a_name_is_not_labelled_images_and_that_is_said(gray: Predictor) -> None:
    with pytest.raises(VitralError, match=r"evaluate takes labelled images.*not 'photos'") as told:
        gray.evaluate("photos")  # type: ignore[arg-type]
    assert "vitral.evaluate(model, data=NAME)" in told.value.hint
