"""push: the files load in timm and transformers, and an uploaded model can be downloaded again."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard as HubCard
from PIL import Image

from support.common import skip_figures
from support.fake_hub import TOKEN, fake_hub
from support.photos import save_photo
from support.processes import Process
from support.references import as_checkpoint, compute_logits, randomize_weights, timm, transformers
from vitral import api, weights
from vitral.cli import main as cli
from vitral.errors import VitralError
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViTConfig
from vitral.recipes.builtin import get_recipe
from vitral.recipes.checkpoint_options import CheckpointOptions
from vitral.recipes.schema import Recipe, read_recipe
from vitral.reporting.hub.publish import push
from vitral.runs.model_io import load_model, save_model
from vitral.weights import Checkpoint

SMALL = ViTConfig(image_size=(24, 32), patch_size=8, num_classes=3, width=24, depth=2, heads=2)
NAMES = ("ants", "bees", "wasps")


def recipe() -> Recipe:
    base = get_recipe("folder-scratch")
    model = replace(SMALL, image_size=(32, 32), num_classes=2)
    return replace(base, model=model, epochs=1, data=replace(base.data, crop=0.9, interpolation="bicubic"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push")
    for index in range(20):
        save_photo(folder / "insects" / ("ants", "bees")[index % 2] / f"{index}.png", (index % 2 * 200, 90, 90), index)
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        api.train(recipe=recipe().with_overrides({"data.name": str(folder / "insects")}), out=folder / "run")
    return folder / "run"


def make_checkpoint(changes: dict[str, Any], variant: str = "plain") -> Checkpoint:
    return as_checkpoint(randomize_weights(VARIANTS[variant](replace(SMALL, **changes))), classes=NAMES)


def all_logits(folder: Path, model: Checkpoint) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of vitral, timm and transformers for the same images."""
    images = torch.randn(2, 3, *model.config.image_size, generator=torch.Generator().manual_seed(0))
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    others = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    return compute_logits(model.build(), images), compute_logits(theirs, images), compute_logits(others, images)


@pytest.mark.parametrize(
    ("changes", "variant"),
    [
        ({}, "plain"),
        ({"pooling": "mean", "positions": "sincos", "qk_norm": True, "layer_scale": 0.1}, "plain"),
        (
            {"pooling": "attention", "registers": 2, "activation": "relu", "mlp_width": 40, "qkv_bias": False},
            "plain",
        ),
        ({"pooling": "mean"}, "late-norm"),
        ({}, "distilled"),
    ],
)
def test_timm_and_transformers_load_the_folder_and_compute_the_same_logits(changes, variant, tmp_path):
    model = make_checkpoint(changes, variant)
    weights.write(model, tmp_path / "source", to="vitral")
    result = push(tmp_path / "source", "hf:me/insects", folder=tmp_path / "there", dry_run=True)
    assert result.loaded_by == ("vitral", "timm", "transformers")
    ours_logits, timm_logits, transformers_logits = all_logits(tmp_path / "there", model)
    assert torch.allclose(ours_logits, timm_logits, atol=1e-4)
    assert torch.allclose(ours_logits, transformers_logits, atol=1e-4)


