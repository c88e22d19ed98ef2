"""The bundled models: their files, their names on the command line, and how a run becomes one."""

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
from typing import Any

import httpx
import numpy as np
import platformdirs
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from sklearn.datasets import load_digits

import vitral
from support.common import Fit, skip_figures
from support.served import server
from vitral import api, bundled
from vitral.cli.commands.walk import default_model
from vitral.data.datasets import Dataset, load_builtin_dataset
from vitral.errors import VitralError
from vitral.evaluation.data import evenly_spaced_indices
from vitral.inference.predictor import Predictor, border_brightness
from vitral.recipes.schema import read_recipe
from vitral.runs.model_io import load_model
from vitral.runs.run import Run
from vitral.weights import read as read_checkpoint

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("VITRAL_HOME") or platformdirs.user_cache_dir("vitral"))  # read before the tests isolate it
MAX_BYTES = 12_000_000
DIGITS = cache(load_digits)


@pytest.fixture
def empty_cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def digit(index: int, *, ink: bool = False) -> tuple[Image.Image, str]:
    """A digit of scikit-learn with the size and margin of MNIST, and its label. `ink`: dark on light."""
    pixels = Image.fromarray((DIGITS().images[index] * 255 / 16).astype(np.uint8)).resize(
        (20, 20), Image.Resampling.BICUBIC
    )
    image = Image.new("L", (28, 28))
    image.paste(pixels, (4, 4))
    if ink:
        image = Image.fromarray(255 - np.asarray(image))
    return image, str(DIGITS().target[index])


# Files and predictions


def test_bundled_models_are_small_and_include_mnist():
    assert "mnist" in bundled.model_names()
    files = [file for file in bundled.BUNDLED_DIR.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files) <= MAX_BYTES


@pytest.mark.parametrize("name", bundled.model_names())
def test_weights_are_stored_in_bf16_and_loaded_as_fp32(name):
    with safe_open(bundled.BUNDLED_DIR / name / "model" / "weights.safetensors", "pt") as file:
        dtypes = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    assert dtypes <= {"BF16", "I64"}
    assert "BF16" in dtypes
    model, _ = load_model(bundled.BUNDLED_DIR / name)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())


@pytest.mark.parametrize("name", bundled.model_names())
def test_model_card_has_the_results_of_test_json(name):
    folder = bundled.BUNDLED_DIR / name
    text, test = (folder / "README.md").read_text(), json.loads((folder / "test.json").read_text())
    assert f"| {test['top1']:.2%} |" in text
    assert f"{test['images']:,} test images" in text
    assert abs(test["top1"] - test["bundled"]["top1_before_rounding"]) <= 0.001
    for part in ("## Training", "## Not intended for", "## Licence and data", "calibration error"):
        assert part in text
    for file in folder.rglob("*"):
        if file.suffix in (".md", ".json", ".toml", ".jsonl"):
            assert "/work" not in file.read_text(), file
            assert "/tmp" not in file.read_text(), file


@pytest.mark.parametrize("name", bundled.model_names())
def test_recipe_config_and_metrics_belong_together(name):
    run = Run.open(bundled.BUNDLED_DIR / name)
    recipe, (model, config) = read_recipe(run.recipe_file), load_model(run.path)
    assert recipe.data.name == config.trained_on == name
    assert (recipe.variant, recipe.model) == (config.variant, model.config)
    assert [row["epoch"] for row in run.load_metrics()] == list(range(1, recipe.epochs + 1))
    assert config.calibration.ood_threshold is not None


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "mnist")) for name in bundled.model_names()]
)
def test_accuracy_matches_the_model_card(name, monkeypatch):
    """On 400 real test images, within three standard deviations."""
    monkeypatch.setenv("VITRAL_HOME", str(CACHE))
    if not vitral.data.local_files(name):
        pytest.skip(f"{name} is not in the cache")
    test = load_builtin_dataset(name).test
    indices = evenly_spaced_indices(len(test), 400)
    predictor = vitral.load(f"bundled:{name}")
    top1 = predictor.evaluate(replace(test, images=test.images[indices], labels=test.labels[indices])).top1
    expected = json.loads((bundled.BUNDLED_DIR / name / "test.json").read_text())["top1"]
    assert top1 >= expected - 3 * (expected * (1 - expected) / 400) ** 0.5


