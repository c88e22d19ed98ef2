"""push: what it writes loads in timm and in transformers, and what it uploads can be fetched again."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard as HubCard
from PIL import Image

from data.files.test_listing import photograph
from support.common import leave_out_pictures
from support.fake_hub import TOKEN, fake_hub
from support.processes import Process
from support.references import answers, lively, ours, timm, transformers
from vitral import api as workshop
from vitral import weights
from vitral.cli import main as cli
from vitral.errors import VitralError
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViTConfig
from vitral.recipes.builtin import named
from vitral.recipes.schema import Recipe
from vitral.reporting.hub.publish import push
from vitral.weights import Checkpoint

SMALL = ViTConfig(image_size=(24, 32), patch_size=8, classes=3, width=24, depth=2, heads=2)
NAMES = ("ants", "bees", "wasps")


def recipe() -> Recipe:
    plan = named("folder-scratch")
    model = replace(SMALL, image_size=(32, 32), classes=2)
    return replace(plan, model=model, epochs=1, data=replace(plan.data, crop=0.9, interpolation="bicubic"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("push")
    for index in range(20):
        photograph(place / "insects" / ("ants", "bees")[index % 2] / f"{index}.png", (index % 2 * 200, 90, 90), index)
    with pytest.MonkeyPatch.context() as patched:
        leave_out_pictures(patched)
        workshop.train(recipe=recipe().changed({"data.name": str(place / "insects")}), out=place / "run")
    return place / "run"


def model_of(changes: dict[str, Any], variant: str = "plain") -> Checkpoint:
    return ours(lively(VARIANTS[variant](replace(SMALL, **changes))), classes=NAMES)


def loaded(folder: Path, model: Checkpoint) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of vitral's, timm's and transformers' model for the same images."""
    images = torch.randn(2, 3, *model.config.image_size, generator=torch.Generator().manual_seed(0))
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    others = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    return answers(model.build(), images), answers(theirs, images), answers(others, images)


@pytest.mark.parametrize(
    ("changes", "variant"),
    [
        ({}, "plain"),
        ({"pooling": "mean", "positions": "sincos", "qk_norm": True, "layer_scale": 0.1}, "plain"),
        ({"pooling": "attention", "registers": 2, "gelu": "tanh", "mlp_width": 40, "qkv_bias": False}, "plain"),
        ({"pooling": "mean"}, "late-norm"),
        ({}, "distilled"),
    ],
)
def test_timm_and_transformers_load_the_folder_and_give_our_logits(changes, variant, tmp_path):
    model = model_of(changes, variant)
    weights.write(model, tmp_path / "source", to="vitral")
    pushed = push(tmp_path / "source", "hf:me/insects", folder=tmp_path / "there", dry_run=True)
    assert pushed.loaded_by == ("vitral", "timm", "transformers")
    mine, timms, transformers_ = loaded(tmp_path / "there", model)
    assert torch.allclose(mine, timms, atol=1e-4)
    assert torch.allclose(mine, transformers_, atol=1e-4)


def test_class_names_and_preprocessing_arrive_in_both(run, tmp_path):
    push(run, "hf:me/insects", folder=tmp_path / "there", dry_run=True)
    picture = Image.effect_noise((70, 90), 60).convert("RGB")
    model = workshop.load(run)
    seen = model.card.preprocessing
    expected = seen.normalise(seen.pixels(picture)[None])
    theirs = timm.create_model(f"local-dir:{tmp_path / 'there'}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs))
    assert torch.allclose(transform(picture)[None], expected, atol=1e-5)
    assert theirs.pretrained_cfg["label_names"] == ["ants", "bees"]
    said = transformers.pipeline("image-classification", model=str(tmp_path / "there"))(picture)
    logits = model.logits(seen.pixels(picture)[None])
    for row, name in enumerate(("ants", "bees")):
        score = next(answer["score"] for answer in said if answer["label"] == name)
        assert score == pytest.approx(logits.softmax(dim=1)[0, row].item(), abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "variant", "reason"),
    [({"positions": "learned+rotary"}, "plain", "no positions"), ({}, "patch-norm", "no variant 'patch-norm'")],
)
def test_what_the_others_cannot_hold_is_written_for_vitral_with_the_reason(changes, variant, reason, tmp_path):
    model = model_of(changes, variant)
    weights.write(model, tmp_path / "source", to="vitral")
    pushed = push(tmp_path / "source", "hf:me/insects", folder=tmp_path / "there", dry_run=True)
    assert pushed.loaded_by == ("vitral",)
    assert f"timm cannot hold this model: it has {reason}" in pushed.notes[0]
    assert reason in (tmp_path / "there" / "README.md").read_text()
    images = torch.randn(2, 3, 24, 32)
    assert torch.equal(answers(weights.read(tmp_path / "there").build(), images), answers(model.build(), images))


