"""CSV lists with several labels or real values per image."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitral.data.files.csv_list import read_csv_list
from vitral.data.targets import LabelOptions
from vitral.errors import VitralError


def labels_of(path: Path, text: str, options: LabelOptions | None = None) -> list[object]:
    path.write_text(text, encoding="utf-8")
    listed = read_csv_list(path, options or LabelOptions())
    return [listed.task, listed.classes, [label for _, label in listed.files["train"]]]


@pytest.mark.parametrize("separator", ["|", ";"])
def test_labels_column_is_split_by_the_separator_it_contains(tmp_path: Path, separator: str) -> None:
    text = f"path,labels\na.png,cat{separator} dog\nb.png,\nc.png,cat{separator}cat\n"
    assert labels_of(tmp_path / "l.csv", text) == ["multilabel", (), [("cat", "dog"), (), ("cat",)]]


def test_separator_can_be_given(tmp_path: Path) -> None:
    options = LabelOptions(separator="/")
    assert labels_of(tmp_path / "l.csv", "path,labels\na.png,x|y/z\n", options)[2] == [("x|y", "z")]


def test_columns_of_zeros_and_ones_are_classes_in_their_order(tmp_path: Path) -> None:
    text = "path,split,Zebra,ant\na.png,train,1,0\nb.png,train,1.0,True\nc.png,train,0,false\n"
    expected = ["multilabel", ("Zebra", "ant"), [("Zebra",), ("Zebra", "ant"), ()]]
    assert labels_of(tmp_path / "l.csv", text) == expected


def test_target_columns_are_numbers(tmp_path: Path) -> None:
    assert labels_of(tmp_path / "l.csv", "path,target\na.png,1.5\nb.png,-2e3\n") == [
        "regression", ("target",), [(1.5,), (-2000.0,)],
    ]  # fmt: skip
    options = LabelOptions(targets=("weight", "age"))
    assert labels_of(tmp_path / "l.csv", "path,age,weight,note\na.png,30,71.5,x\n", options) == [
        "regression", ("weight", "age"), [(71.5, 30.0)],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("path,labels\na,x|y\nb,x;y\n", LabelOptions(), "separates labels by | (line 2) and by ; (line 3)"),
        ("path,cat,dog\na,1,0\nb,2,0\n", LabelOptions(), "line 3: cat is '2', expected 0 or 1"),
        ("path,target\na,1\nb,\n", LabelOptions(), "line 3: target is '', expected a number"),
        ("path,target\na,nan\n", LabelOptions(), "line 2: target is 'nan', expected a number"),
        ("path,age\na,1\n", LabelOptions(targets=("agee",)), "has no column 'agee'"),
        ("path,labels\na,x\n", LabelOptions(task="regression"), "has no column target for the task regression"),
        ("path,age\na,1\n", LabelOptions(task="multilabel", targets=("age",)), "the task is multilabel"),
    ],
)
def test_bad_list_is_an_error_with_line_and_value(
    tmp_path: Path, text: str, options: LabelOptions, message: str
) -> None:
    with pytest.raises(VitralError) as caught:
        labels_of(tmp_path / "l.csv", text, options)
    assert message in caught.value.what
