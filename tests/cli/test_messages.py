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

from data.files.test_listing import photograph
from support.common import Command, leave_out_pictures
from support.served import server
from vitral import api, weights
from vitral.cli import messages
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs, and a checkpoint as transformers writes it, for ten digits."""
    place = tmp_path_factory.mktemp("messages")
    Image.new("L", (64, 48), 128).save(place / "photo.png")
    for index in range(24):
        photograph(place / "photos" / ("ants", "bees")[index % 2] / f"{index}.jpg", (index % 2 * 200, 90, 90), index)
    config = ViTConfig(image_size=(16, 16), patch_size=8, num_classes=10, width=64, depth=1, heads=4)
    seen = Preprocessing(image_size=(16, 16), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    digits = tuple(map(str, range(10)))
    card = ModelConfig(architecture=config, preprocessing=seen, classes=digits, trained_on="x", epoch=1)
    weights.write((ViT(config), card), place / "theirs", to="transformers")
    return place


@pytest.mark.parametrize(
    "words",
    [
        "predict theirs photo.png",
        "embed theirs photo.png --out vectors.npy",
        "probe photos --init-from theirs",
        "evaluate theirs --data digits --json",
        "compare theirs theirs --data digits",
        "report theirs --data digits --fast --out report.html",
        "bench theirs --data digits --images 32 --batch-sizes 1 --threads 1 --seconds 0.001",
        "export theirs --data digits --images 8 --to torch --out model.pt2",
        "explain theirs photo.png --method attention",
        "explain theirs --faithfulness digits --method attention --images 2",
        "walk photo.png --model theirs --out walk.html",
        "figures theirs --images photo.png --out figures",
        "convert theirs converted --to vitral",
        "push theirs hf:me/mine --dry-run",
        "doctor photos --init-from theirs",
        "data pack photos --init-from theirs --out packed",
        "train photos --init-from theirs --epochs 1 --out run",
    ],
)
def test_every_command_prints_how_it_interpreted_a_checkpoint(
    place: Path, words: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("vitral.doctor.advice.TIMED", 0.0)
    leave_out_pictures(monkeypatch)
    _, out, err = command(*shlex.split(words))
    notes = Predictor.load(place / "theirs").notes
    assert any("transformers: patches of 8" in note for note in notes)
    for note in notes:
        assert f"  {note}\n" in err or f"{note}\n" in out
    if "--json" in words:
        json.loads(out)


@pytest.mark.usefixtures("no_pictures")
def test_convert_hints_at_the_flag_for_another_resolution(
    place: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    _, _, complaint = command("convert", "theirs", "larger", "--image-size", 32)
    told = complaint.partition("for another size: vitral ")[2]
    assert told == "train DATA --init-from theirs --model.image-size H W\n"
    words = told.replace("DATA", "photos").replace("H W", "32 24").split()
    code, said, _ = command(*words, "--epochs", 1, "--out", "larger")
    assert code == 0
    assert "positions resampled from 2×2 to 4×3" in said
    assert command("predict", "larger", "photo.png")[0] == 0
    assert Predictor.load("larger").model_config.preprocessing.image_size == (32, 24)


def test_the_server_logs_checkpoint_notes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    with server("theirs") as running:
        (model,) = running.logged("listening")[0]["models"]
    assert model["understood"] == list(Predictor.load(place / "theirs").notes)


def test_bench_stores_nothing_next_to_a_checkpoint(
    place: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = sorted((place / "theirs").iterdir())
    words = "bench theirs --data digits --images 32 --batch-sizes 1 --threads 1 --seconds 0.001"
    _, said, _ = command(*words.split())
    assert "vitral convert theirs FOLDER" in said
    assert "use it on this CPU" not in said
    assert sorted((place / "theirs").iterdir()) == before


def test_report_logs_its_progress(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(api, "REPORT_CORRUPTED_IMAGES", 4)
    theirs = place / "theirs"
    api.report(theirs, data="digits", out=place / "heard.html", log=heard.append)
    assert re.fullmatch(r"asking \d+ test images", heard[0])
    assert heard[1] == "asking 4 of them damaged, in 0 of 25 ways"
    assert heard[-2] == "asking 4 of them damaged, in 25 of 25 ways"
    assert heard[-1] == "looking at the data and the mistakes"


def test_ood_needs_validation_images(place: Path) -> None:
    with pytest.raises(VitralError, match="does not say what it was trained on\nthresholds are chosen"):
        api.evaluate(place / "theirs", data="digits", ood=str(place / "photos"))


@pytest.mark.parametrize("terminal", [True, False])
def test_status_line_is_shown_on_terminals_only(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    made = Console(file=screen, force_terminal=terminal, width=80)
    monkeypatch.setattr("rich.console.Console", lambda **_: made)
    with messages.status_line() as watch:
        watch("asking 7 images")
    shown = screen.getvalue()
    assert ("asking 7 images" in shown) == terminal
    assert shown.count("\n") <= terminal
    assert shown == "" or shown.rstrip("\n").endswith("\x1b[2K"), "the line is erased"


def test_missing_downloads_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAL_HOME", str(tmp_path / "empty"))
    messages.announce_downloads("mnist", None, "mnist", "digits", "somewhere/photos")
    assert capsys.readouterr().err == "  downloading mnist (55 MB)\n"
