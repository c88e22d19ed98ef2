"""The models that come with vitral: what they are asked by name, what they answer, and how one is made from a run."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import httpx
import numpy as np
import platformdirs
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from sklearn.datasets import load_digits

import vitral
from support.common import Fit, leave_out_pictures
from support.served import server
from vitral import api as workshop
from vitral import api_ship as shipping
from vitral import bundled as box
from vitral.cli import main as cli
from vitral.cli.commands.walk import newest
from vitral.data.datasets import Dataset, Split
from vitral.data.datasets import load as load_dataset
from vitral.errors import VitralError
from vitral.evaluation import evaluate as judge
from vitral.evaluation.calibration import calibrate
from vitral.inference.predictor import Predictor, rim
from vitral.recipes.schema import read_recipe
from vitral.runs.run import Run, load_model, write_atomically
from vitral.weights import read as read_checkpoint

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("VITRAL_HOME") or platformdirs.user_cache_dir("vitral"))  # before tests get their own
MOST_BYTES = 12_000_000
DIGITS = cache(load_digits)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with nothing in it."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def digit(index: int, *, ink: bool = False) -> tuple[Image.Image, str]:
    """One of scikit-learn's, as large as MNIST's and with as much black around it; what it is. `ink`: dark on light."""
    pixels = Image.fromarray((DIGITS().images[index] * 255 / 16).astype(np.uint8)).resize((20, 20), Image.BICUBIC)
    picture = Image.new("L", (28, 28))
    picture.paste(pixels, (4, 4))
    if ink:
        picture = Image.fromarray(255 - np.asarray(picture))
    return picture, str(DIGITS().target[index])


# --- what is in it --------------------------------------------------------------------------------------------------


def test_the_box_is_small_and_has_digits():
    assert "mnist" in box.names()
    files = [file for file in box.ROOM.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES


@pytest.mark.parametrize("name", box.names())
def test_weights_are_bf16_and_are_computed_with_in_fp32(name):
    with safe_open(box.ROOM / name / "model" / "weights.safetensors", "pt") as file:
        kinds = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    assert kinds <= {"BF16", "I64"}
    assert "BF16" in kinds
    model, _ = load_model(box.ROOM / name)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())


@pytest.mark.parametrize("name", box.names())
def test_the_card_says_what_was_measured_and_the_rest(name):
    folder = box.ROOM / name
    text, test = (folder / "README.md").read_text(), json.loads((folder / "test.json").read_text())
    assert f"| {test['top1']:.2%} |" in text
    assert f"On {test['images']:,} test images" in text
    assert abs(test["top1"] - test["box"]["top1_before_rounding"]) <= 0.001
    for part in ("## Measured", "## How it was trained", "## What it is not for", "## Licence and data", "calibration"):
        assert part in text
    for file in folder.rglob("*"):
        if file.suffix in (".md", ".json", ".toml", ".jsonl"):
            assert "/work" not in file.read_text(), file
            assert "/tmp" not in file.read_text(), file


@pytest.mark.parametrize("name", box.names())
def test_its_run_can_be_repeated_and_reported(name):
    plan, (model, card) = read_recipe(box.ROOM / name / "recipe.toml"), load_model(box.ROOM / name)
    assert plan.data.name == card.trained_on == name
    assert (plan.variant, plan.model) == (card.variant, model.config)
    rows = Run(box.ROOM / name).metrics()
    assert [row["epoch"] for row in rows] == list(range(1, plan.epochs + 1))
    assert card.calibration.unknown_below is not None


@pytest.mark.parametrize("name", box.names())
def test_accuracy_is_what_the_card_says(name, monkeypatch):
    """On some hundred real test images; as far from the card's figure as chance allows, three standard deviations."""
    monkeypatch.setenv("VITRAL_HOME", str(CACHE))
    if not vitral.data.where(name):
        pytest.skip(f"{name} is not in the cache")
    test = load_dataset(name).test
    some = judge.spread(len(test), 400)
    predictor = vitral.load(f"box:{name}")
    found = predictor.evaluate(replace(test, images=test.images[some], labels=test.labels[some])).top1
    told = json.loads((box.ROOM / name / "test.json").read_text())["top1"]
    assert found >= told - 3 * (told * (1 - told) / 400) ** 0.5


