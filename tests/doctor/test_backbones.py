"""`--init-from auto`: which checkpoint is chosen, what is checked on the hub, and what happens without a network."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from PIL import Image

from support.common import Command, skip_figures
from support.fake_hub import COMMIT, Hub, fake_hub
from support.random_classes import save_random_classes
from support.references import as_checkpoint, randomize_weights
from vitral import api, weights
from vitral.device.select import select_hardware
from vitral.doctor import backbones
from vitral.doctor.backbones import BACKBONES, AffordableBackbone, Backbone, DataFacts
from vitral.doctor.estimates import OVERHEAD_SECONDS, TimeEstimate
from vitral.doctor.step_times import StepTimes
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import DataConfig

TINY, TINY_384, SMALL = BACKBONES[-1], BACKBONES[-2], BACKBONES[-3]
FACTS = DataFacts(num_train=1_000, num_images=1_150, num_classes=5, median_side=300)


def affordable(
    monkeypatch: pytest.MonkeyPatch, facts: DataFacts, *, tiny_seconds: float, budget: float, memory: float = 200e9
) -> list[str]:
    """Titles of the backbones that are affordable if fine-tuning Ti/16 takes `tiny_seconds`."""
    seconds = OVERHEAD_SECONDS + tiny_seconds
    estimate = TimeEstimate(seconds, seconds, seconds, select_hardware(device="cpu"), 1, None)
    monkeypatch.setattr(backbones, "estimate_seconds", lambda *_: estimate)
    monkeypatch.setattr(backbones, "_memory_bytes", lambda _: memory)
    recipe = get_recipe("folder-finetune")
    return [candidate.backbone.title for candidate in backbones.affordable_backbones(facts, recipe, budget)]


def test_more_images_and_more_time_allow_a_larger_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    many = DataFacts(num_train=60_000, num_images=70_000, num_classes=5, median_side=300)
    assert affordable(monkeypatch, FACTS, tiny_seconds=60, budget=3600)[0] == "S/16 at 224 px"
    assert affordable(monkeypatch, many, tiny_seconds=60, budget=3600 * 3)[0] == "L/16 at 224 px"
    assert affordable(monkeypatch, FACTS, tiny_seconds=600, budget=700) == ["Ti/16 at 224 px"]


def test_a_backbone_must_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert affordable(monkeypatch, FACTS, tiny_seconds=60, budget=3600, memory=2e9)[0] == "Ti/16 at 224 px"


def test_a_budget_that_is_too_short_for_all_leaves_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert affordable(monkeypatch, FACTS, tiny_seconds=600, budget=5) == ["Ti/16 at 224 px"]


@pytest.mark.slow
def test_384_pixels_are_used_only_for_images_of_that_size(monkeypatch: pytest.MonkeyPatch) -> None:
    large = DataFacts(num_train=400, num_images=460, num_classes=5, median_side=500)
    assert affordable(monkeypatch, large, tiny_seconds=60, budget=3600)[0] == "Ti/16 at 384 px"
    assert affordable(monkeypatch, FACTS, tiny_seconds=60, budget=3600)[-1] == "Ti/16 at 224 px"
    assert "Ti/16 at 384 px" not in affordable(monkeypatch, FACTS, tiny_seconds=60, budget=3600)


def test_data_facts_of_a_folder(tmp_path: Path) -> None:
    for name, sides in {"ants": (40, 50, 60), "bees": (70, 80)}.items():
        (tmp_path / name).mkdir()
        for side in sides:
            Image.new("RGB", (500, side)).save(tmp_path / name / f"{side}.png")
    (tmp_path / "ants" / "broken.jpg").write_bytes(b"not an image")
    facts = backbones.read_data_facts(DataConfig(name=f"{tmp_path}/", validation=0.0))
    assert (facts.num_train, facts.num_images, facts.num_classes) == (6, 6, 2)
    assert facts.median_side == 60


def test_other_data_than_image_files_is_refused() -> None:
    with pytest.raises(VitralError, match="--init-from auto needs a folder, CSV list or shards of images"):
        backbones.read_data_facts(DataConfig(name="mnist"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the two smallest backbones, which are tiny models here. The cache is empty."""
    config = ViTConfig(image_size=(32, 32), patch_size=16, width=48, depth=1, heads=4, num_classes=7)
    folder = tmp_path / "model"
    weights.write(as_checkpoint(randomize_weights(ViT(config))), folder, to="timm")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    with fake_hub() as hub:
        for backbone in (TINY, SMALL):
            hub.repositories[backbone.repository] = dict(files)
            hub.licenses[backbone.repository] = "apache-2.0"
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub


