"""Predictions as text, JSON lines and CSV."""

from __future__ import annotations

import csv
import io
import json
import unicodedata
from dataclasses import replace

import pytest

from vitral.cli.output import display_width, label_text, print_predictions
from vitral.inference.prediction import CSV_COLUMNS, Label, Prediction, PredictionSet

BOTTLE = Prediction(
    source="bottle.jpg",
    labels=(Label(name="glass", probability=0.944), Label(name="plastic", probability=0.041)),
)
UNKNOWN = Prediction(source="cat.png", labels=(Label(name="paper", probability=0.41),), is_ood=True)
BROKEN = Prediction(source="broken.png", error="broken.png: not an image")


def test_text_has_one_aligned_line_per_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_predictions([BOTTLE, UNKNOWN], "text") == 0
    assert capsys.readouterr().out.splitlines() == [
        "bottle.jpg   glass 94%, plastic 4%",
        "cat.png      unknown (unlike anything in the training set; closest class: paper 41%)",
    ]


def test_wide_characters_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["개미.png", unicodedata.normalize("NFD", "개미.png"), "12345678"]
    print_predictions([Prediction(source=name, labels=BOTTLE.labels) for name in names], "text")
    lines = capsys.readouterr().out.splitlines()
    assert {display_width(line.partition("glass")[0]) for line in lines} == {len("12345678") + 3}


def test_inverted_brightness_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    inverted = Label(name="seven", probability=0.9)
    print_predictions([Prediction(source="7.png", labels=BOTTLE.labels, inverted=inverted)], "text")
    assert capsys.readouterr().out.endswith("; with inverted brightness: seven 90%\n")


def test_prediction_set_is_shown_if_it_has_several_classes(capsys: pytest.CaptureFixture[str]) -> None:
    label_sets = [PredictionSet(labels=labels, coverage=0.9) for labels in (("glass", "plastic"), ("glass",))]
    known = [replace(BOTTLE, prediction_set=label_set) for label_set in label_sets]
    print_predictions([*known, replace(UNKNOWN, prediction_set=label_sets[0])], "text")
    assert capsys.readouterr().out.splitlines() == [
        "bottle.jpg   glass 94%, plastic 4%; one of: glass, plastic (90% coverage)",
        "bottle.jpg   glass 94%, plastic 4%",
        "cat.png      unknown (unlike anything in the training set; closest class: paper 41%)",
    ]


def test_unreadable_files_are_reported_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_predictions([BOTTLE, BROKEN], "text") == 1
    printed = capsys.readouterr()
    assert "broken" not in printed.out
    assert printed.err == "error: broken.png: not an image\n       1 of 2 files could not be read\n"


def test_json_has_one_object_per_image(capsys: pytest.CaptureFixture[str]) -> None:
    print_predictions([BOTTLE, BROKEN], "json")
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["file"] == "bottle.jpg"
    assert first["labels"][0] == {"name": "glass", "probability": 0.944}
    assert second["error"] == "broken.png: not an image"


def test_csv_has_one_row_per_label(capsys: pytest.CaptureFixture[str]) -> None:
    print_predictions([BOTTLE, BROKEN], "csv")
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[0] == list(CSV_COLUMNS)
    assert [row[:3] for row in rows[1:]] == [
        ["bottle.jpg", "1", "glass"],
        ["bottle.jpg", "2", "plastic"],
        ["broken.png", "", ""],
    ]


@pytest.mark.parametrize(
    ("probability", "text"), [(0.94, "94%"), (0.001, "<1%"), (0.996, ">99%"), (0.9999, "100%"), (1.0, "100%")]
)
def test_percentages_do_not_round_to_certainty(probability: float, text: str) -> None:
    assert label_text(Label(name="glass", probability=probability)) == f"glass {text}"
