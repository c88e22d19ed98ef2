"""The command line in one process: output, exit status, and errors in two lines."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from PIL import Image

from support.common import TINY_MODEL, Command
from vitral import api
from vitral.cli import main as cli


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on the digits."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    api.train("digits", epochs=2, out=out, **TINY_MODEL)
    return out


@pytest.fixture
def vitral(command: Command) -> Command:
    return command


@pytest.fixture
def digit(run: Path) -> Path:
    return run / "figures" / "example.png"


def test_python_m_vitral_is_the_command():
    done = subprocess.run([sys.executable, "-m", "vitral", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("vitral ")


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (["trian", "mnist"], "no command 'trian'. Did you mean 'train'?", "Commands: demo, doctor, train"),
        (["finetune", "x"], "no command 'finetune'. Did you mean 'train DATA --init-from MODEL'?", "Commands: demo"),
        (["train", "digits", "--pretrained"], "no flag '--pretrained'. Did you mean '--init-from'?", "train --help"),
        (["train", "digits", "--img-size", "8"], "'--img-size'. Did you mean '--model.image-size'?", "train --help"),
        (["predict", "mnist", "--output", "x"], "no flag '--output'. Did you mean '--out'?", "predict --help"),
        (["data", "ftech"], "no command 'data ftech'. Did you mean 'fetch'?", "Commands of vitral data: list, fetch"),
        (["train", "cifar01"], "named 'cifar01'. Did you mean 'cifar10'?", "digits"),
        (["train"], "", "digits"),
        (["train", "digits", "--recipe", "mnsit"], "no recipe named 'mnsit'. Did you mean 'mnist'?", "digits"),
        (["train", "digits", "--optim.lrr", "1"], "no flag '--optim.lrr'. Did you mean '--optim.lr'?", "train --help"),
        (["train", "digits", "--lr", "1"], "no flag '--lr'. Did you mean '--optim.lr'?", "train --help"),
        (["train", "digits", "--epoch", "1"], "no flag '--epoch'. Did you mean '--epochs'?", "train --help"),
        (["predict", "my photo.jpg"], "no model given; my photo.jpg is an image", "predict cifar10 'my photo.jpg'"),
        (["explain", "photo.png"], "no model given; photo.png is an image", "vitral explain cifar10 photo.png"),
        (["predict", "runs/mine"], "no images given", "vitral predict runs/mine photo.jpg"),
        (["train", "digits", "--epochs", "many"], "--epochs: expected an integer, got 'many'", "train --help"),
        (["train", "digits", "--epochs", "0"], "epochs must be at least 1", ""),
        (["train", "digits", "--optim.schedule", "cosin"], "--optim.schedule: expected one of", "train --help"),
        (["train", "digits", "--model.image-size", "9"], "image height 9 is not", ""),
        (
            ["train", "cifar10", "--recipe", "cifar10-94", "--model.conv.widths", "32,128,250"],
            "widths must be multiples of 8",
            "",
        ),
        (["train", "digits", "--model.heads", "5"], "width must be a multiple of", ""),
        (["train", "digits", "--device", "gpu"], "GPU", "--device cpu"),
        (["train", "--recipe", "nowhere.toml"], "cannot read the recipe nowhere.toml", ""),
        (["train", "--resume", "r", "--epochs", "9"], "--epochs cannot be changed when a run is resumed", "new run"),
        (["train", "--resume", "r", "--optim.lr=1"], "--optim.lr cannot be changed when a run is resumed", "new run"),
        (["train", "mnist", "--resume", "r"], "mnist cannot be changed when a run is resumed", "new run"),
        (["train", "--resume", "r", "--kep-checkpoints", "1"], "Did you mean '--keep-checkpoints'?", "train --help"),
        (["train", "--resume", "nowhere"], "nowhere", "vitral train mnist"),
        (["summary", "B/61"], "no preset named 'B/61'. Did you mean 'B/16'?", "Ti/16"),
        (["summary"], "no model given", "Presets: Ti/16"),
        (["recipes", "show", "minst"], "no recipe named 'minst'. Did you mean 'mnist'?", "digits"),
        (["data", "fetch", "mnits"], "named 'mnits'. Did you mean 'mnist'?", "digits"),
        (["evaluate", "nowhere"], "nowhere", "vitral train mnist"),
        (["predict", "nowhere", "x.png"], "nowhere", "vitral train mnist"),
    ],
)
def test_errors_have_two_lines_and_exit_status_2(vitral, monkeypatch, tmp_path, words, what, hint):
    monkeypatch.chdir(tmp_path)
    code, _, err = vitral(*words)
    lines = err.strip().splitlines()
    assert code == 2
    assert lines[0].startswith("error: ")
    assert what in lines[0]
    assert len(lines) == 2
    assert lines[1].startswith("       ")
    assert hint in lines[1]
    assert "Traceback" not in err


def test_a_missing_dependency_is_an_error_of_two_lines(vitral, monkeypatch):
    """As after `pip install --no-deps vitral`, which suffices for exported models."""

    def load_command(name: str) -> None:
        import_module("platformdirs")

    monkeypatch.setitem(sys.modules, "platformdirs", None)
    monkeypatch.setattr(cli, "load_command", load_command)
    code, _, err = vitral("data", "where", "mnist")
    assert code == 2
    assert err.startswith("error: vitral data requires platformdirs\n       Install vitral without --no-deps; ")


def test_every_dependency_is_known():
    import_names = {"pillow": "PIL", "scikit-learn": "sklearn", "tomli-w": "tomli_w"}
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    names = [re.split("[>=]", requirement)[0] for requirement in tomllib.loads(text)["project"]["dependencies"]]
    assert {import_names.get(name, name) for name in names} == cli.DEPENDENCIES


def test_train_writes_a_complete_run_folder(run):
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


@pytest.mark.slow
def test_train_prints_the_result_and_next_commands_that_work_when_copied(vitral, tmp_path):
    out = tmp_path / "my [2nd] run"  # needs quotes in a shell and must not be read as markup
    code, printed, _ = vitral("train", "digits", "--epochs", 1, "--model.depth", 1, "--out", out)
    test = json.loads((out / "test.json").read_text())
    assert code == 0
    assert f"{test['top1']:.2%}" in printed
    for text in ("Epoch", "confusion.png", "attention.png", str(out), "Next steps"):
        assert text in printed
    next_steps = printed.partition("Next steps\n")[2].splitlines()
    copied = [shlex.split(line.strip().split("    ")[0]) for line in next_steps]
    assert [words[1] for words in copied] == ["predict", "walk", "evaluate", "train"]
    assert copied[0][2:] == [str(out), str(out / "figures" / "example.png")]
    assert copied[3][2:] == ["digits", "--recipe", str(out / "recipe.toml"), "--epochs", "2"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_recipe_printed_by_show_can_be_trained(vitral, tmp_path):
    _, toml, _ = vitral("recipes", "show", "digits")
    (tmp_path / "mine.toml").write_text(toml)
    code, _, err = vitral("train", "--recipe", tmp_path / "mine.toml", "--epochs", 1, "--out", tmp_path / "run")
    assert (code, err) == (0, "")


@pytest.mark.usefixtures("no_figures")
def test_recipe_can_be_used_for_another_dataset(vitral, tmp_path):
    out = tmp_path / "run"
    words = ("--epochs", 1, "--model.depth", 1, "--model.width", 32, "--batch-size", 256)
    code, _, _ = vitral("train", "digits", "--recipe", "mnist-quick", *words, "--out", out)
    config = json.loads((out / "model" / "config.json").read_text())
    assert code == 0
    assert config["trained_on"] == "digits"
    assert config["architecture"]["image_size"] == [28, 28]  # 8 is not a multiple of that recipe's patch size


def test_existing_run_is_not_overwritten(vitral, run):
    code, _, err = vitral("train", "digits", "--out", run)
    assert code == 2
    assert f"vitral train --resume {run}" in err


def test_evaluate_prints_text_or_json(vitral, run):
    code, out, _ = vitral("evaluate", run, "--full")
    assert code == 0
    for word in ("precision", "recall", "F1", "top-5", "cross-entropy"):
        assert word.lower() in out.lower()
    code, out, _ = vitral("evaluate", run, "--json")
    assert {"split": "test"} | json.loads(out) == json.loads((run / "test.json").read_text())


def test_evaluate_validation_split_matches_training_log(vitral, run):
    _, out, _ = vitral("evaluate", run, "--split", "validation", "--json")
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert json.loads(out)["top1"] == pytest.approx(max(row["validation_top1"] for row in last))


def test_predict_prints_ranked_labels(vitral, run, digit):
    code, out, _ = vitral("predict", run, digit, "--top", 3)
    assert code == 0
    assert out.startswith(str(digit))
    assert out.partition("; one of: ")[0].count("%") == 3


def test_predict_json_and_csv_agree(vitral, run, digit):
    _, out, _ = vitral("predict", run, digit, "--json", "--top", 10)
    prediction = json.loads(out)
    assert prediction["file"] == str(digit)
    assert sum(label["probability"] for label in prediction["labels"]) == pytest.approx(1)
    _, out, _ = vitral("predict", run, digit, "--csv", "--top", 10)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["label"] for row in rows] == [label["name"] for label in prediction["labels"]]
    code, _, err = vitral("predict", run, digit, "--csv", "--json")
    assert code == 2
    assert "--json and --csv cannot be combined" in err


def test_predict_accepts_the_model_folder(vitral, run, digit):
    assert vitral("predict", run / "model", digit)[1] == vitral("predict", run, digit)[1]


def test_unreadable_files_are_reported_and_the_others_predicted(vitral, run, digit, tmp_path):
    (tmp_path / "notes.png").write_text("not an image")
    Image.new("RGB", (40, 20), "white").save(tmp_path / "white.jpg")
    code, out, err = vitral("predict", run, tmp_path / "notes.png", tmp_path / "white.jpg", digit)
    assert code == 1
    assert "white.jpg" in out
    assert str(digit) in out
    assert "notes.png: not an image" in err
    assert "1 of 3 files could not be read" in err


def test_predict_searches_folders_and_skips_hidden_ones(vitral, run, tmp_path):
    for name in ("a.png", "deep/b.jpg", ".hidden/c.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.new("L", (9, 30)).save(path)
    _, out, _ = vitral("predict", run, tmp_path)
    assert [line.split()[0] for line in out.splitlines()] == [str(tmp_path / "a.png"), str(tmp_path / "deep/b.jpg")]


def test_summary_counts_parameters_and_flops(vitral):
    code, out, _ = vitral("summary", "B/16", "--num-classes", 10)
    assert code == 0
    assert "85,806,346" in out  # 86,567,656 less 990 classes of 769
    assert "GFLOPs" in out
    assert "EncoderBlock" in out
    assert "MiB of activations" in out


@pytest.mark.slow
def test_one_image_size_means_a_square_image(vitral):
    assert "[1, 577, 192]" in vitral("summary", "Ti/16", "--image-size", 384)[1]


def test_data_lists_datasets_and_names_missing_downloads(vitral):
    _, out, _ = vitral("data", "list")
    assert [line.split()[0] for line in out.splitlines()] == ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100"]
    code, _, err = vitral("data", "where", "cifar100")
    assert code == 2
    assert "vitral data fetch cifar100" in err


@pytest.mark.slow
def test_a_command_that_imports_triton_prints_nothing_after_its_output():
    done = subprocess.run(
        [sys.executable, "-m", "vitral", "summary", "Ti/16"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].startswith("Published accuracy")
    assert done.stderr == ""


@pytest.mark.slow
def test_closed_pipe_prints_no_traceback():
    command = f"{sys.executable} -m vitral recipes show digits | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=240)
    assert "Traceback" not in done.stderr
