"""What commands say beside their answers: how another library's checkpoint was understood, and what is going on."""

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
from vitral import api as workshop
from vitral import weights
from vitral.cli import messages as beside
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.run import ModelCard


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs, and a checkpoint as transformers writes it, for ten digits."""
    place = tmp_path_factory.mktemp("beside")
    Image.new("L", (64, 48), 128).save(place / "photo.png")
    for index in range(24):
        photograph(place / "photos" / ("ants", "bees")[index % 2] / f"{index}.jpg", (index % 2 * 200, 90, 90), index)
    config = ViTConfig(image_size=(16, 16), patch_size=8, classes=10, width=64, depth=1, heads=4)
    seen = Preprocessing(image_size=(16, 16), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    digits = tuple(map(str, range(10)))
    card = ModelCard(architecture=config, preprocessing=seen, classes=digits, trained_on="x", epoch=1)
    weights.write((ViT(config), card), place / "theirs", to="transformers")
    return place


@pytest.mark.parametrize(
    "words",
    [
        "predict theirs photo.png",
        "embed theirs photo.png --out vectors.npy",
        "probe photos --init theirs",
        "evaluate theirs --data digits --json",
        "compare theirs theirs --data digits",
        "report theirs --data digits --fast --out report.html",
        "bench theirs --data digits --images 32 --batches 1 --threads 1 --seconds 0.001",
        "export theirs --data digits --images 8 --to torch --out model.pt2",
        "explain theirs photo.png --method attention",
        "explain theirs --faithfulness digits --method attention --images 2",
        "walk photo.png --model theirs --out walk.html",
        "figures theirs --images photo.png --out figures",
        "convert theirs converted --to vitral",
        "push theirs hf:me/mine --dry-run",
        "doctor photos --init theirs",
        "data pack photos --init theirs --out packed",
        "train photos --init theirs --epochs 1 --out run",
    ],
)
def test_every_command_says_how_it_understood_a_checkpoint(
    place: Path, words: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("vitral.doctor.advice.TIMED", 0.0)
    leave_out_pictures(monkeypatch)
    _, said, beside_it = command(*shlex.split(words))
    notes = Predictor.load(place / "theirs").notes
    assert any("transformers: patches of 8" in note for note in notes)
    for note in notes:
        assert f"  {note}\n" in beside_it or f"{note}\n" in said
    if "--json" in words:
        json.loads(said)


@pytest.mark.usefixtures("no_pictures")
def test_another_resolution_is_one_flag_and_the_hint_of_convert_names_it(
    place: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    _, _, complaint = command("convert", "theirs", "larger", "--image-size", 32)
    told = complaint.partition("for another size: vitral ")[2]
    assert told == "train DATA --init theirs --model.image-size H W\n"
    words = told.replace("DATA", "photos").replace("H W", "32 24").split()
    code, said, _ = command(*words, "--epochs", 1, "--out", "larger")
    assert code == 0
    assert "positions resampled from 2×2 to 4×3" in said
    assert command("predict", "larger", "photo.png")[0] == 0
    assert Predictor.load("larger").card.preprocessing.image_size == (32, 24)


def test_the_server_says_it_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    with server("theirs") as running:
        (model,) = running.logged("listening")[0]["models"]
    assert model["understood"] == list(Predictor.load(place / "theirs").notes)


def test_what_is_measured_on_a_checkpoint_is_not_said_to_be_kept(
    place: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = sorted((place / "theirs").iterdir())
    words = "bench theirs --data digits --images 32 --batches 1 --threads 1 --seconds 0.001"
    _, said, _ = command(*words.split())
    assert "vitral convert theirs FOLDER" in said
    assert "use it on this CPU" not in said
    assert sorted((place / "theirs").iterdir()) == before


def test_a_report_says_what_it_is_at(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(workshop, "DAMAGED", 4)
    theirs = place / "theirs"
    workshop.report(theirs, data="digits", out=place / "heard.html", watch=heard.append)
    assert re.fullmatch(r"asking \d+ test images", heard[0])
    assert heard[1] == "asking 4 of them damaged, in 0 of 25 ways"
    assert heard[-2] == "asking 4 of them damaged, in 25 of 25 ways"
    assert heard[-1] == "looking at the data and the mistakes"


def test_a_checkpoint_has_no_validation_images_for_thresholds(place: Path) -> None:
    with pytest.raises(VitralError, match="does not say what it was trained on\nthresholds are chosen"):
        workshop.evaluate(place / "theirs", data="digits", unknown=str(place / "photos"))


@pytest.mark.parametrize("terminal", [True, False])
def test_the_status_is_one_line_on_a_terminal_and_nothing_elsewhere(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    made = Console(file=screen, force_terminal=terminal, width=80)
    monkeypatch.setattr("rich.console.Console", lambda **_: made)
    with beside.status() as watch:
        watch("asking 7 images")
    shown = screen.getvalue()
    assert ("asking 7 images" in shown) == terminal
    assert shown.count("\n") <= terminal
    assert shown == "" or shown.rstrip("\n").endswith("\x1b[2K"), "the line is wiped"


def test_what_has_to_be_fetched_is_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAL_HOME", str(tmp_path / "empty"))
    beside.to_be_fetched("mnist", None, "mnist", "digits", "somewhere/photos")
    assert capsys.readouterr().err == "  fetching mnist: 55 MB, once\n"