def test_digits_of_another_set_are_read():
    """scikit-learn's, 8×8 pixels scaled up: no data set needs to be there."""
    pictures, labels = zip(*(digit(index) for index in range(0, 1797, 18)), strict=True)
    answers = list(vitral.load("box:mnist").predict_many(pictures))
    right = sum(answer.best.name == label for answer, label in zip(answers, labels, strict=True))
    assert right >= 85, right


@pytest.mark.parametrize("name", box.names())
@pytest.mark.parametrize(
    ("mode", "size"),
    [("L", (28, 28)), ("RGB", (300, 224)), ("RGB", (4000, 3000)), ("RGBA", (64, 90)), ("I;16", (40, 40))],
)
def test_any_picture_gets_an_answer(name, mode, size):
    picture = Image.effect_noise(size, 60).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        picture = Image.fromarray(np.asarray(picture).astype(np.uint16) * 257)
    answer = vitral.load(f"box:{name}").predict(picture)
    assert sum(label.probability for label in answer.labels) == pytest.approx(1, abs=1e-4)


# --- ink on paper ---------------------------------------------------------------------------------------------------


def test_ink_on_paper_is_noticed_and_its_negative_answered(tmp_path, capsys):
    predictor = vitral.load("box:mnist")
    indices = range(0, 1797, 60)
    chalk = [digit(index) for index in indices]
    ink = [digit(index, ink=True) for index in indices]
    plain = list(predictor.predict_many([picture for picture, _ in chalk]))
    assert all(answer.exchanged is None for answer in plain)
    turned = list(predictor.predict_many([picture for picture, _ in ink]))
    for answer, straight in zip(turned, plain, strict=True):
        if straight.unknown:
            assert answer.exchanged is None
        else:
            assert answer.exchanged == pytest.approx(straight.best) or answer.exchanged.name == straight.best.name
    assert sum(answer.exchanged is not None for answer in turned) > 20
    ink[0][0].save(tmp_path / "zero.png")
    with pytest.raises(SystemExit):
        cli.main(["predict", "box:mnist", str(tmp_path / "zero.png")])
    assert "with light and dark exchanged: 0 " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["predict", "box:mnist", str(tmp_path / "zero.png"), "--json"])
    assert json.loads(capsys.readouterr().out)["exchanged"]["name"] == "0"


def test_the_rim_is_the_outermost_pixels():
    images = torch.zeros(2, 1, 4, 5, dtype=torch.uint8)
    images[0, :, 1:-1, 1:-1] = 255
    images[1, :, 0] = 255  # 5 of the 14 pixels of the rim
    assert rim(images).tolist() == pytest.approx([0, 5 / 14])
    assert rim(torch.full((1, 1, 1, 1), 51, dtype=torch.uint8)).tolist() == pytest.approx([0.2])


# --- names ----------------------------------------------------------------------------------------------------------


def test_a_name_means_the_model_in_the_box(elsewhere):
    assert box.find("mnist") == box.ROOM / "mnist"
    assert box.find(Path("mnist")) == box.ROOM / "mnist"
    assert vitral.load("mnist").path == box.ROOM / "mnist"
    assert read_checkpoint("mnist").config == vitral.load("mnist").card.architecture
    for other in ("./mnist", "mnist/", "runs/mnist", "hf:me/mnist", "model.safetensors"):
        assert box.find(other) == other


def test_a_file_that_hides_a_model_of_the_box_is_said(elsewhere):
    (elsewhere / "cifar10").write_bytes(b"\xff\xd8\xff\xe0 a photograph")
    with pytest.raises(VitralError, match="cifar10 is not a file of weights") as error:
        vitral.load("cifar10")
    assert "the model that comes with vitral is box:cifar10" in error.value.hint


def test_a_path_comes_first_and_that_is_said(elsewhere, train_tiny: Fit, capsys):
    run = train_tiny("mnist")  # into tmp_path, and from there here
    shutil.copytree(run.path, elsewhere / "mnist")
    picture, _ = digit(0)
    picture.save("zero.png")
    predictor = vitral.load("mnist")
    assert predictor.path == Path("mnist")
    assert predictor.notes == ("mnist: the folder of that name here; the model that comes with vitral is box:mnist",)
    assert vitral.load("box:mnist").path == box.ROOM / "mnist"
    with pytest.raises(SystemExit) as stop:
        cli.main(["predict", "mnist", "zero.png"])
    assert stop.value.code == 0
    said = capsys.readouterr()
    assert "chequerboard" in said.out
    assert "the model that comes with vitral is box:mnist" in said.err


