"""The command line as a person meets it: answers, exit codes, and mistakes in two lines."""

from __future__ import annotations

import csv
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from support.common import Command
from vitral import api as workshop
from vitral.cli import main as cli
from vitral.cli.parsing import positional, switches_of
from vitral.recipes.builtin import named


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on the digits."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    workshop.train("digits", epochs=2, out=out, **{"model.depth": 1, "model.width": 32})
    return out


@pytest.fixture
def vitral(command: Command) -> Command:
    return command


@pytest.fixture
def digit(run: Path) -> Path:
    return run / "figures" / "example.png"


def test_help_names_every_command(vitral):
    code, out, _ = vitral("--help")
    assert code == 0
    for name in cli.COMMANDS:
        assert f"\n  {name}" in out


@pytest.mark.parametrize(
    ("words", "data"),
    [
        ("--model.image-size 64 64", None),
        ("--model.image-size 64 64 photos", "photos"),
        ("--data.mean 0.5 0.5 1e-1 photos --epochs 3", "photos"),
        ("--compare photos", "photos"),
        ("--no-recompute --augment.no-flip photos", "photos"),
        ("--epochs=3 photos", "photos"),
        ("64 --epochs 3", "64"),
        ("--recipe deit", None),
    ],
)
def test_the_data_is_told_from_the_values_of_flags(words, data):
    assert positional(words.split(), {"--compare"}) == data


def test_flags_without_a_value_are_read_off_the_settings():
    assert {"--recompute", "--augment.flip", "--model.qk-norm"} <= switches_of(named("digits"))
    assert "--epochs" not in switches_of(named("digits"))


def test_the_module_is_the_command():
    answer = subprocess.run([sys.executable, "-m", "vitral", "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout.startswith("vitral ")


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_explains_itself(vitral, name):
    code, out, _ = vitral(name, "--help")
    assert code == 0
    assert f"usage: vitral {name}" in out
    assert "{None}" not in out
    assert "(default: None)" not in out
    assert len({len(line) for line in out.splitlines() if line[:1] in "╭│╰" and line}) <= 1  # no edge moved


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (["trian", "mnist"], "there is no command 'trian'. Did you mean train?", "Known: demo, doctor, train"),
        (["train", "cifar01"], "no data set or folder named 'cifar01'. Did you mean cifar10?", "Known sets: digits"),
        (["train"], "what should it learn from?", "or a known set: digits"),
        (["train", "digits", "--recipe", "mnsit"], "no recipe named 'mnsit'. Did you mean mnist?", "Known: digits"),
        (["train", "digits", "--optim.lrr", "1"], "no flag --optim.lrr. Did you mean --optim.lr?", "--help lists"),
        (["train", "digits", "--lr", "1"], "no flag --lr. Did you mean --optim.lr?", "--help lists"),
        (["train", "digits", "--epoch", "1"], "no flag --epoch. Did you mean --epochs?", "--help lists"),
        (["predict", "my photo.jpg"], "which model? my photo.jpg is a picture", "predict cifar10 'my photo.jpg'"),
        (["explain", "photo.png"], "which model? photo.png is a picture", "vitral explain cifar10 photo.png"),
        (["predict", "runs/mine"], "which images?", "vitral predict runs/mine photo.jpg"),
        (["train", "digits", "--epochs", "many"], "--epochs: 'many' is no whole number", "--help lists"),
        (["train", "digits", "--epochs", "0"], "epochs must be at least 1, not 0", "--help lists"),
        (["train", "digits", "--optim.schedule", "cosin"], "--optim.schedule", "--help lists"),
        (
            ["train", "digits", "--model.image-size", "9"],
            "image height 9 is not a multiple of patch_size 2; 8 and 10 are",
            "--help lists",
        ),
        (
            ["train", "cifar10", "--recipe", "cifar10-94", "--model.conv.widths", "32,128,250"],
            "widths must be multiples of 8 (group norm), not (32, 128, 250)",
            "--help lists",
        ),
        (["train", "digits", "--model.heads", "5"], "width must be a multiple of", "--help lists"),
        (["train", "digits", "--device", "gpu"], "no GPU that PyTorch can use was found", "--device cpu"),
        (["train", "--recipe", "nowhere.toml"], "cannot read the recipe nowhere.toml", ""),
        (["train", "--resume", "r", "--epochs", "9"], "as it was begun, without --epochs", "begins another"),
        (["train", "--resume", "r", "--optim.lr=1"], "as it was begun, without --optim.lr", "begins another"),
        (["train", "--resume", "r", "--kep", "1"], "has no flag --kep. Did you mean --keep?", "--help lists"),
        (["train", "--resume", "nowhere"], "there is no run folder nowhere", "vitral train mnist makes one"),
        (["summary", "B/61"], "no preset named 'B/61'. Did you mean B/16?", "Known: Ti/16"),
        (["summary"], "which model?", "Known: Ti/16"),
        (["recipes", "show", "minst"], "no recipe named 'minst'. Did you mean mnist?", "Known: digits"),
        (["data", "fetch", "mnits"], "no data set or folder named 'mnits'. Did you mean mnist?", "Known sets"),
        (["evaluate", "nowhere"], "there is no run or model folder nowhere", "vitral train mnist makes one"),
        (["predict", "nowhere", "x.png"], "there is no run or model folder nowhere", "vitral train mnist makes one"),
    ],
)
def test_mistakes_are_two_lines_and_exit_with_2(vitral, monkeypatch, tmp_path, words, what, hint):
    monkeypatch.chdir(tmp_path)
    code, _, err = vitral(*words)
    lines = err.strip().splitlines()
    assert code == 2
    assert lines[0].startswith("error: ")
    assert what in lines[0]
    assert hint in (lines[1] if len(lines) > 1 else "")
    assert len(lines) <= 2
    assert "Traceback" not in err