def test_digits_of_another_dataset_are_recognised():
    """The digits of scikit-learn, 8×8 pixels, resized: no dataset needs to be downloaded."""
    images, labels = zip(*(digit(index) for index in range(0, 1797, 18)), strict=True)
    predictions = vitral.load("bundled:mnist").predict_many(images)
    num_correct = sum(prediction.best.name == label for prediction, label in zip(predictions, labels, strict=True))
    assert num_correct >= 85


@pytest.mark.parametrize("name", bundled.model_names())
@pytest.mark.parametrize(
    ("mode", "size"),
    [
        ("L", (28, 28)),
        ("RGB", (300, 224)),
        pytest.param("RGB", (4000, 3000), marks=pytest.mark.slow),
        ("RGBA", (64, 90)),
        ("I;16", (40, 40)),
    ],
)
def test_any_image_mode_and_size_is_accepted(name, mode, size):
    image = Image.effect_noise(size, 60).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    prediction = vitral.load(f"bundled:{name}").predict(image)
    assert sum(label.probability for label in prediction.labels) == pytest.approx(1, abs=1e-4)


# Inverted images


def test_dark_digits_on_light_paper_are_recognised_as_inverted(tmp_path, command):
    predictor = vitral.load("bundled:mnist")
    indices = range(0, 1797, 60)
    light = list(predictor.predict_many([digit(index)[0] for index in indices]))
    assert all(prediction.inverted is None for prediction in light)
    dark = list(predictor.predict_many([digit(index, ink=True)[0] for index in indices]))
    for prediction, reference in zip(dark, light, strict=True):
        if reference.is_ood:
            assert prediction.inverted is None
        else:
            assert prediction.inverted is not None
            assert prediction.inverted.name == reference.best.name
    assert sum(prediction.inverted is not None for prediction in dark) > 20
    digit(0, ink=True)[0].save(tmp_path / "zero.png")
    _, text, _ = command("predict", "bundled:mnist", tmp_path / "zero.png")
    assert "with inverted brightness: 0 " in text
    _, content, _ = command("predict", "bundled:mnist", tmp_path / "zero.png", "--json")
    assert json.loads(content)["inverted"]["name"] == "0"


def test_border_brightness_is_the_mean_of_the_outermost_pixels():
    images = torch.zeros(2, 1, 4, 5, dtype=torch.uint8)
    images[0, :, 1:-1, 1:-1] = 255
    images[1, :, 0] = 255  # 5 of the 14 pixels of the border
    assert border_brightness(images).tolist() == pytest.approx([0, 5 / 14])
    assert border_brightness(torch.full((1, 1, 1, 1), 51, dtype=torch.uint8)).tolist() == pytest.approx([0.2])


# Names


def test_name_resolves_to_the_bundled_model(empty_cwd):
    assert bundled.resolve("mnist") == bundled.BUNDLED_DIR / "mnist"
    assert bundled.resolve(Path("mnist")) == bundled.BUNDLED_DIR / "mnist"
    assert vitral.load("mnist").path == bundled.BUNDLED_DIR / "mnist"
    assert read_checkpoint("mnist").config == vitral.load("mnist").model_config.architecture
    for other in ("./mnist", "mnist/", "runs/mnist", "hf:me/mnist", "model.safetensors"):
        assert bundled.resolve(other) == other


