"""Predictor: images of every kind to ranked labels, with a small random model."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from support.models import ANIMALS, cpu_fp32, reference_logits, save_random_model, smooth_photo
from vitral.data.datasets import Split
from vitral.data.decode import ImageDecodeError
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.inference.prediction import (
    CSV_COLUMNS,
    Label,
    Prediction,
    PredictionSet,
    csv_rows,
    prediction_from_dict,
    prediction_to_dict,
    rank_labels,
    table_row,
)
from vitral.inference.predictor import Predictor
from vitral.models.calibration import Calibration
from vitral.models.target_scaling import TargetScaling
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig


@pytest.fixture(scope="module")
def rgb_predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return Predictor.load(save_random_model(tmp_path_factory.mktemp("rgb")), device="cpu")


@pytest.fixture(scope="module")
def grey_predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return Predictor.load(save_random_model(tmp_path_factory.mktemp("grey"), channels=1), device="cpu")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Five images of different sizes and formats, two of them in a subfolder."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for seed, name in enumerate(("a.png", "b.bmp", "c.tiff", "more/d e.png", "more/ü.webp")):
        lossless: dict[str, Any] = {"lossless": True} if name.endswith("webp") else {}
        smooth_photo(seed, 20 + 7 * seed, 50 - 5 * seed).save(folder / name, **lossless)
    return folder


def same_labels(one: Prediction, other: Prediction) -> bool:
    close = np.allclose([x.probability for x in one.labels], [x.probability for x in other.labels], atol=1e-5)
    return close and [x.name for x in one.labels] == [x.name for x in other.labels]


def test_labels_are_the_softmax_of_the_logits_in_descending_order(rgb_predictor: Predictor) -> None:
    photo = smooth_photo(1)
    prediction = rgb_predictor.predict(photo)
    preprocessing = rgb_predictor.model_config.preprocessing
    logits = reference_logits(rgb_predictor.model, preprocessing, preprocessing.resize_and_crop(photo)[None])
    expected = logits.softmax(dim=1)[0]
    probabilities = [label.probability for label in prediction.labels]
    assert sum(probabilities) == pytest.approx(1, abs=1e-5)
    assert probabilities == sorted(probabilities, reverse=True)
    assert {label.name: label.probability for label in prediction.labels} == pytest.approx(
        dict(zip(ANIMALS, expected.tolist(), strict=True)), abs=1e-5
    )
    assert prediction.best == prediction.labels[0]
    assert prediction.best.name == ANIMALS[int(expected.argmax())]
    assert prediction.engine == rgb_predictor.engine.name


def test_a_regression_predicts_native_images_of_several_sizes_as_it_does_single_ones() -> None:
    torch.manual_seed(0)
    config = ViTConfig(image_size=(16, 16), patch_size=8, num_classes=2, width=16, depth=1, heads=2)
    preprocessing = Preprocessing(image_size=(16, 16), channels=3, mean=(0.5,) * 3, std=(0.25,) * 3)
    model_config = ModelConfig(
        architecture=config,
        preprocessing=replace(preprocessing, resize="native", patch_size=8),
        classes=("age", "mass"),
        trained_on="nothing",
        epoch=1,
        task="regression",
        target_scaling=TargetScaling(mean=(30.0, 900.0), std=(9.0, 300.0)),
    )
    predictor = Predictor(ViT(config), model_config, cpu_fp32())
    photos = [smooth_photo(0, 16, 16), smooth_photo(1, 10, 40), smooth_photo(2, 40, 10)]
    assert len({pixels.shape for _, pixels in map(predictor.decode_image, photos) if isinstance(pixels, Tensor)}) == 3
    together = [[value.value for value in prediction.values] for prediction in predictor.predict(photos)]
    single = [[value.value for value in predictor.predict(photo).values] for photo in photos]
    np.testing.assert_allclose(together, single, rtol=1e-5)


def test_predictions_differ_between_images(rgb_predictor: Predictor) -> None:
    assert len({rgb_predictor.predict(smooth_photo(seed)).best.name for seed in range(20)}) > 1


@pytest.mark.parametrize("top", [1, 3, 6, 99, None])
def test_top_limits_the_number_of_labels(rgb_predictor: Predictor, top: int | None) -> None:
    all_labels = rgb_predictor.predict(smooth_photo(1)).labels
    labels = rgb_predictor.predict(smooth_photo(1), top=top).labels
    assert labels == all_labels[: top or 6]
    assert len(labels) == min(top or 6, 6)


@pytest.mark.parametrize("top", [0, -1])
def test_top_below_one_is_refused(rgb_predictor: Predictor, photos: Path, top: int) -> None:
    with pytest.raises(VitralError, match=f"top must be at least 1, got {top}"):
        rgb_predictor.predict(smooth_photo(1), top=top)
    with pytest.raises(VitralError, match="top"):
        rgb_predictor.predict_files([photos], top=top)


def test_path_string_bytes_and_pil_image_give_the_same_prediction(rgb_predictor: Predictor, photos: Path) -> None:
    file = photos / "a.png"
    inputs = (file, str(file), file.read_bytes(), Image.open(file))
    predictions = [rgb_predictor.predict(image) for image in inputs]
    assert all(same_labels(prediction, predictions[0]) for prediction in predictions)
    assert [prediction.source for prediction in predictions] == [str(file), str(file), "image", "image"]


def test_arrays_and_tensors_give_the_prediction_of_the_image(rgb_predictor: Predictor, photos: Path) -> None:
    picture = Image.open(next(photos.glob("*.png"))).convert("RGB")
    expected, values = rgb_predictor.predict(picture).labels, np.asarray(picture)
    chw = torch.from_numpy(values.copy()).permute(2, 0, 1)
    for array in (values, values / 255, chw, chw.float() / 255):
        assert rgb_predictor.predict(array).labels == expected
    grey = picture.convert("L")
    assert rgb_predictor.predict(np.asarray(grey)).labels == rgb_predictor.predict(grey).labels


@pytest.mark.parametrize("value", [3, np.zeros((2, 3, 4, 5, 6)), -100 * np.ones((8, 8))])
def test_values_that_are_not_images_are_refused(rgb_predictor: Predictor, value: Any) -> None:
    with pytest.raises(VitralError):
        rgb_predictor.predict(value)


@pytest.mark.parametrize("kind", ["rgba", "palette", "16 bit", "exif orientation"])
def test_an_opened_pil_image_gives_the_prediction_of_its_file(rgb_predictor: Predictor, kind: str) -> None:
    picture, buffer, exif = smooth_photo(3), io.BytesIO(), Image.Exif()
    if kind == "rgba":
        picture.putalpha(Image.fromarray(np.tile(np.arange(40, dtype=np.uint8) * 6, (30, 1))))
    elif kind == "palette":
        picture = picture.quantize(8)
    elif kind == "16 bit":
        picture = Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257)
    else:
        exif[0x0112] = 6
    picture.save(buffer, "PNG", exif=exif)
    assert same_labels(rgb_predictor.predict(Image.open(buffer)), rgb_predictor.predict(buffer.getvalue()))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 64])
def test_predictions_do_not_depend_on_the_batch_size(rgb_predictor: Predictor, photos: Path, batch_size: int) -> None:
    files = sorted(photos.rglob("*.*"))
    predictions = list(rgb_predictor.predict_many(files, batch_size=batch_size))
    assert [prediction.source for prediction in predictions] == [str(file) for file in files]
    for prediction, file in zip(predictions, files, strict=True):
        assert same_labels(prediction, rgb_predictor.predict(file))


def test_predictions_are_yielded_after_each_batch(rgb_predictor: Predictor) -> None:
    consumed: list[int] = []

    def images() -> Iterator[Image.Image]:
        for seed in range(10):
            consumed.append(seed)
            yield smooth_photo(seed)

    next(rgb_predictor.predict_many(images(), batch_size=4))
    assert consumed == [0, 1, 2, 3]


def test_unreadable_files_are_reported_in_place_and_the_others_predicted(
    rgb_predictor: Predictor, photos: Path
) -> None:
    (photos / "b.bmp").write_text("not an image")
    (photos / "c.tiff").write_bytes((photos / "c.tiff").read_bytes()[:300])
    predictions = rgb_predictor.predict_files([photos, photos / "gone.png"])
    errors = {Path(prediction.source).name: prediction.error for prediction in predictions}
    assert [*errors] == ["a.png", "b.bmp", "c.tiff", "d e.png", "ü.webp", "gone.png"]
    assert [name for name, error in errors.items() if error is not None] == ["b.bmp", "c.tiff", "gone.png"]
    assert all(bool(prediction.labels) == (prediction.error is None) for prediction in predictions)
    assert same_labels(predictions[3], rgb_predictor.predict(photos / "more/d e.png"))
    with pytest.raises(VitralError, match=r"no prediction for .*b\.bmp"):
        _ = predictions[1].best


def test_only_unreadable_inputs_give_only_errors(rgb_predictor: Predictor, tmp_path: Path) -> None:
    predictions = list(rgb_predictor.predict_many([tmp_path / "x.png", b"", tmp_path], batch_size=2))
    assert all(prediction.error is not None for prediction in predictions)
    assert len(predictions) == 3
    assert list(rgb_predictor.predict_many([])) == []


def test_predicting_one_unreadable_image_raises(rgb_predictor: Predictor, tmp_path: Path) -> None:
    with pytest.raises(ImageDecodeError, match=r"gone\.png"):
        rgb_predictor.predict(tmp_path / "gone.png")


def test_a_folder_is_predicted_in_sorted_order(rgb_predictor: Predictor, photos: Path) -> None:
    names = [Path(prediction.source).name for prediction in rgb_predictor.predict_files([str(photos)])]
    assert names == ["a.png", "b.bmp", "c.tiff", "d e.png", "ü.webp"]


def test_a_folder_without_images_is_refused(rgb_predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(VitralError, match="no images in") as caught:
        rgb_predictor.predict_files([tmp_path])
    assert "PNG" in caught.value.hint


def test_a_greyscale_model_converts_colour_images_as_pillow_does(grey_predictor: Predictor) -> None:
    photo = smooth_photo(2)
    assert same_labels(grey_predictor.predict(photo), grey_predictor.predict(photo.convert("L")))


def test_an_rgb_model_accepts_greyscale_images(rgb_predictor: Predictor) -> None:
    photo = smooth_photo(2).convert("L")
    assert same_labels(rgb_predictor.predict(photo), rgb_predictor.predict(photo.convert("RGB")))


def test_a_model_with_two_channels_cannot_predict_images(tmp_path: Path) -> None:
    with pytest.raises(VitralError, match="2"):
        Predictor.load(save_random_model(tmp_path, channels=2), device="cpu").predict(smooth_photo(1))


def test_loading_twice_gives_the_same_predictions(rgb_predictor: Predictor) -> None:
    assert rgb_predictor.path is not None
    again = Predictor.load(str(rgb_predictor.path), device="cpu")
    assert again.classes == ANIMALS
    assert not again.model.training
    assert again.predict(smooth_photo(5)) == rgb_predictor.predict(smooth_photo(5))
    assert repr(again) == f"Predictor('{rgb_predictor.path}', 6 classes, 16×24 pixels, trained on 'nothing')"


def test_repr_of_a_prediction_shows_what_was_predicted() -> None:
    label = Label(name="ant", probability=0.75)
    assert repr(label) == "Label(name='ant', probability=0.75)"
    prediction = Prediction(source="a.png", labels=(label,), engine="fp32")
    assert repr(prediction) == f"Prediction(source='a.png', labels=({label!r},), engine='fp32')"


def test_evaluate_converts_images_and_counts_correct_predictions(rgb_predictor: Predictor) -> None:
    photos = [smooth_photo(seed, 16, 24) for seed in range(12)]
    images = torch.stack([torch.from_numpy(np.array(photo)).permute(2, 0, 1) for photo in photos])
    labels = torch.tensor([ANIMALS.index(rgb_predictor.predict(photo).best.name) for photo in photos])
    labels[:3] = (labels[:3] + 1) % 6
    assert rgb_predictor.evaluate(Split(images=images, labels=labels)).top1 == pytest.approx(0.75)
    small_greyscale = Split(images=images[:, :1, ::2, ::2], labels=labels)
    assert rgb_predictor.evaluate(small_greyscale).images == 12


def test_evaluate_refuses_labels_outside_the_classes(rgb_predictor: Predictor) -> None:
    split = Split(images=torch.zeros(2, 3, 16, 24, dtype=torch.uint8), labels=torch.tensor([0, 6]))
    with pytest.raises(VitralError, match="labels outside the model's 6 classes: 6"):
        rgb_predictor.evaluate(split)


def test_evaluate_refuses_a_dataset_name(grey_predictor: Predictor) -> None:
    with pytest.raises(VitralError, match=r"expected labelled images.*got 'photos'") as caught:
        grey_predictor.evaluate("photos")  # type: ignore[arg-type]
    assert "vitral.evaluate(model, data=NAME)" in caught.value.hint


def test_evaluate_refuses_models_without_an_accuracy(rgb_predictor: Predictor) -> None:
    config = replace(rgb_predictor.model_config, task="multilabel", calibration=Calibration(activation="sigmoid"))
    predictor = Predictor(rgb_predictor.model, config, rgb_predictor.hardware)
    split = Split(images=torch.zeros(8, 3, 16, 24, dtype=torch.uint8), labels=torch.ones(8, 6))
    with pytest.raises(VitralError, match="the task is multilabel") as caught:
        predictor.evaluate(split)
    assert "vitral.evaluate(model)" in caught.value.hint


@pytest.mark.parametrize("top", [0, -1])
def test_ranking_refuses_to_leave_out_the_best_label(top: int) -> None:
    with pytest.raises(VitralError, match=f"top must be at least 1, got {top}"):
        rank_labels(("ant", "bee"), (0.4, 0.6), top)


def test_the_reference_predictor_runs_the_module_itself(rgb_predictor: Predictor) -> None:
    reference = rgb_predictor.reference()
    images = torch.randint(0, 256, (7, 3, 16, 24), dtype=torch.uint8)
    expected = reference_logits(rgb_predictor.model, rgb_predictor.model_config.preprocessing, images)
    assert reference.engine.name == "reference"
    assert torch.equal(reference.logits(images), expected)
    assert reference.reference() is reference


def test_rank_labels_keeps_the_class_order_of_ties() -> None:
    labels = rank_labels(("a", "b", "c"), (0.25, 0.5, 0.25), None)
    assert [label.name for label in labels] == ["b", "a", "c"]


PREDICTIONS = [
    Prediction(
        source="a.png",
        labels=(Label(name="cat", probability=0.75), Label(name='a "dog"', probability=0.25)),
        is_ood=True,
        inverted=Label(name="cat", probability=0.5),
        engine="fp32",
    ),
    Prediction(source="b.png", error="b.png: not an image", engine="fp32"),
    Prediction(
        source="c.png",
        labels=(Label(name="cat", probability=0.6),),
        prediction_set=PredictionSet(labels=("cat", 'a "dog"'), coverage=0.95),
    ),
]


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_predictions_survive_the_round_trip_through_a_dictionary(prediction: Prediction) -> None:
    assert prediction_from_dict(prediction_to_dict(prediction)) == prediction


def test_csv_has_one_row_per_label_or_error() -> None:
    rows = [dict(zip(CSV_COLUMNS, row, strict=True)) for p in PREDICTIONS for row in csv_rows(p)]
    assert [row["label"] for row in rows] == ["cat", 'a "dog"', "", "cat"]
    assert [row["ood"] for row in rows] == ["true", "true", "", "false"]
    assert [row["error"] for row in rows] == ["", "", "b.png: not an image", ""]
    assert [row["engine"] for row in rows] == ["fp32", "fp32", "fp32", ""]
    assert json.loads(rows[-1]["prediction_set"]) == ["cat", 'a "dog"']
    assert [row["coverage"] for row in rows] == ["", "", "", "0.95"]


def test_a_label_with_threshold_zero_is_present_in_a_table() -> None:
    labels = (Label(name="cat", probability=0.2, threshold=0.0), Label(name="dog", probability=0.1, threshold=0.5))
    assert table_row(Prediction(source="a.png", labels=labels))["present"] == ["cat"]
    assert table_row(Prediction(source="a.png", labels=(Label(name="cat", probability=0.2),)))["present"] is None