def test_class_names_and_preprocessing_are_preserved(run, tmp_path):
    push(run, "hf:me/insects", folder=tmp_path / "there", dry_run=True)
    picture = Image.effect_noise((70, 90), 60).convert("RGB")
    model = api.load(run)
    preprocessing = model.model_config.preprocessing
    expected = preprocessing.normalise(preprocessing.resize_and_crop(picture)[None])
    theirs = timm.create_model(f"local-dir:{tmp_path / 'there'}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs))
    assert torch.allclose(transform(picture)[None], expected, atol=1e-5)
    assert theirs.pretrained_cfg["label_names"] == ["ants", "bees"]
    predictions = transformers.pipeline("image-classification", model=str(tmp_path / "there"))(picture)
    logits = model.logits(preprocessing.resize_and_crop(picture)[None])
    for row, name in enumerate(("ants", "bees")):
        score = next(prediction["score"] for prediction in predictions if prediction["label"] == name)
        assert score == pytest.approx(logits.softmax(dim=1)[0, row].item(), abs=1e-5)


def test_a_note_says_that_the_calibration_is_lost(run, tmp_path):
    model, config = load_model(run)
    for temperature in (1.0, 2.0):
        calibration = replace(config.calibration, temperature=temperature)
        save_model(tmp_path / f"{temperature}", model, replace(config, calibration=calibration))
        result = push(tmp_path / f"{temperature}", "hf:me/insects", dry_run=True)
        is_noted = any("timm format does not contain the calibration (temperature" in note for note in result.notes)
        assert is_noted == (temperature != 1)


@pytest.mark.parametrize(
    ("changes", "variant", "reason"),
    [
        ({"positions": "learned+rotary"}, "plain", "learned+rotary positions"),
        ({}, "patch-norm", "variant 'patch-norm'"),
    ],
)
def test_unsupported_model_is_written_in_vitrals_format_with_the_reason(changes, variant, reason, tmp_path):
    model = make_checkpoint(changes, variant)
    weights.write(model, tmp_path / "source", to="vitral")
    result = push(tmp_path / "source", "hf:me/insects", folder=tmp_path / "there", dry_run=True)
    assert result.loaded_by == ("vitral",)
    assert f"timm cannot represent this model: it does not support {reason}" in result.notes[0]
    assert reason in (tmp_path / "there" / "README.md").read_text()
    images = torch.randn(2, 3, 24, 32)
    assert torch.equal(
        compute_logits(weights.read(tmp_path / "there").build(), images), compute_logits(model.build(), images)
    )


def test_class_and_mean_variant_is_written_for_transformers_only(tmp_path):
    model = make_checkpoint({"image_size": (32, 32)}, "class-and-mean")
    weights.write(model, tmp_path / "source", to="vitral")
    result = push(tmp_path / "source", "hf:me/insects", folder=tmp_path / "there", dry_run=True)
    assert result.loaded_by == ("vitral", "transformers")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "there").eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.allclose(compute_logits(theirs, images), compute_logits(model.build(), images), atol=1e-4)


def test_model_card_has_the_evaluation_results(run, tmp_path):
    push(run, "hf:me/insects", folder=tmp_path / "there", dry_run=True, license="mit")
    card, test = HubCard.load(tmp_path / "there" / "README.md"), json.loads((run / "test.json").read_text())
    assert card.data.license == "mit"
    assert card.data.library_name == "timm"
    (result,) = card.data.eval_results
    assert result.metric_value == pytest.approx(test["top1"], abs=1e-6)
    assert (result.dataset_name, result.dataset_split) == ("insects", "validation")
    assert (
        f"| Top-1 accuracy | {test['top1']:.2%} | {100 * test['top1_low']:.2f}-{test['top1_high']:.2%} |" in card.text
    )
    assert "also used to select the best epoch" in card.text
    assert "Recipe folder-scratch: muon, lr 0.003, 1 epochs" in card.text
    assert str(run.parent) not in card.text, "no paths of the training machine"
    published, original = read_recipe(tmp_path / "there" / "training.toml"), read_recipe(run / "recipe.toml")
    assert published == original.with_overrides({"data.name": "insects"})
    for library in ("vitral.load(", "timm.create_model(", "pipeline("):
        assert library in card.text


def test_model_card_has_the_accuracy_with_and_without_tta(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    test = json.loads((run / "test.json").read_text())
    plain = {"value": 0.75, "low": 0.5, "high": 0.875}
    (tmp_path / "run" / "test.json").write_text(json.dumps(test | {"tta": "flip", "accuracy_without_tta": plain}))
    push(tmp_path / "run", "hf:me/insects", folder=tmp_path / "there", dry_run=True)
    card = HubCard.load(tmp_path / "there" / "README.md")
    (result,) = card.data.eval_results
    assert result.metric_value == 0.75, "that of a plain prediction"
    assert f"| Top-1 accuracy with test-time augmentation | {test['top1']:.2%} |" in card.text
    assert "| Top-1 accuracy | 75.00% | 50.00-87.50% |" in card.text
    (tmp_path / "run" / "test.json").write_text(json.dumps(test | {"accuracy_without_tta": {"value": "high"}}))
    with pytest.raises(VitralError, match=r"test\.json"):
        push(tmp_path / "run", "hf:me/insects", folder=tmp_path / "again", dry_run=True)


def published_text(folder: Path) -> str:
    """The bytes of all published files as text."""
    return "".join(file.read_bytes().decode("latin-1") for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("positions", ["learned", "learned+rotary"])  # in timm's format, and in vitral's
def test_published_files_contain_no_path_of_the_training_machine(positions, run, tmp_path):
    source = tmp_path / "home" / "alice" / "run"
    shutil.copytree(run, source)
    overrides = {"init_from": str(tmp_path / "home/alice/vit.safetensors"), "data.name": str(tmp_path / "home/alice/p")}
    (source / "recipe.toml").write_text(read_recipe(run / "recipe.toml").with_overrides(overrides).to_toml())
    model, config = load_model(source)
    if positions != "learned":
        architecture = replace(config.architecture, positions=positions)
        model, config = VARIANTS["plain"](architecture), replace(config, architecture=architecture)
    save_model(source / "model", model, replace(config, trained_on=str(tmp_path / "home/alice/p")))
    push(source, "hf:me/insects", folder=tmp_path / "there", dry_run=True)
    text = published_text(tmp_path / "there")
    assert "alice" not in text
    assert str(tmp_path) not in text
    recipe = read_recipe(tmp_path / "there" / "training.toml")
    assert (recipe.init_from, recipe.data.name) == ("vit.safetensors", "p")


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "[1]", '{"top1": "high"}', '{"top1": 1}', "\0", '{"images": ' + "9" * 5_000 + "}"]
)
def test_damaged_test_results_are_refused(content, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "test.json").write_text(content)
    with pytest.raises(VitralError, match=r"test\.json") as caught:
        push(tmp_path / "run", "hf:me/insects", folder=tmp_path / "there", dry_run=True)
    assert "Delete the file" in caught.value.hint