def test_train_leaves_everything_in_the_run_folder(run):
    for name in (
        "recipe.toml",
        "environment.json",
        "metrics.jsonl",
        "test.json",
        "model/weights.safetensors",
        "model/config.json",
        "figures/curves.png",
        "figures/confusion.png",
        "figures/attention.png",
    ):
        assert (run / name).stat().st_size > 0, name
    environment = json.loads((run / "environment.json").read_text())
    assert {"vitral", "torch", "hardware", "reasons", "seed", "git", "data", "command"} <= environment.keys()


def test_train_ends_with_the_result_and_next_commands_that_can_be_copied(vitral, tmp_path):
    out = tmp_path / "my [2nd] run"  # to be quoted for the shell, and no markup
    code, printed, _ = vitral("train", "digits", "--epochs", 1, "--model.depth", 1, "--out", out)
    test = json.loads((out / "test.json").read_text())
    assert code == 0
    assert f"{test['top1']:.2%}" in printed
    for text in ("epoch", "confusion.png", "attention.png", str(out), "Next:"):
        assert text in printed
    copied = [shlex.split(line.removeprefix("Next:")) for line in printed[printed.index("Next:") :].splitlines()]
    assert [words[1] for words in copied] == ["predict", "walk", "evaluate", "train"]
    assert copied[0][2:] == [str(out), str(out / "figures" / "example.png")]
    assert copied[3][2:] == ["digits", "--recipe", str(out / "recipe.toml"), "--epochs", "2"]


@pytest.mark.usefixtures("no_pictures")
def test_a_recipe_file_from_show_trains(vitral, tmp_path):
    _, toml, _ = vitral("recipes", "show", "digits")
    (tmp_path / "mine.toml").write_text(toml)
    code, _, err = vitral("train", "--recipe", tmp_path / "mine.toml", "--epochs", 1, "--out", tmp_path / "run")
    assert (code, err) == (0, "")


@pytest.mark.usefixtures("no_pictures")
def test_a_recipe_for_one_set_trains_another(vitral, tmp_path):
    out = tmp_path / "run"
    words = ("--epochs", 1, "--model.depth", 1, "--model.width", 32, "--batch", 256)
    code, _, _ = vitral("train", "digits", "--recipe", "mnist-quick", *words, "--out", out)
    config = json.loads((out / "model" / "config.json").read_text())
    assert code == 0
    assert config["trained_on"] == "digits"
    assert config["architecture"]["image_size"] == [28, 28]  # 8 is not a multiple of that recipe's patch size


def test_a_folder_that_holds_a_run_is_not_overwritten(vitral, run):
    code, _, err = vitral("train", "digits", "--out", run)
    assert code == 2
    assert f"vitral train --resume {run}" in err


