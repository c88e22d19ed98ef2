"""Fine-tuning with parts of the labels: epochs, subsets, heads and pairing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.models import save_random_model
from support.photos import save_class_folders
from vitral.data.datasets import Dataset, Split
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.evaluation.label_subsets import draw_label_subset
from vitral.models.vit import ViT
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import Recipe
from vitral.training.comparison.label_efficiency import (
    SIDES,
    FineTuning,
    Side,
    comparison_settings,
    evaluation_split,
    fine_tune,
    fine_tuning_recipe,
    load_setups,
    num_epochs,
    random_weights_recipe,
    run_split,
    steps_per_epoch,
    with_new_head,
)
from vitral.training.setup import TrainingSetup


@pytest.fixture
def setup(dataset: Dataset, recipe: Recipe, preprocessing: Preprocessing) -> TrainingSetup:
    dataset = replace(dataset, train=dataset.train.to_model_input(preprocessing))
    torch.manual_seed(0)
    weights = dict(ViT(recipe.model).state_dict())
    return TrainingSetup(
        recipe=replace(recipe, checkpoint_epochs=0, epochs=2),
        dataset=dataset,
        loaded_dataset=dataset,
        preprocessing=preprocessing,
        initial_weights=weights,
        notes=(),
    )


@pytest.fixture
def fine_tuning(setup: TrainingSetup, tmp_path: Path) -> FineTuning:
    before = replace(setup, recipe=random_weights_recipe(setup.recipe), initial_weights=None)
    return FineTuning(setups={"before": before, "after": setup}, fractions=(0.1, 1.0), seeds=2, folder=tmp_path)


@pytest.mark.parametrize(
    ("images", "epochs"),
    [
        (50_000, 10),  # 195 steps per epoch, 1,950 steps
        (5_000, 33),  # √0.1 of them: 617 steps of 19 per epoch
        (500, 195),  # √0.01 of them: 195 steps of 1 per epoch
        (10, 100),  # at least 100 steps
    ],
)
def test_few_labels_are_trained_for_more_epochs_but_fewer_steps(images: int, epochs: int) -> None:
    recipe = replace(get_recipe("cifar10"), epochs=10, batch_size=256)
    assert num_epochs(recipe, images, 50_000) == epochs


def test_few_labels_are_never_trained_for_more_steps_than_all() -> None:
    recipe = replace(get_recipe("folder-finetune"), epochs=2, batch_size=32)
    for images in (2, 24, 245):
        assert num_epochs(recipe, images, 245) * steps_per_epoch(recipe, images) == 2 * 7


def test_a_run_has_the_drawn_labels_and_selects_no_epoch(fine_tuning: FineTuning) -> None:
    runs = list(fine_tuning.runs())
    assert [(run.side, run.images, run.seed) for run in runs[:4]] == [
        ("before", 10, 0), ("after", 10, 0), ("before", 10, 1), ("after", 10, 1)
    ]  # fmt: skip
    train = fine_tuning.setups["after"].dataset.train
    for run in runs:
        setup = fine_tuning.setups[run.side]
        split = run_split(fine_tuning, run, evaluation_split(setup))
        rows = draw_label_subset(train.labels, run.fraction, run.seed)
        assert torch.equal(split.dataset.train.images[:], train.images[rows])
        assert torch.equal(split.dataset.train.labels, train.labels[rows])
        assert len(split.dataset.validation) == split.setup.recipe.data.validation == 0
        assert torch.equal(split.evaluation.labels, setup.dataset.test.labels)
        assert split.setup.recipe.seed == run.seed


def test_without_test_images_the_validation_images_are_evaluated(setup: TrainingSetup) -> None:
    empty = Split(images=setup.dataset.test.images[:0], labels=setup.dataset.test.labels[:0])
    without_test = replace(setup, dataset=replace(setup.dataset, load_test=lambda: empty))
    assert torch.equal(evaluation_split(without_test).labels, setup.dataset.validation.labels)


@pytest.mark.slow
def test_finished_runs_are_not_repeated_and_keep_only_their_result(fine_tuning: FineTuning) -> None:
    started: list[str] = []
    first = fine_tune(fine_tuning, on_run=started.append)
    assert len(started) == 8
    assert started[0] == "10% of the labels, seed 0, before"
    for fraction in (0.1, 1.0):
        before, after = first[fraction]
        assert before.shape == after.shape == (2, 40)
    files = {path.name for path in fine_tuning.folder.rglob("*") if path.is_file()}
    assert files == {"evaluation.json"}

    (fine_tuning.folder / "after-10-labels-1" / "evaluation.json").write_text("{")
    started.clear()
    again = fine_tune(fine_tuning, on_run=started.append)
    assert started == ["10% of the labels, seed 1, after"]
    assert all((again[f][side] == first[f][side]).all() for f in (0.1, 1.0) for side in (0, 1))


@pytest.mark.slow
def test_the_same_weights_on_both_sides_give_the_same_predictions(fine_tuning: FineTuning) -> None:
    """Labels, batches and augmentation are paired, so nothing but the weights can make a difference."""
    setups: dict[Side, TrainingSetup] = dict.fromkeys(SIDES, fine_tuning.setups["after"])
    recipe = setups["after"].recipe.with_overrides({"augment.shift": 2, "model.drop_path": 0.2})
    setups = {side: replace(setup, recipe=recipe) for side, setup in setups.items()}
    results = fine_tune(replace(fine_tuning, setups=setups, fractions=(0.5,)))
    before, after = results[0.5]
    assert (before == after).all()
    assert (before[0] != before[1]).any()


def test_the_command_that_continues_is_that_of_the_comparison(fine_tuning: FineTuning, tmp_path: Path) -> None:
    assert fine_tuning.continuation == f"the same command and --results {tmp_path}"
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text('[pretrain]\nmethod = "distill"\n')
    judged = replace(fine_tuning, judged_run=run)
    assert judged.continuation == f"vitral distill --resume {run} --judge textures, and the same --judge flags"


def test_heads_start_at_zero(setup: TrainingSetup) -> None:
    assert setup.initial_weights is not None
    setup.initial_weights["head.out.weight"].fill_(1.0)
    weights = with_new_head(setup).initial_weights
    assert weights is not None
    assert not weights["head.out.weight"].any()
    others = [name for name in weights if not name.startswith("head.out")]
    assert all(torch.equal(weights[name], setup.initial_weights[name]) for name in others)


def test_changed_weights_are_another_comparison(fine_tuning: FineTuning) -> None:
    settings = comparison_settings(fine_tuning.setups)
    assert settings["before"]["weights"] == "random"
    weights = fine_tuning.setups["after"].initial_weights
    assert weights is not None
    weights["encoder.norm.weight"] += 1
    assert comparison_settings(fine_tuning.setups) != settings


def test_random_weights_have_no_layer_wise_decay() -> None:
    finetune = replace(get_recipe("folder-finetune"), init_from="vit.safetensors", tune="lora")
    recipe = random_weights_recipe(finetune)
    assert (recipe.init_from, recipe.tune, recipe.optim.layer_decay) == ("", "full", 1.0)
    assert replace(recipe.optim, layer_decay=finetune.optim.layer_decay) == finetune.optim
    assert (recipe.epochs, recipe.augment, recipe.batch_size) == (finetune.epochs, finetune.augment, 32)


def test_the_recipe_of_a_built_in_dataset_keeps_its_augmentation(tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model", channels=1, image_size=(8, 8))
    recipe = fine_tuning_recipe("digits", str(model), overrides={"epochs": 7})
    digits, finetune = get_recipe("digits"), get_recipe("folder-finetune")
    assert (recipe.augment, recipe.batch_size, recipe.data.name) == (digits.augment, digits.batch_size, "digits")
    assert (recipe.optim, recipe.epochs, recipe.init_from) == (finetune.optim, 7, str(model))
    assert recipe.model.width == 16


def test_both_sides_read_the_same_images(tmp_path: Path) -> None:
    photos = save_class_folders(tmp_path / "photos", ("ants", "bees"), 10)
    model = save_random_model(tmp_path / "model", image_size=(16, 16))
    small = save_random_model(tmp_path / "small", image_size=(8, 8))
    recipes = {
        "before": fine_tuning_recipe(str(photos), str(small), overrides={}),
        "after": fine_tuning_recipe(str(photos), str(model), overrides={}),
    }
    setups = load_setups(recipes)  # type: ignore[arg-type]
    assert torch.equal(setups["before"].dataset.train.labels, setups["after"].dataset.train.labels)
    assert setups["before"].recipe.model.image_size == (8, 8)
    other = save_class_folders(tmp_path / "other", ("ants", "bees"), 8)
    recipes["before"] = fine_tuning_recipe(str(other), str(small), overrides={})
    with pytest.raises(VitralError, match="do not read the same images"):
        load_setups(recipes)  # type: ignore[arg-type]
