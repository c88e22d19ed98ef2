"""Features as files: what is read back is what was written, and what cannot be written is said beforehand."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from vitral.errors import VitralError
from vitral.reporting.feature_files import check_features_path, write_features

NAMES = ["a.jpg", "photos/b, with comma.png", 'quoted "c".png', "猫.webp"]


@pytest.fixture
def features() -> Tensor:
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.tensor([-20, 0, 20])
    values[0] = torch.tensor([0.1, 0.0, -1 / 3])
    return values


def test_npy_with_the_names_beside_it(features: Tensor, tmp_path: Path) -> None:
    path = write_features(NAMES, features, tmp_path / "out.v2" / "features.npy")
    assert sorted(file.name for file in path.parent.iterdir()) == ["features.names.txt", "features.npy"]
    found = np.load(path)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, features)
    assert (path.parent / "features.names.txt").read_text().splitlines() == NAMES


def test_csv_reads_back_bit_for_bit(features: Tensor, tmp_path: Path) -> None:
    path = write_features([Path(name) for name in NAMES], features, str(tmp_path / "features.CSV"))
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["file", "f0", "f1", "f2"]
    assert [row[0] for row in rows] == NAMES
    np.testing.assert_array_equal(np.array([row[1:] for row in rows]).astype(np.float32), features)
    assert rows[0][1:] == ["0.1", "0.0", "-0.33333334"]  # not 0.10000000149011612


def test_parquet_reads_back_bit_for_bit(features: Tensor, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = write_features(NAMES, features, tmp_path / "features.parquet")
    table = parquet.read_table(path)
    assert table.column_names == ["file", "features"]
    assert table["file"].to_pylist() == NAMES
    assert str(table.schema.field("features").type) == "fixed_size_list<element: float>[3]"
    np.testing.assert_array_equal(np.array(table["features"].to_pylist(), dtype=np.float32), features)
    odd = write_features(["caf\udce9.jpg"], features[:1], tmp_path / "odd.parquet")
    assert parquet.read_table(odd)["file"].to_pylist() == ["caf\\udce9.jpg"]


@pytest.mark.parametrize("ending", ["npy", "csv"])
def test_numbers_of_half_precision_and_with_gradients(ending: str, tmp_path: Path) -> None:
    half = torch.tensor([[0.5, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    path = write_features(["a"], half, tmp_path / f"features.{ending}")
    found = np.load(path) if ending == "npy" else np.loadtxt(path, delimiter=",", skiprows=1, usecols=(1, 2), ndmin=2)
    assert found.tolist() == [[0.5, -2.0]]


@pytest.mark.parametrize("ending", ["npy", "csv"])
def test_a_name_that_is_not_utf8_keeps_its_bytes(ending: str, features: Tensor, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    path = write_features([name], features[:1], tmp_path / f"features.{ending}")
    text = path if ending == "csv" else tmp_path / "features.names.txt"
    assert b"caf\xe9.jpg" in text.read_bytes()


def test_a_line_break_in_a_name_is_refused_for_npy_only(features: Tensor, tmp_path: Path) -> None:
    with pytest.raises(VitralError, match="line break") as caught:
        write_features(["a\nb.jpg"], features[:1], tmp_path / "features.npy")
    assert "features.csv" in caught.value.hint
    assert not list(tmp_path.iterdir())
    path = write_features(["a\nb.jpg"], features[:1], tmp_path / "features.csv")
    with path.open(newline="") as file:
        assert list(csv.reader(file))[1][0] == "a\nb.jpg"


@pytest.mark.parametrize("name", ["features.txt", "features", "features.npz", ".npy"])
def test_an_unknown_ending_names_the_known_ones(name: str, features: Tensor, tmp_path: Path) -> None:
    for refused in (lambda: check_features_path(name), lambda: write_features(NAMES, features, tmp_path / name)):
        with pytest.raises(VitralError) as caught:
            refused()
        assert caught.value.hint == "Known endings: .npy, .parquet, .csv"
    assert not list(tmp_path.iterdir())


def test_without_pyarrow_the_install_line(features: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(VitralError) as caught:
        write_features(NAMES, features, tmp_path / "features.parquet")
    assert caught.value.hint == "pip install 'vitral[data]'"
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "features.npy").mkdir()
    with pytest.raises(VitralError, match="is a folder"):
        check_features_path(tmp_path / "features.npy")


def test_a_file_in_the_way_of_the_folder(features: Tensor, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(VitralError, match="cannot make the folder"):
        write_features(NAMES, features, tmp_path / "out" / "features.csv")


def test_rows_must_match_names(features: Tensor, tmp_path: Path) -> None:
    for wrong in (features[:2], features[:, 0]):
        with pytest.raises(ValueError, match="one row a file"):
            write_features(NAMES, wrong, tmp_path / "features.npy")


def test_when_writing_fails_the_old_file_stays(
    features: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_features(NAMES, features, tmp_path / "features.csv")
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(VitralError, match="No space left"):
        write_features(NAMES, features + 1, path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["features.csv"]
