"""Notes on stderr: how a checkpoint of another library was interpreted, downloads and the status line."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from support.common import Command, skip_figures
from support.photos import save_photo
from support.served import server
from vitral import api, weights
from vitral.cli import messages
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs, and a checkpoint as transformers writes it, for ten digits."""
    folder = tmp_path_factory.mktemp("messages")
    Image.new("L", (64, 48), 128).save(folder / "photo.png")
    for index in range(24):
        save_photo(folder / "photos" / ("ants", "bees")[index % 2] / f"{index}.jpg", (index % 2 * 200, 90, 90), index)
    config = ViTConfig(image_size=(16, 16), patch_size=8, num_classes=10, width=64, depth=1, heads=4)
    preprocessing = Preprocessing(image_size=(16, 16), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    digits = tuple(map(str, range(10)))
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=digits, trained_on="x", epoch=1
    )
    weights.write((ViT(config), model_config), folder / "checkpoint", to="transformers")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "predict checkpoint photo.png",
        "embed checkpoint photo.png --out vectors.npy",
        "probe photos --init-from checkpoint",
        "evaluate checkpoint --data digits --json",
        "compare checkpoint checkpoint --data digits",
        "report checkpoint --data digits --fast --out report.html",
        "bench checkpoint --data digits --images 32 --batch-sizes 1 --threads 1 --seconds 0.001",
        pytest.param("export checkpoint --data digits --images 8 --to torch --out model.pt2", marks=pytest.mark.slow),
        "explain checkpoint photo.png --method attention",
        "explain checkpoint --faithfulness digits --method attention --images 2",
        "walk photo.png --model checkpoint --out walk.html",
        pytest.param("figures checkpoint --images photo.png --out figures", marks=pytest.mark.slow),
        "convert checkpoint converted --to vitral",
        "push checkpoint hf:me/mine --dry-run",
        "doctor photos --init-from checkpoint",
        "data pack photos --init-from checkpoint --out packed",
        "train photos --init-from checkpoint --epochs 1 --out run",
    ],
)
def test_every_command_prints_how_it_interpreted_a_checkpoint(
    folder: Path, words: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("vitral.doctor.estimates.BENCHMARK_SECONDS", 0.0)
    skip_figures(monkeypatch)
    _, out, err = command(*shlex.split(words))
    notes = Predictor.load(folder / "checkpoint").notes
    assert any("transformers: patch size 8" in note for note in notes)
    for note in notes:
        assert f"  {note}\n" in err or f"{note}\n" in out
    if "--json" in words:
        json.loads(out)
    if words.startswith("probe"):
        assert re.search(r"Probing features of 24 images: about \d+ s on \d+ core", err)


@pytest.mark.usefixtures("no_figures")
def test_convert_hints_at_the_flag_for_another_resolution(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    _, _, err = command("convert", "checkpoint", "larger", "--image-size", 32)
    suggestion = err.partition("for another size: vitral ")[2]
    assert suggestion == "train DATA --init-from checkpoint --model.image-size H W\n"
    words = suggestion.replace("DATA", "photos").replace("H W", "32 24").split()
    code, out, _ = command(*words, "--epochs", 1, "--out", "larger")
    assert code == 0
    assert "positions resampled from 2×2 to 4×3" in out
    assert command("predict", "larger", "photo.png")[0] == 0
    assert Predictor.load("larger").model_config.preprocessing.image_size == (32, 24)


@pytest.mark.slow
def test_the_server_logs_checkpoint_notes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with server("checkpoint") as running:
        (model,) = running.log_entries("listening")[0]["models"]
    assert model["notes"] == list(Predictor.load(folder / "checkpoint").notes)


def test_bench_stores_nothing_next_to_a_checkpoint(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = sorted((folder / "checkpoint").iterdir())
    words = "bench checkpoint --data digits --images 32 --batch-sizes 1 --threads 1 --seconds 0.001"
    _, out, _ = command(*words.split())
    assert "vitral convert checkpoint FOLDER" in out
    assert "use it on this CPU" not in out
    assert sorted((folder / "checkpoint").iterdir()) == before


def test_report_logs_its_progress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("vitral.api.evaluation.REPORT_CORRUPTED_IMAGES", 4)
    checkpoint = folder / "checkpoint"
    api.report(checkpoint, data="digits", out=folder / "report.html", log=lines.append)
    assert re.search(r"\d+ test images", lines[0])
    assert any("corrupted images: 100% done" in line for line in lines)
    assert lines[-1] == "Rendering the report"


def test_ood_needs_validation_images(folder: Path) -> None:
    with pytest.raises(VitralError, match="does not record its training dataset"):
        api.evaluate(folder / "checkpoint", data="digits", ood=str(folder / "photos"))


@pytest.mark.parametrize("terminal", [True, False])
def test_status_line_is_shown_on_terminals_only(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=80)
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    with messages.status_line() as log:
        log("Evaluating 7 images")
    shown = screen.getvalue()
    assert ("Evaluating 7 images" in shown) == terminal
    assert shown.count("\n") <= terminal
    assert shown == "" or shown.rstrip("\n").endswith("\x1b[2K"), "the line is erased"


def test_missing_downloads_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAL_HOME", str(tmp_path / "empty"))
    messages.announce_downloads("mnist", None, "mnist", "digits", "somewhere/photos")
    assert capsys.readouterr().err == "  downloading mnist (55 MB on disk)\n"
