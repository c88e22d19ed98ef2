"""What the README tells people to type works as it stands there, on a smaller set and for fewer epochs."""

from __future__ import annotations

import re
import shlex
import shutil
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from PIL import Image

from support.common import leave_out_pictures
from support.photos import save_photo
from support.served import server
from vitral import api as workshop
from vitral import weights
from vitral.cli import main as cli
from vitral.data.preprocess import Preprocessing
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"`(vitral [^`]+)`", README)
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the README's reader has it: photographs, a run, and a checkpoint of another library."""
    place = tmp_path_factory.mktemp("reader")
    (place / "folder").mkdir()
    (place / "names.txt").write_text("ants\nbees\nwasps\n")
    for name in ("photo.png", "folder/a.png"):
        Image.new("L", (64, 48), 128).save(place / name)
    for index in range(24):
        save_photo(place / "photos" / ("ants", "bees")[index % 2] / f"{index}.jpg", (index % 2 * 200, 90, 90), index)
    run = place / "runs" / "mine"
    with pytest.MonkeyPatch.context() as patched:
        leave_out_pictures(patched)
        workshop.train("digits", epochs=1, out=run, **{"model.width": 32, "model.depth": 2, "model.heads": 2})
    shutil.copytree(run, place / "runs" / "other")
    config = ViTConfig(image_size=(32, 32), patch_size=8, num_classes=3, width=192, depth=1, heads=3)
    seen = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    card = ModelConfig(architecture=config, preprocessing=seen, classes=("a", "b", "c"), trained_on="x", epoch=1)
    weights.write((ViT(config), card), place / "model.safetensors", to="timm")
    return place


def quick(command: str) -> list[str]:
    """The command, with a smaller set, fewer epochs and a folder of its own."""
    words = shlex.split(command)
    if words[1] == "train" and "--resume" not in words:
        words = ["digits" if word == "mnist" else word for word in words]
        if "--epochs" in words:
            words[words.index("--epochs") + 1] = "1"
        else:
            words += ["--epochs", "1"]
    if words[1] == "bench":
        words += ["--seconds", "0.01", "--batch-sizes", "1", "--threads", "1", "--images", "64"]
    return words[1:]


def test_the_readme_shows_every_command():
    told = {command.split()[1] for command in COMMANDS} | {"demo"}
    assert told == set(cli.COMMANDS)


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--resume" not in c and c.split()[1] != "serve"])
def test_the_command_works(place, monkeypatch, request, capsys, command):
    """In this process, which has imported torch already: processes of their own have their tests elsewhere."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("vitral.doctor.advice.TIMED", 0.0)
    if command != "vitral train mnist":  # of the trainings one draws its pictures
        request.getfixturevalue("no_pictures")
    with pytest.raises(SystemExit) as stop:
        cli.main(quick(command))
    printed = capsys.readouterr()
    assert not stop.value.code, printed.err
    assert printed.out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[1] == "serve"])
def test_the_server_answers(place, monkeypatch, command):
    monkeypatch.chdir(place)
    with server(*shlex.split(command)[2:]) as running:
        assert httpx.get(f"{running.url}/v1/models").json()["models"][0]["name"] == Path(command.split()[2]).name


def test_the_resume_command_goes_on(place, monkeypatch, no_pictures):
    (command,) = [c for c in COMMANDS if "--resume" in c]
    (place / "runs" / "mine" / "test.json").unlink(missing_ok=True)
    (place / "runs" / "mine" / "model" / "config.json").unlink(missing_ok=True)
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit) as stop:
        cli.main(quick(command))
    assert not stop.value.code
    assert (place / "runs" / "mine" / "model" / "config.json").is_file()


@pytest.mark.parametrize("block", PYTHON)
def test_the_python_works(place, monkeypatch, no_pictures, block):
    monkeypatch.chdir(place)
    exec(compile(block.replace("epochs=20", "epochs=1"), "README.md", "exec"), {})


def test_make_has_the_two_commands():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_every_link_leads_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


DOCS = [
    command
    for page in ("shipping.md", "scaling.md", "deploy.md")
    for command in re.findall(
        r"(?:^    |`)(vitral [a-z][^`\n#]*?)(?:  +#|`|$)",
        (ROOT / "docs" / page).read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
]


@pytest.mark.parametrize("command", sorted({c for c in DOCS if len(c.split()) > 2 and "…" not in c}))
def test_the_docs_speak_of_flags_that_exist(tmp_path, monkeypatch, capsys, command):
    """Where there is nothing, a command fails of that, and not of its flags."""
    monkeypatch.chdir(tmp_path)
    with suppress(SystemExit):
        cli.main(shlex.split(command)[1:])
    complaint = capsys.readouterr().err
    assert not re.search("no flag '|no command '|unexpected argument|expected (an? |one of )|needs a value", complaint)