def test_a_folder_of_that_name_without_a_model_tells_of_the_box(elsewhere):
    (elsewhere / "mnist").mkdir()
    with pytest.raises(VitralError, match="holds neither") as caught:
        vitral.load("mnist")
    assert "is box:mnist" in caught.value.hint
    (elsewhere / "mnist" / "notes.txt").touch()
    with pytest.raises(VitralError, match="holds no weights") as caught:
        vitral.load("mnist")
    assert "is box:mnist" in caught.value.hint


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (["predict", "mnits", "x.png"], "there is no run or model folder mnits", "Did you mean mnist? Come with"),
        (["serve", "mnits"], "there is no run or model folder mnits", "Come with vitral: "),
        (["evaluate", "box:mnits"], "no model in the box named 'mnits'. Did you mean mnist?", "Known: "),
        (["box", "show", "mnits"], "no model in the box named 'mnits'. Did you mean mnist?", "Known: "),
        (["convert", "mnits", "there"], "there is no file or folder mnits", "Come with vitral: "),
        (["summary", "mnits"], "no preset named 'mnits'", "Come with vitral: "),
    ],
)
def test_an_unknown_name_lists_what_is_there(elsewhere, capsys, words, what, hint):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert what in lines[0]
    assert hint in lines[1]
    assert "mnist" in lines[1]
    assert len(lines) == 2