def test_evaluate_prints_figures_for_people_and_for_programs(vitral, run):
    code, out, _ = vitral("evaluate", run, "--full")
    assert code == 0
    for word in ("precision", "recall", "F1", "top-5", "cross-entropy"):
        assert word in out
    code, out, _ = vitral("evaluate", run, "--json")
    assert {"split": "test"} | json.loads(out) == json.loads((run / "test.json").read_text())


def test_evaluate_can_ask_the_validation_split(vitral, run):
    _, out, _ = vitral("evaluate", run, "--split", "validation", "--json")
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert json.loads(out)["top1"] == pytest.approx(max(row["validation_top1"] for row in last))


def test_predict_ranks_labels(vitral, run, digit):
    code, out, _ = vitral("predict", run, digit, "--top", 3)
    assert code == 0
    assert out.startswith(str(digit))
    assert out.count("·") == 2


def test_predict_as_json_and_csv(vitral, run, digit):
    _, out, _ = vitral("predict", run, digit, "--json", "--top", 10)
    answer = json.loads(out)
    assert answer["file"] == str(digit)
    assert sum(label["probability"] for label in answer["labels"]) == pytest.approx(1)
    _, out, _ = vitral("predict", run, digit, "--csv", "--top", 10)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["label"] for row in rows] == [label["name"] for label in answer["labels"]]
    status, _, said = vitral("predict", run, digit, "--csv", "--json")
    assert status == 2
    assert "give one of them" in said


def test_predict_takes_the_model_folder_alone(vitral, run, digit):
    assert vitral("predict", run / "model", digit)[1] == vitral("predict", run, digit)[1]


def test_a_file_that_is_no_image_is_named_and_the_others_are_answered(vitral, run, digit, tmp_path):
    (tmp_path / "notes.png").write_text("not an image")
    Image.new("RGB", (40, 20), "white").save(tmp_path / "white.jpg")
    code, out, err = vitral("predict", run, tmp_path / "notes.png", tmp_path / "white.jpg", digit)
    assert code == 1
    assert "white.jpg" in out
    assert str(digit) in out
    assert "notes.png: not an image" in err
    assert "1 of 3 files could not be read" in err


def test_predict_walks_folders(vitral, run, tmp_path):
    for name in ("a.png", "deep/b.jpg", ".hidden/c.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.new("L", (9, 30)).save(path)
    _, out, _ = vitral("predict", run, tmp_path)
    assert [line.split()[0] for line in out.splitlines()] == [str(tmp_path / "a.png"), str(tmp_path / "deep/b.jpg")]


def test_summary_counts_parameters_and_arithmetic(vitral):
    code, out, _ = vitral("summary", "B/16", "--classes", 10)
    assert code == 0
    assert "85,806,346" in out  # 86,567,656 less 990 classes of 769
    assert "GFLOPs" in out
    assert "EncoderBlock" in out
    assert "MiB of activations" in out


def test_one_number_is_a_square_image(vitral):
    assert "[1, 577, 192]" in vitral("summary", "Ti/16", "--image-size", 384)[1]


def test_data_list_names_every_set_and_where_says_what_is_missing(vitral):
    _, out, _ = vitral("data", "list")
    assert [line.split()[0] for line in out.splitlines()] == ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100"]
    code, _, err = vitral("data", "where", "cifar100")
    assert code == 2
    assert "vitral data fetch cifar100" in err


def test_output_into_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m vitral recipes show digits | head -1"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in answer.stderr


def test_in_a_log_file_a_long_epoch_says_something_each_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from vitral.training import progress as display

    now, log = [0.0], io.StringIO()
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    with display.Display(Console(file=log, width=80), 5_004) as watch:
        for step in range(1, 5_005):
            now[0] += 0.1
            watch.step(1, step, 6.5, 1_290, 3_600)
        row = {"epoch": 1, "train_loss": 6.2, "train_top1": 0.1, "images_per_second": 1290, "best": True}
        watch.epoch(row, 3_000)
        now[0] += 59
        watch.step(2, 590, 6.1, 1_290, 2_900)
    said = log.getvalue().splitlines()
    assert len(said) == 1 + 8 + 1
    assert said[1].split() == ["1", "6.5000", "600", "of", "5,004", "steps", "1,290", "1:00:00"]
    assert {line.index("1,290") + len("1,290") for line in said[1:]} == {said[0].index("images/s") + len("images/s")}