def test_bundled_name_is_none_for_other_paths(tmp_path):
    assert bundled.bundled_name(bundled.BUNDLED_DIR / "mnist" / "model") == "mnist"
    for path in (tmp_path, bundled.BUNDLED_DIR, bundled.BUNDLED_DIR / "other"):
        assert bundled.bundled_name(path) is None


def test_local_file_that_hides_a_bundled_model_is_mentioned(empty_cwd):
    (empty_cwd / "cifar10").write_bytes(b"\xff\xd8\xff\xe0 a photograph")
    with pytest.raises(VitralError, match="cifar10") as error:
        vitral.load("cifar10")
    assert "the bundled model is bundled:cifar10" in error.value.hint


def test_local_run_takes_precedence_with_a_note(empty_cwd, train_tiny: Fit, command):
    shutil.copytree(train_tiny("mnist").path, empty_cwd / "mnist")
    digit(0)[0].save("zero.png")
    predictor = vitral.load("mnist")
    assert predictor.path == Path("mnist")
    assert predictor.notes == ("using the local folder mnist; the bundled model is bundled:mnist",)
    assert vitral.load("bundled:mnist").path == bundled.BUNDLED_DIR / "mnist"
    code, out, err = command("predict", "mnist", "zero.png")
    assert code == 0
    assert "chequerboard" in out
    assert "the bundled model is bundled:mnist" in err


def test_local_folder_without_a_model_mentions_the_bundled_one(empty_cwd):
    (empty_cwd / "mnist").mkdir()
    for _ in range(2):
        with pytest.raises(VitralError, match="mnist") as error:
            vitral.load("mnist")
        assert "the bundled model is bundled:mnist" in error.value.hint
        (empty_cwd / "mnist" / "notes.txt").touch()


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (["predict", "mnits", "x.png"], "no run or model folder mnits", "Did you mean 'mnist'? Bundled models: "),
        (["predict", "vit_base_patch16_224", "x.png"], "no run or model folder vit_base", "hub, such as hf:timm/vit_"),
        (["predict", "timm/vit_base_patch16_224", "x.png"], "no run or model folder timm", "hub, such as hf:timm/vit_"),
        (
            ["predict", "google/vit-base", "x.png"],
            "no run or model folder google",
            "hub: hf:google/vit-base. Create one",
        ),
        (["serve", "mnits"], "no run or model folder mnits", "Bundled models: "),
        (["evaluate", "bundled:mnits"], "no bundled model named 'mnits'. Did you mean 'mnist'?", "Available: "),
        (["models", "show", "mnits"], "no bundled model named 'mnits'. Did you mean 'mnist'?", "Available: "),
        (["convert", "mnits", "out"], "mnits", "Bundled models: "),
        (["summary", "mnits"], "no preset named 'mnits'", "Bundled models: "),
    ],
)
def test_unknown_name_lists_the_bundled_models(empty_cwd, command, arguments, what, hint):
    code, _, err = command(*arguments)
    lines = err.strip().splitlines()
    assert (code, len(lines)) == (2, 2)
    assert what in lines[0]
    assert hint in lines[1]
    assert "mnist" in lines[1]


def test_a_missing_run_is_not_looked_for_on_the_hub(empty_cwd, command):
    lines = command("predict", "runs/mine", "x.png")[2].splitlines()
    assert lines == ["error: no run or model folder runs/mine", "       Create one with: vitral train mnist"]


def test_help_lists_the_bundled_models(command):
    names = ", ".join(bundled.model_names())
    for arguments in (["--help"], ["predict", "--help"], ["serve", "--help"], ["walk", "--help"]):
        assert names in " ".join(command(*arguments)[1].split())


# Without network

REFUSE_CONNECTIONS = """
import socket
connect = socket.socket.connect
def connect_locally(self, address):
    if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1"):
        raise AssertionError(f"connection to {address}")
    connect(self, address)
socket.socket.connect = connect_locally
"""

RUN_COMMANDS = """
import sys
from vitral.cli.main import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as stop:
        assert not stop.code, (line, stop.code)
"""


