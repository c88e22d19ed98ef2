"""Feature files: values survive a round trip, and invalid paths are refused before anything is computed."""

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


def test_npy_has_a_file_of_names_next_to_it(features: Tensor, tmp_path: Path) -> None:
    path = write_features(NAMES, features, tmp_path / "out.v2" / "features.npy")
    assert sorted(file.name for file in path.parent.iterdir()) == ["features.names.txt", "features.npy"]
    loaded = np.load(path)
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(loaded, features)
    assert (path.parent / "features.names.txt").read_text().splitlines() == NAMES


def test_csv_round_trip_is_exact(features: Tensor, tmp_path: Path) -> None:
    path = write_features([Path(name) for name in NAMES], features, str(tmp_path / "features.CSV"))
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["file", "f0", "f1", "f2"]
    assert [row[0] for row in rows] == NAMES
    np.testing.assert_array_equal(np.array([row[1:] for row in rows]).astype(np.float32), features)
    assert rows[0][1:] == ["0.1", "0.0", "-0.33333334"]  # not 0.10000000149011612


def test_parquet_round_trip_is_exact(features: Tensor, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = write_features(NAMES, features, tmp_path / "features.parquet")
    table = parquet.read_table(path)
    assert table.column_names == ["file", "features"]
    assert table["file"].to_pylist() == NAMES
    assert str(table.schema.field("features").type) == "fixed_size_list<element: float>[3]"
    np.testing.assert_array_equal(np.array(table["features"].to_pylist(), dtype=np.float32), features)
    undecodable = write_features(["caf\udce9.jpg"], features[:1], tmp_path / "undecodable.parquet")
    assert parquet.read_table(undecodable)["file"].to_pylist() == ["caf\\udce9.jpg"]


@pytest.mark.parametrize("extension", ["npy", "csv"])
def test_half_precision_and_gradients_are_accepted(extension: str, tmp_path: Path) -> None:
    half = torch.tensor([[0.5, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    path = write_features(["a"], half, tmp_path / f"features.{extension}")
    loaded = (
        np.load(path) if extension == "npy" else np.loadtxt(path, delimiter=",", skiprows=1, usecols=(1, 2), ndmin=2)
    )
    assert loaded.tolist() == [[0.5, -2.0]]


@pytest.mark.parametrize("extension", ["npy", "csv"])
def test_file_name_that_is_not_utf8_keeps_its_bytes(extension: str, features: Tensor, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    path = write_features([name], features[:1], tmp_path / f"features.{extension}")
    names_file = path if extension == "csv" else tmp_path / "features.names.txt"
    assert b"caf\xe9.jpg" in names_file.read_bytes()


def test_line_break_in_a_name_is_refused_for_npy_only(features: Tensor, tmp_path: Path) -> None:
    with pytest.raises(VitralError, match="line break") as error:
        write_features(["a\nb.jpg"], features[:1], tmp_path / "features.npy")
    assert "features.csv" in error.value.hint
    assert not list(tmp_path.iterdir())
    path = write_features(["a\nb.jpg"], features[:1], tmp_path / "features.csv")
    with path.open(newline="") as file:
        assert list(csv.reader(file))[1][0] == "a\nb.jpg"


@pytest.mark.parametrize("name", ["features.txt", "features", "features.npz", ".npy"])
def test_unsupported_extension_lists_the_supported_ones(name: str, features: Tensor, tmp_path: Path) -> None:
    for call in (lambda: check_features_path(name), lambda: write_features(NAMES, features, tmp_path / name)):
        with pytest.raises(VitralError) as error:
            call()
        assert error.value.hint == "Supported extensions: .npy, .parquet, .csv"
    assert not list(tmp_path.iterdir())


def test_missing_pyarrow_names_the_install_command(
    features: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(VitralError) as error:
        write_features(NAMES, features, tmp_path / "features.parquet")
    assert error.value.hint == "pip install 'vitral[data]'"
    assert not list(tmp_path.iterdir())


def test_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "features.npy").mkdir()
    with pytest.raises(VitralError, match="is a folder"):
        check_features_path(tmp_path / "features.npy")


def test_file_in_place_of_the_folder_is_reported(features: Tensor, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(VitralError, match="cannot create"):
        write_features(NAMES, features, tmp_path / "out" / "features.csv")


def test_number_of_rows_must_match_the_names(features: Tensor, tmp_path: Path) -> None:
    for mismatched in (features[:2], features[:, 0]):
        with pytest.raises(ValueError, match="one row per file"):
            write_features(NAMES, mismatched, tmp_path / "features.npy")


def test_failed_write_keeps_the_old_file(features: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_features(NAMES, features, tmp_path / "features.csv")
    before = path.read_bytes()

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(VitralError, match="No space left"):
        write_features(NAMES, features + 1, path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["features.csv"]