def test_dinov2s_classifier_goes_to_transformers_alone(tmp_path):
    model = model_of({"image_size": (32, 32)}, "class-and-mean")
    weights.write(model, tmp_path / "source", to="vitral")
    pushed = push(tmp_path / "source", "hf:me/insects", folder=tmp_path / "there", dry_run=True)
    assert pushed.loaded_by == ("vitral", "transformers")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "there").eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.allclose(answers(theirs, images), answers(model.build(), images), atol=1e-4)


def test_the_card_says_what_was_measured(run, tmp_path):
    push(run, "hf:me/insects", folder=tmp_path / "there", dry_run=True, license="mit")
    card, test = HubCard.load(tmp_path / "there" / "README.md"), json.loads((run / "test.json").read_text())
    assert card.data.license == "mit"
    assert card.data.library_name == "timm"
    (result,) = card.data.eval_results
    assert result.metric_value == pytest.approx(test["top1"], abs=1e-6)
    assert (result.dataset_name, result.dataset_split) == ("insects", "validation")
    assert f"| top-1 accuracy | {test['top1']:.2%} | {test['top1_low']:.2%} – {test['top1_high']:.2%} |" in card.text
    assert "on which the best epoch was chosen too" in card.text
    assert "recipe folder-scratch: muon 0.003, 1 epochs" in card.text
    assert str(run.parent) not in card.text, "somebody's paths are nobody's business"
    assert (tmp_path / "there" / "training.toml").read_bytes() == (run / "recipe.toml").read_bytes()
    for library in ("vitral.load(", "timm.create_model(", "pipeline("):
        assert library in card.text


def test_a_checkpoint_of_another_library_has_a_card_without_results(run, tmp_path):
    weights.convert(run, tmp_path / "timm.safetensors", to="timm")
    push(tmp_path / "timm.safetensors", "hf:me/x", heads=2, folder=tmp_path / "there", dry_run=True)
    card = HubCard.load(tmp_path / "there" / "README.md")
    assert card.data.eval_results is None
    assert "without measured results" in card.text


# ── uploading, in processes of their own: huggingface_hub reads its environment when imported ────────────────────


def process(*words: object, home: Path, **environment: str) -> str:
    """What it said."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE"))}
    done = Process(*words, environment=clean | {"HF_HOME": str(home)} | environment)
    said, complaint = done.communicate(120)
    assert done.returncode == 0, complaint
    return said


def test_a_pushed_model_is_fetched_again_and_answers_the_same(run, tmp_path):
    picture = tmp_path / "picture.png"
    Image.effect_noise((70, 90), 60).convert("RGB").save(picture)
    with fake_hub() as hub:
        ends = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        assert f"{hub.endpoint}/me/insects" in process("push", run, "hf:me/insects", "--private", home=tmp_path, **ends)
        assert set(hub.repositories["me/insects"]) == {"README.md", "config.json", "model.safetensors", "training.toml"}
        assert hub.private["me/insects"]
        there = process("predict", "hf:me/insects", picture, home=tmp_path, **ends)
    here = process("predict", run, picture, "--json", home=tmp_path)
    names = [label["name"] for label in json.loads(here)["labels"]]
    assert [part.split()[-2] for part in there.strip().split(" · ")] == names


def test_a_token_that_may_not_write_is_named(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_wrong")
    with fake_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        with pytest.raises(VitralError, match="hf:me/x was not written: ") as refused:
            push(run, "hf:me/x")
    assert "write access" in refused.value.hint


def test_without_a_network_the_way_round_it_is_named(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(VitralError, match="hf:me/x was not written: ") as refused:
        push(run, "hf:me/x")
    assert "no network?" in refused.value.hint
    assert "\n" not in str(refused.value.what)


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (["hf:me/x"], "there is no token to write hf:me/x with", "hf auth login"),
        (["me/x"], "'me/x' is not a model on the hub", "hf:owner/name"),
        (["hf:me/x", "--dry-run", "--folder", "{run}"], "already exists and is not empty", "nothing is overwritten"),
    ],
)
def test_mistakes_are_two_lines(run, monkeypatch, capsys, words, what, hint):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(SystemExit) as stop:
        cli.main(["push", str(run), *(word.format(run=run) for word in words)])
    said = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert what in said[0]
    assert hint in said[1]
    assert len(said) == 2