def run_offline(empty_cwd: Path, *commands: str) -> list[str]:
    """The output of commands in a new process with an empty cache and without network."""
    (empty_cwd.parent / "sitecustomize.py").write_text(REFUSE_CONNECTIONS)
    path = os.pathsep.join([str(empty_cwd.parent), str(ROOT / "src")])
    environment = os.environ | {"VITRAL_HOME": str(empty_cwd.parent / "home"), "PYTHONPATH": path}
    process = subprocess.run(
        [sys.executable, "-c", RUN_COMMANDS, *commands], cwd=empty_cwd, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert not (empty_cwd.parent / "home").exists(), "the cache was used"
    return process.stdout.splitlines()


@pytest.mark.slow
def test_bundled_model_works_offline_with_an_empty_cache(empty_cwd):
    image, label = digit(0)
    image.save("digit.png")
    prediction, *explanation_and_walk = run_offline(
        empty_cwd, "predict mnist digit.png", "explain mnist digit.png --method rollout", "walk digit.png --no-code"
    )
    assert prediction.split()[1] == label
    assert len(explanation_and_walk) > 1
    assert (empty_cwd / "explained" / "digit.png").is_file()
    assert {file.name for file in empty_cwd.iterdir()} == {"digit.png", "explained"}


@pytest.mark.slow
def test_bundled_model_can_be_served(empty_cwd, monkeypatch):
    monkeypatch.setenv("VITRAL_HOME", str(empty_cwd / "home"))
    image, label = digit(3)
    image.save("digit.png")
    with server("mnist") as running:
        (model,) = httpx.get(f"{running.url}/v1/models").json()["models"]
        assert model["name"] == "mnist"
        files = {"file": Path("digit.png").read_bytes()}
        (prediction,) = httpx.post(f"{running.url}/v1/models/mnist/predict", files=files).json()["predictions"]
    assert prediction["labels"][0]["name"] == label


# Commands


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the digits of scikit-learn, which need no files."""
    path = tmp_path_factory.mktemp("trained") / "digits"
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        overrides: dict[str, Any] = {"model.width": 16, "model.depth": 1, "model.heads": 2}
        api.train("digits", out=path, epochs=1, **overrides)
    return path


@pytest.fixture
def bundled_digits(empty_cwd: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, digits_run: Path) -> Path:
    """A folder of bundled models with one model, `digits`."""
    shutil.copytree(digits_run, tmp_path / "bundled" / "digits")
    monkeypatch.setattr(bundled, "BUNDLED_DIR", tmp_path / "bundled")
    return tmp_path / "bundled"


@pytest.mark.slow
def test_commands_accept_a_name_and_do_not_modify_the_package(bundled_digits, empty_cwd, command):
    def read_files() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in bundled_digits.rglob("*") if file.is_file()}

    before = read_files()
    digit(0)[0].save("digit.png")
    for line in (
        "evaluate digits", "compare digits bundled:digits", "embed digits digit.png --out f.npy", "summary digits",
        "figures digits --out figures", "walk digit.png --model digits --no-code", "convert digits converted",
        "push digits hf:me/mine --dry-run", "bench digits --seconds 0.01 --batch-sizes 1 --images 40", "models",
        "predict digits digit.png", "report digits --fast",
    ):  # fmt: skip
        code, _, err = command(*line.split())
        assert code == 0, (line, err)
    assert read_files() == before
    assert {path.name for path in empty_cwd.iterdir()} == {
        "digit.png", "f.npy", "f.names.txt", "figures", "converted", "digits-report.html",
    }  # fmt: skip
    with pytest.raises(VitralError, match="read-only") as error:
        vitral.calibrate("digits")
    assert "vitral models where digits" in error.value.hint


def test_benchmark_results_are_stored_in_the_cache(bundled_digits):
    result = api.bench("digits", images=40, seconds=0.01, batch_sizes=(1,))
    folder = bundled.measurement_dir(bundled_digits / "digits" / "model")
    assert (folder / "bench.json").is_file()
    assert folder.is_relative_to(os.environ["VITRAL_HOME"])
    assert bundled.display_name(folder) == "digits"
    assert Predictor.load("digits", device="cpu").engine.reason == result.reason
    (bundled_digits / "digits" / "model" / "weights.safetensors").write_bytes(b"other weights")
    assert bundled.measurement_dir(bundled_digits / "digits" / "model") != folder


@pytest.mark.slow
def test_export_is_written_to_the_current_folder(bundled_digits, empty_cwd):
    file, parity = api.export("digits", to="torch", images=32)
    assert file == Path("digits.pt2")
    assert file.is_file()
    assert parity


def test_fine_tuning_from_a_bundled_model(bundled_digits, no_figures):
    predictor = api.train("digits", init_from="digits", recipe="digits", epochs=1, out="run")
    assert predictor.model_config.architecture.width == 16


# tools/bundle_model.py


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bundle_model", ROOT / "tools" / "bundle_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bundle_model"] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def finished_run(train_tiny: Fit, dataset: Dataset, monkeypatch, tmp_path) -> Run:
    """A finished run whose dataset, textures, is named mnist; no model is bundled."""
    dataset = replace(dataset, name="mnist")
    use_dataset(monkeypatch, dataset)
    monkeypatch.setattr(bundled, "BUNDLED_DIR", tmp_path / "bundled")
    (tmp_path / "bundled").mkdir()
    run = train_tiny("finished", dataset=dataset, **{"data.name": "mnist", "device": "cpu"})
    vitral.calibrate(run.path)
    run.test_file.write_text(json.dumps(vitral.evaluate(run.path).as_dict()))
    environment = {
        "format": 2,
        "command": "/home/me/.venv/bin/vitral train mnist --seed 3 --out /home/me/runs/x --epochs 4",
        "platform": "Linux-me",
        "launch_id": None,
        "torch": "2",
        "hardware": "2 CPU cores",
    }
    run.environment_file.write_text(json.dumps(environment))
    return run


def use_dataset(monkeypatch: pytest.MonkeyPatch, dataset: Dataset) -> None:
    for module in ("data", "ood"):
        monkeypatch.setattr(f"vitral.evaluation.{module}.load_builtin_dataset", lambda name, **_: dataset)


def edit_test_result(run: Run, **changes: object) -> None:
    run.test_file.write_text(json.dumps(json.loads(run.test_file.read_text()) | changes))


def test_bundling_a_run_rounds_its_weights_and_writes_a_card(finished_run, tool, empty_cwd):
    folder, summary = tool.bundle(finished_run)
    assert bundled.model_names() == ("mnist",)
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == {
        "README.md", "environment.json", "metrics.jsonl", "model/config.json", "model/weights.safetensors",
        "recipe.toml", "test.json",
    }  # fmt: skip
    model, config = load_model(folder)
    original, original_config = load_model(finished_run.path)
    assert config == original_config
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, original.state_dict()[name].bfloat16().float())
    card = (folder / "README.md").read_text()
    assert "- Command: `vitral train mnist --seed 3 --epochs 4`" in card
    assert "/home/me" not in "".join(file.read_text() for file in folder.glob("*.*"))
    assert f"{vitral.evaluate('mnist').top1:.2%}" in card
    assert "test images" in summary
    assert 'device = "auto"' in (folder / "recipe.toml").read_text()
    tool.bundle(finished_run)  # replaces the model
    assert bundled.model_names() == ("mnist",)


def test_bundling_refuses_runs_that_cannot_be_reproduced(finished_run, tool):
    top1 = json.loads(finished_run.test_file.read_text())["top1"]
    edit_test_result(finished_run, top1=top1 - 0.01)
    with pytest.raises(VitralError, match="accuracy here and as recorded differ"):
        tool.bundle(finished_run)
    edit_test_result(finished_run, top1=top1 - 0.01, tta="six")  # test-time augmentation explains the difference
    folder, _ = tool.bundle(finished_run)
    assert "six views" in (folder / "README.md").read_text()


def test_bundling_refuses_unfinished_runs_unknown_datasets_and_large_models(finished_run, tool, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(tool, "MAX_BYTES", 1000)
        with pytest.raises(VitralError, match="the limit is 0 MB"):
            tool.bundle(finished_run)
    finished_run.test_file.unlink()
    with pytest.raises(VitralError, match="is not finished"):
        tool.bundle(finished_run)
    finished_run.recipe_file.write_text(finished_run.recipe_file.read_text().replace('"mnist"', '"photos"'))
    with pytest.raises(VitralError, match="no dataset with a documented source and licence named 'photos'"):
        tool.bundle(finished_run)
    assert bundled.model_names() == ()


def test_bundling_without_validation_calibrates_on_half_of_the_test_set(finished_run, tool, dataset, monkeypatch):
    empty = replace(dataset.validation, images=dataset.validation.images[:0], labels=dataset.validation.labels[:0])
    use_dataset(monkeypatch, replace(dataset, name="mnist", validation=empty))
    folder, summary = tool.bundle(finished_run, ood_data="mnist")
    predictor = vitral.load(folder)
    calibration = predictor.model_config.calibration
    assert calibration.fitted_on == "every other test image"
    assert "every other test image" in summary
    details = json.loads((folder / "test.json").read_text())["bundled"]
    assert details["held_out_images"] == 20
    logits = predictor.reference().logits(dataset.test.images[1::2])
    assert details["false_positive_rate"] == pytest.approx(calibration.is_ood(logits).double().mean().item())
    assert f"{details['ood']['detection_rate']:.1%} of 40 images of mnist" in (folder / "README.md").read_text()


def test_bundling_refuses_rounding_that_changes_the_accuracy(finished_run, tool, monkeypatch):
    round_to_bf16 = tool.round_to_bf16

    def round_and_permute_classes(run: Run, folder: Path) -> None:
        round_to_bf16(run, folder)
        state = load_model(folder)[0].state_dict()
        state["head.out.weight"] = state["head.out.weight"].flip(0)
        tool.save_weights(folder / "model" / "weights.safetensors", state)

    monkeypatch.setattr(tool, "round_to_bf16", round_and_permute_classes)
    with pytest.raises(VitralError, match="accuracy in bf16 and in fp32 differ"):
        tool.bundle(finished_run)
    assert bundled.model_names() == ()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/usr/bin/vitral train cifar10 --recipe cifar10-96 --out=/x", "vitral train cifar10 --recipe cifar10-96"),
        ("/lib/vitral/__main__.py train mnist --out a/b --seed 2", "vitral train mnist --seed 2"),
        ("vitral train --recipe runs/x/recipe.toml", None),
        ("vitral demo", None),
        ("/tmp/my-script.py", None),
        ("", None),
    ],
)
def test_command_is_published_only_if_others_can_run_it(tool, command, expected):
    assert tool.public_command(command) == expected


@pytest.mark.parametrize(
    ("kind", "name"), [("RGB", "cifar10"), ("grey RGB", "mnist"), ("L", "mnist"), ("not an image", "mnist")]
)
def test_walk_without_runs_uses_the_bundled_model_for_the_kind_of_image(empty_cwd, kind, name):
    rng = np.random.default_rng(0)
    grey = Image.fromarray(rng.integers(0, 256, (40, 40), dtype=np.uint8))
    colour = Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8))
    if kind == "not an image":
        Path("image.png").write_text("text")
    else:
        {"RGB": colour, "grey RGB": grey.convert("RGB"), "L": grey}[kind].save("image.png")
    assert default_model(Path("image.png")) == f"bundled:{name}"