def find(*candidates: Backbone) -> backbones.BackboneChoice:
    return backbones.find_checkpoint([AffordableBackbone(backbone, 60.0) for backbone in candidates], FACTS, 1800.0)


def test_choice_names_license_size_and_reason_and_pins_the_commit(hub: Hub) -> None:
    choice = find(SMALL, TINY)
    size = sum(len(data) for name, data in hub.repositories[SMALL.repository].items() if name == "model.safetensors")
    assert choice.source == f"hf:{SMALL.repository}@{COMMIT}"
    assert (choice.license, choice.num_bytes) == ("Apache-2.0", size)
    first, reason = choice.lines()
    assert first == f"Checkpoint {SMALL.repository}: S/16 at 224 px, 22 M parameters, Apache-2.0, {size / 1e6:.0f} MB"
    assert reason == (
        "The most accurate of 8 backbones for 1,000 training images of about 300 px and a limit of 30:00 on this "
        "machine (estimate: 1:00)"
    )


@pytest.mark.slow
def test_gated_restricted_and_missing_models_are_passed_over(hub: Hub) -> None:
    hub.gated.add(SMALL.repository)
    assert find(SMALL, TINY).backbone == TINY
    hub.gated.clear()
    hub.licenses[SMALL.repository] = "cc-by-nc-4.0"
    choice = find(TINY_384, SMALL, TINY)
    assert choice.backbone == TINY
    assert choice.notes[0].startswith(f"Skipped hf:{TINY_384.repository}: ")
    assert choice.notes[1] == f"Skipped {SMALL.repository}, which is now under the license cc-by-nc-4.0"
    del hub.licenses[TINY.repository]
    with pytest.raises(VitralError, match="no checkpoint for --init-from auto"):
        find(SMALL, TINY)


def test_without_the_hub_the_cache_is_used_or_the_error_names_what_is_possible(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "cache" / f"models--{TINY.repository.replace('/', '--')}"
    shutil.copytree(tmp_path / "model", repository / "snapshots" / COMMIT)  # as huggingface_hub caches it
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    choice = find(SMALL, TINY)
    assert (choice.source, choice.num_bytes) == (f"hf:{TINY.repository}", 0)
    assert choice.lines()[-1] == "The hub is unreachable; this is the best one in the cache"
    assert weights.read(choice.source).config.width == 48
    with pytest.raises(VitralError, match="the hub is unreachable") as error:
        find(SMALL)
    assert f"hf download {SMALL.repository}" in error.value.hint
    assert "--init-from FILE" in error.value.hint


def test_without_huggingface_hub_the_error_names_the_install_command(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(VitralError, match="require huggingface_hub") as error:
        find(SMALL, TINY)
    assert error.value.hint.startswith("pip install 'vitral[hub]', then --init-from hf:")


def test_train_and_doctor_choose_the_same_checkpoint(
    hub: Hub, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = StepTimes(seconds=(0.1,) * 5)  # on the machine that both measure
    monkeypatch.setattr("vitral.doctor.estimates.time_steps", lambda *_, **__: steps)
    skip_figures(monkeypatch)
    photos = save_random_classes(tmp_path / "photos", {"ants": 14, "bees": 12})
    code, out, err = command("train", photos, "--init-from", "auto", "--epochs", 1, "--out", tmp_path / "run")
    assert code == 0, err
    assert f"Checkpoint {TINY.repository}: Ti/16 at 224 px, 6 M parameters, Apache-2.0, " in out
    assert api.load(tmp_path / "run").model.config.width == 48
    assert f"hf:{TINY.repository}@{COMMIT}" in (tmp_path / "run" / "recipe.toml").read_text()
    code, out, err = command("doctor", photos)
    assert code == 0, err
    assert f"--init-from hf:{TINY.repository}" in out
