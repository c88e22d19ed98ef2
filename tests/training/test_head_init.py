"""`head_init = "least_squares"`: the head is fitted to the checkpoint's features before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from support.common import identical, textures
from support.training import RaiseSigint, final_weights, load_newest_checkpoint, metrics_without_timing
from vitral.data.datasets import Dataset
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.errors import Interrupted
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import Recipe
from vitral.runs.model_io import load_model
from vitral.runs.run import Run
from vitral.training.callbacks import Callback
from vitral.training.head_init import fit_linear_layer, fit_new_head, fits_head, head_tensors, run_loss, scale_logits
from vitral.training.trainer import Trainer

FitFn = Callable[..., Run]
FITTED = {"head_init": "least_squares"}


@pytest.fixture
def weights(recipe: Recipe) -> dict[str, Tensor]:
    """Weights of a checkpoint whose head is new, and therefore zero."""
    torch.manual_seed(3)
    return ViT(recipe.model).state_dict()


@pytest.fixture
def fine_tune(
    tmp_path: Path,
    dataset: Dataset,
    recipe: Recipe,
    preprocessing: Preprocessing,
    cpu: Hardware,
    weights: dict[str, Tensor],
) -> FitFn:
    """`fine_tune(name, callback, **overrides)` fine-tunes in the run folder `name`, or resumes it."""

    def run(name: str, callback: Callback | None = None, dataset: Dataset = dataset, **overrides: Any) -> Run:
        path = tmp_path / name
        folder = Run(path) if path.exists() else Run.create(tmp_path, name, path)
        resolved = recipe.with_overrides(FITTED | overrides)
        callbacks = [callback] if callback else []
        Trainer(resolved, dataset, preprocessing, folder, cpu, callbacks=callbacks, initial_weights=dict(weights)).fit()
        return folder

    return run


def test_epoch_0_is_the_validated_linear_probe(
    fine_tune: FitFn, dataset: Dataset, recipe: Recipe, preprocessing: Preprocessing, weights: dict[str, Tensor]
) -> None:
    rows = fine_tune("run", epochs=1, ema=0.1).load_metrics()
    assert [row["epoch"] for row in rows] == [0, 1]
    model = ViT(recipe.model)
    model.load_state_dict(weights)
    with torch.no_grad():
        train, validation = (
            model.eval().features(preprocessing.normalise(torch.as_tensor(split.images))).double()
            for split in (dataset.train, dataset.validation)
        )
    # Least squares on ±1 with an intercept, from its textbook formula; the penalty is found by trying all of them.
    x = torch.cat([train, torch.ones(len(train), 1)], dim=1)
    y = 2 * F.one_hot(dataset.train.labels, 4).double() - 1
    unit = (train - train.mean(dim=0)).square().mean()
    accuracies = []
    for penalty in (10.0 ** (half / 2) for half in range(-2, 13)):
        ridge = torch.diag(torch.tensor([penalty * unit] * 16 + [0.0], dtype=torch.float64))
        solution = torch.linalg.solve(x.T @ x + ridge, x.T @ y)
        predicted = (validation @ solution[:-1] + solution[-1]).argmax(dim=1)
        accuracies.append((predicted == dataset.validation.labels).double().mean().item())
    assert min(accuracies) - 0.05 <= rows[0]["validation_top1"] <= max(accuracies) + 0.05
    assert rows[0]["validation_top1"] > 0.5  # of four classes
    assert rows[0]["train_loss"] < 1.3  # chance: log 4


def test_a_fitted_run_starts_better_and_zeros_is_the_default(fine_tune: FitFn, recipe: Recipe) -> None:
    assert recipe.head_init == "zeros"
    fitted = fine_tune("fitted", epochs=1, **{"optim.lr": 1e-5}).load_metrics()
    zeros = fine_tune("zeros", epochs=1, head_init="zeros", **{"optim.lr": 1e-5}).load_metrics()
    assert [row["epoch"] for row in zeros] == [1]
    assert fitted[1]["validation_loss"] < 0.9 * zeros[0]["validation_loss"]


def test_the_model_is_never_worse_than_the_probe(fine_tune: FitFn) -> None:
    run = fine_tune("run", epochs=1, **{"optim.lr": 5.0, "optim.grad_clip": 0.0, "optim.warmup": 0.0})
    first, last = run.load_metrics()
    assert last["validation_top1"] < first["validation_top1"]  # the learning rate destroys the features
    model, config = load_model(run.path)
    assert config.epoch == 0
    assert not last["best"]
    assert model.state_dict()["head.out.weight"].any()


@pytest.mark.parametrize("after", [2, 6, 9])
def test_resume_is_bit_exact(fine_tune: FitFn, after: int) -> None:
    overrides: dict[str, Any] = {"epochs": 2, "ema": 0.2, "model.drop_path": 0.2, "augment.shift": 1}
    reference = fine_tune("reference", **overrides)
    with pytest.raises(Interrupted):
        fine_tune("resumed", RaiseSigint(after), **overrides)
    resumed = fine_tune("resumed", **overrides)
    assert identical(final_weights(reference), final_weights(resumed))
    assert metrics_without_timing(reference) == metrics_without_timing(resumed)
    assert load_newest_checkpoint(reference)["best"] == load_newest_checkpoint(resumed)["best"]


def test_a_run_that_stops_before_its_first_checkpoint_starts_again(fine_tune: FitFn) -> None:
    class Fail(Callback):
        def on_step(self, *_: Any) -> None:
            raise RuntimeError("killed")

    reference = fine_tune("reference", epochs=1)
    with pytest.raises(RuntimeError, match="killed"):
        fine_tune("again", Fail(), epochs=1)
    stopped = Run(reference.path.parent / "again")
    assert [row["epoch"] for row in stopped.load_metrics()] == [0]
    assert load_model(stopped.path)[1].epoch == 0  # a run can predict as soon as its head is fitted
    assert metrics_without_timing(fine_tune("again", epochs=1)) == metrics_without_timing(reference)


def test_without_validation_images_only_the_weights_are_set(fine_tune: FitFn, dataset: Dataset) -> None:
    empty = replace(dataset.validation, images=dataset.validation.images[:0], labels=dataset.validation.labels[:0])
    run = fine_tune("run", dataset=replace(dataset, validation=empty), epochs=1, **{"data.validation": 0.0})
    assert [row["epoch"] for row in run.load_metrics()] == [1]


def test_only_new_heads_are_fitted(recipe: Recipe, weights: dict[str, Tensor]) -> None:
    fitted = recipe.with_overrides(FITTED)
    assert fits_head(fitted, weights)
    assert not fits_head(recipe, weights)
    kept = weights | {"head.out.weight": torch.ones_like(weights["head.out.weight"])}
    assert not fits_head(fitted, kept)
    kept["head.out.weight"][2] = 0  # a class that the checkpoint does not have
    assert fits_head(fitted, kept)


def test_recipes_for_folders_fit_the_head_and_those_of_papers_do_not() -> None:
    assert get_recipe("folder-finetune").head_init == "least_squares"
    for name in ("vit-finetune", "deit-384", "folder-scratch", "digits"):
        assert get_recipe(name).head_init == "zeros"


@pytest.mark.parametrize("variant", ["plain", "distilled", "class-and-mean"])
def test_a_fitted_head_works_in_every_variant(variant: str, recipe: Recipe) -> None:
    model = VARIANTS[variant](recipe.model).eval()
    images = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        features = model.features(images)
        weight, bias = torch.randn(4, features.shape[1]), torch.randn(4)
        model.load_state_dict(model.state_dict() | head_tensors(model.state_dict(), weight, bias))
        assert torch.allclose(model(images), features @ weight.T + bias, atol=1e-5)


def test_the_hidden_layer_of_a_head_is_part_of_the_features(
    recipe: Recipe, dataset: Dataset, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    recipe = recipe.with_overrides(FITTED | {"model.head": "mlp"})
    torch.manual_seed(0)
    model = ViT(recipe.model)
    fit = fit_new_head(recipe, dataset.train, preprocessing, cpu, model.state_dict())
    model.load_state_dict(fit.weights)
    with torch.no_grad():
        logits = model.eval()(preprocessing.normalise(torch.as_tensor(dataset.train.images)))
    accuracy = (logits.argmax(dim=1) == dataset.train.labels).double().mean().item()
    assert accuracy >= fit.mean_score > 0.4


def imbalanced_features() -> tuple[Tensor, Tensor]:
    """Two overlapping classes, 190 images of the first and 10 of the second."""
    rng = torch.Generator().manual_seed(0)
    labels = (torch.arange(200) >= 190).long()
    return torch.randn(200, 3, generator=rng) + 1.5 * labels[:, None], labels


@pytest.mark.parametrize(
    "overrides", [{"sampling": "balanced"}, {"class_weights": "balanced"}, {"logit_adjustment": 1.0}]
)
def test_class_balance_raises_the_logits_of_rare_classes(recipe: Recipe, overrides: dict[str, Any]) -> None:
    features, labels = imbalanced_features()
    recalls = []
    for options in ({}, overrides):
        balanced = recipe.with_overrides({"model.num_classes": 2, **FITTED, **options})
        _, _, logits = fit_linear_layer(features, labels, balanced, partial(run_loss, balanced, labels))
        recalls.append((logits.argmax(dim=1) == labels)[labels == 1].double().mean().item())
    assert recalls[1] >= recalls[0] + 0.2


def test_multilabel_heads_have_the_frequencies_of_the_labels(recipe: Recipe) -> None:
    rng = torch.Generator().manual_seed(1)
    features = torch.randn(400, 5, generator=rng)
    labels = (features[:, :3] > torch.tensor([0.0, 1.0, 2.0])).float()  # 50%, 16% and 2% of the images
    multilabel = recipe.with_overrides({"model.num_classes": 3, "task": "multilabel", "loss": "sigmoid", **FITTED})
    _, _, logits = fit_linear_layer(features, labels, multilabel, lambda x: run_loss(multilabel, labels, x))
    assert torch.allclose(logits.sigmoid().mean(dim=0), labels.mean(dim=0), atol=0.02)
    assert ((logits > 0) == labels.bool())[:, 0].double().mean() > 0.9


def test_regression_is_ridge_regression_on_standardised_targets(recipe: Recipe) -> None:
    rng = torch.Generator().manual_seed(2)
    features = torch.randn(50, 4, generator=rng)
    targets = F.normalize(features @ torch.randn(4, 2, generator=rng), dim=0)
    regression = recipe.with_overrides({"model.num_classes": 2, "task": "regression", "loss": "mse", **FITTED})
    weight, bias, left_out = fit_linear_layer(features, targets, regression, lambda x: run_loss(regression, targets, x))
    assert torch.allclose(features @ weight.T + bias, targets, atol=1e-2)
    assert torch.allclose(left_out, targets, atol=1e-2)


def test_a_class_without_images_gets_a_bounded_logit(recipe: Recipe) -> None:
    features, labels = imbalanced_features()
    three = recipe.with_overrides({"model.num_classes": 3, **FITTED})
    weight, bias, _ = fit_linear_layer(features, labels, three, lambda logits: run_loss(three, labels, logits))
    logits = features @ weight.T + bias
    assert (logits.argmax(dim=1) < 2).all()
    assert logits.abs().max() < 40


def test_features_that_predict_nothing_leave_the_head_at_zero() -> None:
    labels = torch.arange(6) % 6  # one image per class: whoever is left out belongs to a class that the fit never saw
    predictions = 0.2 - 0.4 * F.one_hot(labels, 6).double()
    scale, shift = scale_logits(predictions, lambda logits: F.cross_entropy(logits, labels))
    assert scale == 0
    assert not shift.any()


def test_predictions_without_errors_have_finite_logits() -> None:
    labels = torch.arange(60) % 3
    scale, _ = scale_logits(2 * F.one_hot(labels, 3).double() - 1, lambda logits: F.cross_entropy(logits, labels))
    assert 2 < scale < 10  # without a penalty the loss falls with every larger scale


def test_large_training_sets_are_sampled(
    recipe: Recipe,
    preprocessing: Preprocessing,
    cpu: Hardware,
    weights: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vitral.training.head_init.MAX_IMAGES", 64)
    train = textures(2001, seed=5)
    fit = fit_new_head(recipe.with_overrides(FITTED), train, preprocessing, cpu, weights)
    assert fit.num_images == 64
    assert fit.mean_score > 0.5