def test_people_find_them(capsys):
    cli.main(["--help"])
    assert ", ".join(box.names()) in capsys.readouterr().out
    for words in (["predict", "--help"], ["serve", "--help"], ["walk", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(words)
        assert "comes with vitral:" in " ".join(capsys.readouterr().out.replace("│", " ").split())


# --- in a process of its own, without network -----------------------------------------------------------------------

OFFLINE = """
import socket
connect = socket.socket.connect
def only_here(self, address):
    if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1"):
        raise AssertionError(f"the network was asked for: {address}")
    connect(self, address)
socket.socket.connect = only_here
"""


EACH = """
import sys
from vitral import cli
for line in sys.argv[1:]:
    try:
        cli.main(line.split())
    except SystemExit as stop:
        assert not stop.code, (line, stop.code)
"""


def in_a_process(elsewhere: Path, *commands: str) -> list[str]:
    """What is printed by a process that has this folder, an empty cache and no network."""
    (elsewhere.parent / "sitecustomize.py").write_text(OFFLINE)
    path = os.pathsep.join([str(elsewhere.parent), str(ROOT / "src")])
    env = os.environ | {"VITRAL_HOME": str(elsewhere.parent / "home"), "PYTHONPATH": path}
    command = [sys.executable, "-c", EACH, *commands]
    done = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not (elsewhere.parent / "home").exists(), "something was fetched or kept"
    return done.stdout.splitlines()


def test_right_after_the_install(elsewhere):
    picture, label = digit(0)
    picture.save("digit.png")
    predicted, explained, *walked = in_a_process(
        elsewhere, "predict mnist digit.png", "explain mnist digit.png --method rollout", "walk digit.png --no-code"
    )
    assert predicted.split()[1] == label
    assert explained.endswith("explained/digit.png")
    assert walked
    assert {file.name for file in elsewhere.iterdir()} == {"digit.png", "explained"}


def test_a_server_of_one(elsewhere, monkeypatch):
    monkeypatch.setenv("VITRAL_HOME", str(elsewhere / "home"))
    picture, label = digit(3)
    picture.save("digit.png")
    with server("mnist") as running:
        (model,) = httpx.get(f"{running.url}/v1/models").json()["models"]
        assert model["name"] == "mnist"
        sent = {"file": Path("digit.png").read_bytes()}
        (answer,) = httpx.post(f"{running.url}/v1/models/mnist/predict", files=sent).json()["answers"]
    assert answer["labels"][0]["name"] == label


# --- every command takes them, and none writes into the package -----------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On scikit-learn's digits, which need no files."""
    path = tmp_path_factory.mktemp("trained") / "digits"
    with pytest.MonkeyPatch.context() as patched:
        leave_out_pictures(patched)
        workshop.train("digits", out=path, epochs=1, **{"model.width": 16, "model.depth": 1, "model.heads": 2})
    return path


@pytest.fixture
def boxed(elsewhere: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: Path) -> Path:
    """A box of its own, with one model in it."""
    shutil.copytree(trained, tmp_path / "room" / "digits")
    monkeypatch.setattr(box, "ROOM", tmp_path / "room")
    return tmp_path / "room"


def test_commands_take_a_name_and_leave_the_box_as_it_was(boxed, elsewhere, capsys):
    before = {file: file.read_bytes() for file in boxed.rglob("*") if file.is_file()}
    picture, _ = digit(0)
    picture.save("digit.png")
    for words in (
        "evaluate digits", "compare digits box:digits", "embed digits digit.png --out f.npy", "summary digits",
        "figures digits --out figures", "walk digit.png --model digits --no-code", "convert digits there",
        "push digits hf:me/mine --dry-run", "bench digits --seconds 0.01 --batches 1 --images 40", "box",
        "predict digits digit.png", "report digits --fast",
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            cli.main(words.split())
        assert stop.value.code == 0, words
        capsys.readouterr()
    assert {file: file.read_bytes() for file in boxed.rglob("*") if file.is_file()} == before
    assert {path.name for path in elsewhere.iterdir()} == {
        "digit.png", "f.npy", "f.names.txt", "figures", "there", "digits-report.html",
    }  # fmt: skip
    with pytest.raises(VitralError, match="stays as it is") as caught:
        vitral.calibrate("digits")
    assert "vitral box where digits" in caught.value.hint


def test_what_was_measured_of_one_is_kept_in_the_cache(boxed):
    measured = shipping.bench("digits", images=40, seconds=0.01, batches=(1,))
    keep = box.kept(boxed / "digits" / "model")
    assert (keep / "speed.json").is_file()
    assert keep.is_relative_to(os.environ["VITRAL_HOME"])
    assert box.called(keep) == "digits"
    assert Predictor.load("digits", device="cpu").choice.why == measured.why
    (boxed / "digits" / "model" / "weights.safetensors").write_bytes(b"another")
    assert box.kept(boxed / "digits" / "model") != keep


def test_an_export_lands_here(boxed, elsewhere):
    file, agreement = shipping.export("digits", to="torch", images=32)
    assert file == Path("digits.pt2")
    assert file.is_file()
    assert agreement


def test_training_begins_from_one(boxed, no_pictures):
    begun = workshop.train("digits", init="digits", recipe="digits", epochs=1, out="run")
    assert begun.card.architecture.width == 16


# --- how one is made ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tools_box", ROOT / "tools" / "box.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["tools_box"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def finished(train_tiny: Fit, dataset: Dataset, monkeypatch, tmp_path) -> Run:
    """A run on textures that are called mnist, as `vitral train` leaves one behind."""
    dataset = replace(dataset, name="mnist")
    monkeypatch.setattr(judge, "load_dataset", lambda name, **_: dataset)
    monkeypatch.setattr(box, "ROOM", tmp_path / "room")
    (tmp_path / "room").mkdir()
    run = train_tiny("finished", dataset=dataset, **{"data.name": "mnist", "device": "cpu"})
    judge.calibrate_model(vitral.load(run.path), dataset.validation)
    metrics = judge.evaluate(judge.question(run.path, None, "test"))[0]
    write_atomically(run.test_file, json.dumps(metrics.as_dict()))
    typed = "/home/me/.venv/bin/vitral train mnist --seed 3 --out /home/me/runs/x --epochs 4"
    around = {"command": typed, "platform": "Linux-me", "launch": None, "torch": "2", "hardware": "a CPU"}
    write_atomically(run.environment_file, json.dumps(around))
    return run


def test_a_run_becomes_a_model_in_the_box(finished, tool, elsewhere):
    place, said = tool.make(finished)
    assert box.names() == ("mnist",)
    assert {str(file.relative_to(place)) for file in place.rglob("*") if file.is_file()} == {
        "README.md", "environment.json", "metrics.jsonl", "model/config.json", "model/weights.safetensors",
        "recipe.toml", "test.json",
    }  # fmt: skip
    model, card = load_model(place)
    before, card_before = load_model(finished.path)
    assert card == card_before
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before.state_dict()[name].bfloat16().float())
    text = (place / "README.md").read_text()
    assert "begun with `vitral train mnist --seed 3 --epochs 4`" in text
    assert "/home/me" not in "".join(file.read_text() for file in place.glob("*.*"))
    assert f"{vitral.evaluate('mnist').top1:.2%}" in text
    assert "test images" in said
    assert 'device = "auto"' in (place / "recipe.toml").read_text()
    tool.make(finished)  # replaces it
    assert box.names() == ("mnist",)


def test_a_run_that_is_not_what_it_says_is_refused(finished, tool, monkeypatch):
    recorded = json.loads(finished.test_file.read_text())
    write_atomically(finished.test_file, json.dumps(recorded | {"top1": recorded["top1"] - 0.01}))
    with pytest.raises(VitralError, match="against what it recorded"):
        tool.make(finished)
    write_atomically(finished.test_file, json.dumps(recorded | {"top1": recorded["top1"] - 0.01, "views": "six"}))
    tool.make(finished)
    assert "six views" in (box.ROOM / "mnist" / "README.md").read_text()
    shutil.rmtree(box.ROOM / "mnist")
    monkeypatch.setattr(tool, "MOST_BYTES", 1000)
    with pytest.raises(VitralError, match="the box holds"):
        tool.make(finished)
    finished.test_file.unlink()
    with pytest.raises(VitralError, match="is not finished"):
        tool.make(finished)
    write_atomically(finished.recipe_file, finished.recipe_file.read_text().replace('"mnist"', '"photos"'))
    with pytest.raises(VitralError, match="no set with something known about"):
        tool.make(finished)
    assert box.names() == ()


def test_where_nothing_was_held_out_half_of_the_test_images_calibrate(finished, tool, dataset, monkeypatch):
    nothing = Split(images=dataset.validation.images[:0], labels=dataset.validation.labels[:0])
    monkeypatch.setattr(judge, "load_dataset", lambda name, **_: replace(dataset, name="mnist", validation=nothing))
    monkeypatch.setattr(tool, "calibrate", lambda logits, labels: calibrate(logits, labels, false_alarms=0.2))
    place, said = tool.make(finished, against="mnist")
    asked = judge.question(place, None, "test")
    logits = asked.predictor.logits_together(asked.split.images)
    fitted = calibrate(logits[::2], asked.split.labels[::2], false_alarms=0.2)
    assert asked.predictor.card.calibration == replace(fitted, fitted_on="every other test image")
    alarms = fitted.unknown(logits[1::2]).double().mean().item()
    assert f"it calls {alarms:.1%} of 20 test images unknown, and" in (place / "README.md").read_text()
    assert "every other test image" in said


def test_rounding_that_moves_the_accuracy_is_refused(finished, tool, monkeypatch):
    rounded = tool.round_to_bf16

    def broken(run: Run, folder: Path) -> None:
        rounded(run, folder)
        file = folder / "model" / "weights.safetensors"
        model, _ = load_model(folder)
        state = model.state_dict()
        state["head.out.weight"] = state["head.out.weight"].flip(0)
        tool.save_weights(file, state)

    monkeypatch.setattr(tool, "round_to_bf16", broken)
    with pytest.raises(VitralError, match="rounded to bf16, against fp32"):
        tool.make(finished)
    assert box.names() == ()


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("/usr/bin/vitral train cifar10 --recipe cifar10-96 --out=/x", "vitral train cifar10 --recipe cifar10-96"),
        ("/lib/vitral/__main__.py train mnist --out a/b --seed 2", "vitral train mnist --seed 2"),
        ("vitral train --recipe runs/x/recipe.toml", ""),
        ("vitral demo", ""),
        ("/tmp/my-script.py", ""),
        ("", ""),
    ],
)
def test_the_command_is_told_where_others_can_type_it(tool, typed, told):
    assert tool.command(typed) == told


@pytest.mark.parametrize(
    ("kind", "name"), [("RGB", "cifar10"), ("gray as RGB", "mnist"), ("L", "mnist"), ("no picture", "mnist")]
)
def test_a_walk_without_a_run_takes_the_model_that_may_know_such_a_picture(elsewhere, kind, name):
    rng = np.random.default_rng(0)
    gray = Image.fromarray(rng.integers(0, 256, (40, 40), dtype=np.uint8))
    colours = Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8))
    if kind == "no picture":
        Path("picture.png").write_text("nothing")
    else:
        {"RGB": colours, "gray as RGB": gray.convert("RGB"), "L": gray}[kind].save("picture.png")
    assert newest(Path("picture.png")) == f"box:{name}"
