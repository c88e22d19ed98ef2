"""Mistyped names are reported before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from vitral.cli.checks import check_inputs, check_output
from vitral.errors import VitralError

# Runs a command in this process and prints whether torch was imported.
SCRIPT = """
import sys
from vitral.cli.main import main
for words in {commands!r}:
    try:
        main(words)
    except SystemExit as stop:
        print(stop.code, "torch" in sys.modules, *words)
"""


def test_mistyped_names_are_reported_without_importing_torch(tmp_path: Path) -> None:
    Image.new("L", (28, 28)).save(tmp_path / "digit.png")
    (tmp_path / "photos").mkdir()
    (tmp_path / "model.safetensors").touch()
    commands = [
        line.split()
        for line in """
        predict nomodel digit.png
        predict runs/nomodel digit.png
        predict mnist missing.png
        predict mnist digit.png --labels missing.txt
        predict mnist digit.png --out digit.png/predictions.csv
        predict mnist digit.png --top x
        predict mnist digit.png --top 0
        predict mnist digit.png --engine fast
        predict photos digit.png
        embed nomodel digit.png --out x.npy
        embed mnist missing.png --out x.npy
        embed mnist digit.png --out digit.png/x.npy
        train nosuchfolder
        train photos/nosuchfolder
        train list.csv
        train photo
        train digit.png
        train model.safetensors
        train photos --out digit.png/run
        train --resume nowhere
        train mnist --recipe missing.toml
        train mnist --recipe mnsit
        train photos --init-from missing.safetensors
        train mnist --epochs many
        evaluate nomodel
        evaluate mnist --data nosuchfolder
        evaluate mnist --ood nosuchfolder
        evaluate mnist --figures digit.png/figures
        evaluate mnist --split all
        compare mnist nomodel
        report nomodel
        report mnist --out digit.png/report.html
        bench nomodel
        probe nosuchfolder --init-from mnist
        explain nomodel digit.png
        explain mnist missing.png
        explain mnist digit.png --out digit.png/maps
        walk missing.png
        figures nomodel
        push nomodel hf:me/x
        convert nomodel out
        export nomodel
        export mnist --out digit.png/model.onnx
        doctor nosuchfolder
        serve nomodel
        data fetch nosuchdata
        models show nomodel
        """.strip().splitlines()
    ]
    script = SCRIPT.format(commands=commands)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    results = done.stdout.splitlines()
    assert results == [f"2 False {' '.join(words)}" for words in commands], done.stderr
    errors = done.stderr.splitlines()
    assert len(errors) == 2 * len(commands), done.stderr
    assert all(line.startswith("error: ") for line in errors[::2])


def test_inputs_that_exist_are_accepted(tmp_path: Path) -> None:
    Image.new("L", (28, 28)).save(tmp_path / "digit.png")
    check_inputs("mnist", "bundled:mnist", "hf:owner/name", None)
    check_inputs(data="mnist")
    check_inputs(data=str(tmp_path))
    check_inputs(data="https://example.org/a-{0..9}.tar")
    check_inputs(images=[tmp_path / "missing.png", tmp_path / "digit.png"])
    check_inputs(recipe="mnist")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("photo", "no dataset or folder named 'photo'. Did you mean 'photos'?"),
        ("./photo", "no folder or list named ./photo. Did you mean 'photos'?"),
        ("cifar01", "no dataset or folder named 'cifar01'. Did you mean 'cifar10'?"),
        ("nothing-similar", "no dataset or folder named 'nothing-similar'"),
        ("digit.png", "digit.png is an image, not a dataset"),
        ("model.safetensors", "model.safetensors is a model, not a dataset"),
        ("./runs/mine", "./runs/mine is a model, not a dataset"),
    ],
)
def test_wrong_datasets_are_named(data: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("photos", "runs/mine/figures"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("model.safetensors", "runs/mine/recipe.toml"):
        (tmp_path / file).touch()
    Image.new("L", (28, 28)).save(tmp_path / "digit.png")
    with pytest.raises(VitralError) as caught:
        check_inputs(data=data)
    assert caught.value.what == message


def test_output_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for path in (None, Path("file"), Path("new/folder/file"), tmp_path):
        check_output(path)
    with pytest.raises(VitralError, match=r"cannot write file/deeper/features\.npy: file is not a folder"):
        check_output(Path("file/deeper/features.npy"))
    Path("new").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write to any folder
    with pytest.raises(VitralError, match="no permission to write to new"):
        check_output(Path("new/features.npy"))


def test_several_missing_images_are_listed(tmp_path: Path) -> None:
    with pytest.raises(VitralError, match=r"none of these files exists: a\.png, b\.png"):
        check_inputs(images=[Path("a.png"), Path("b.png")])


def test_sources_of_unlabelled_images_are_checked_without_importing_torch(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    check_inputs(sources=[str(tmp_path / "photos"), "mnist", "shards/{0..9}.tar"])
    with pytest.raises(VitralError, match=r"no folder, list or dataset named 'mnits'\. Did you mean 'mnist'\?"):
        check_inputs(sources=[str(tmp_path / "photos"), "mnits"])
    code = (
        "import sys; from vitral.cli.checks import check_inputs; check_inputs(sources=['mnist']); print(*sys.modules)"
    )
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "vitral.data.names" in modules
    assert "torch" not in modules