def test_results_without_a_finite_loss_are_published(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    test = json.loads((run / "test.json").read_text())
    (tmp_path / "run" / "test.json").write_text(json.dumps(test | {"loss": None}))
    push(tmp_path / "run", "hf:me/insects", folder=tmp_path / "there", dry_run=True)
    assert "Cross-entropy" not in (tmp_path / "there" / "README.md").read_text()


def test_model_card_of_another_librarys_checkpoint_has_no_results(run, tmp_path):
    weights.convert(run, tmp_path / "timm.safetensors", to="timm")
    options = CheckpointOptions(heads=2)
    push(tmp_path / "timm.safetensors", "hf:me/x", options=options, folder=tmp_path / "there", dry_run=True)
    card = HubCard.load(tmp_path / "there" / "README.md")
    assert card.data.eval_results is None
    assert "No evaluation results" in card.text


# ── uploading, in processes of their own: huggingface_hub reads its environment when imported ────────────────────


def process(*words: object, home: Path, **environment: str) -> str:
    """Run a command with a clean hub configuration; returns its output."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE"))}
    done = Process(*words, environment=clean | {"HF_HOME": str(home)} | environment)
    output, errors = done.communicate(120)
    assert done.returncode == 0, errors
    return output


@pytest.mark.slow
def test_pushed_model_is_downloaded_again_with_the_same_predictions(run, tmp_path, command):
    picture = tmp_path / "picture.png"
    Image.effect_noise((70, 90), 60).convert("RGB").save(picture)
    with fake_hub() as hub:
        ends = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        assert f"{hub.endpoint}/me/insects" in process("push", run, "hf:me/insects", "--private", home=tmp_path, **ends)
        assert set(hub.repositories["me/insects"]) == {"README.md", "config.json", "model.safetensors", "training.toml"}
        assert hub.private["me/insects"]
        there = process("predict", "hf:me/insects", picture, home=tmp_path, **ends)
    _, here, _ = command("predict", run, picture, "--json")
    names = [label["name"] for label in json.loads(here)["labels"]]
    assert [part.split()[-2] for part in there.strip().split(", ")] == names


def test_token_without_write_access_is_reported(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_wrong")
    with fake_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        with pytest.raises(VitralError, match="upload to hf:me/x failed") as error:
            push(run, "hf:me/x")
    assert "write access" in error.value.hint


def test_missing_network_is_reported(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(VitralError, match="upload to hf:me/x failed") as error:
        push(run, "hf:me/x")
    assert "network" in error.value.hint
    assert "\n" not in str(error.value.what)


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (["hf:me/x"], "no token for writing to hf:me/x", "hf auth login"),
        (["me/x"], "'me/x' is not a model name on the hub", "hf:owner/name"),
        (["hf:me/x", "--dry-run", "--folder", "{run}"], "already exists and is not empty", "Choose another --folder"),
    ],
)
def test_errors_are_two_lines(run, monkeypatch, capsys, words, what, hint):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["push", str(run), *(word.format(run=run) for word in words)])
    lines = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2
    assert what in lines[0]
    assert hint in lines[1]
    assert len(lines) == 2
