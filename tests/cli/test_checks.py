"""Mistyped names are reported before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from vitral.cli.checks import check_inputs
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
    commands = [
        line.split()
        for line in """
        predict nomodel digit.png
        predict runs/nomodel digit.png
        predict mnist missing.png
        predict mnist digit.png --labels missing.txt
        predict mnist digit.png --top x
        predict mnist digit.png --top 0
        predict mnist digit.png --engine fast
        predict photos digit.png
        embed nomodel digit.png --out x.npy
        embed mnist missing.png --out x.npy
        train nosuchfolder
        train photos/nosuchfolder
        train list.csv
        train --resume nowhere
        train mnist --recipe missing.toml
        train mnist --recipe mnsit
        train photos --init-from missing.safetensors
        train mnist --epochs many
        evaluate nomodel
        evaluate mnist --data nosuchfolder
        evaluate mnist --ood nosuchfolder
        evaluate mnist --split all
        compare mnist nomodel
        report nomodel
        bench nomodel
        probe nosuchfolder --init-from mnist
        explain nomodel digit.png
        explain mnist missing.png
        walk missing.png
        figures nomodel
        push nomodel hf:me/x
        convert nomodel out
        export nomodel
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
