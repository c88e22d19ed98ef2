"""Classifiers on the features of two models: the better features win, and pairing and seeds are as stated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from vitral.evaluation.feature_classifiers import MAX_FOLD_IMAGES, stratified_folds
from vitral.evaluation.feature_comparison import ModelFeatures, compare_features, knn_correct, linear_correct
from vitral.evaluation.label_efficiency import LabelEfficiencyRow

CLASSES = 3


@pytest.fixture(autouse=True)
def few_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose C from two values, which takes a fifth of the time."""
    monkeypatch.setattr("vitral.evaluation.feature_classifiers.INVERSE_PENALTIES", (0.01, 1.0))


def features(apart: float, seed: int, labelled: int = 120) -> ModelFeatures:
    """Three Gaussians at a distance of `apart`·√2."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(count) % CLASSES
        return apart * torch.eye(CLASSES, 8)[labels] + torch.randn(count, 8, generator=generator), labels

    return ModelFeatures(labelled=draw(labelled), test=draw(150))


def by_name(rows: list[LabelEfficiencyRow]) -> dict[tuple[str, float], LabelEfficiencyRow]:
    return {(row.name, row.fraction): row for row in rows}


def test_better_features_are_found_to_be_better() -> None:
    rows, notes = compare_features([features(1.0, 0)], features(4.0, 1), CLASSES, (0.05, 1.0), seeds=3)
    assert notes == []
    assert [(row.name, row.images, row.seeds) for row in rows] == [
        ("nearest neighbours (k = 20)", 120, 1),
        ("nearest neighbours (tuned k)", 120, 1),
        ("linear", 6, 3),
        ("linear", 120, 1),
    ]
    assert {row.outcome for row in rows} == {"better"}


@pytest.mark.slow
def test_exchanged_models_exchange_the_verdict() -> None:
    rows, _ = compare_features([features(1.0, 0)], features(4.0, 1), CLASSES, (0.05, 1.0), seeds=3)
    reverse, _ = compare_features([features(4.0, 1)], features(1.0, 0), CLASSES, (0.05, 1.0), seeds=3)
    assert {row.outcome for row in reverse} == {"worse"}
    assert [row.difference.value for row in reverse] == [-row.difference.value for row in rows]


@pytest.mark.slow
def test_equal_features_make_no_difference() -> None:
    same = features(2.0, 0)
    rows, _ = compare_features([same], same, CLASSES, (0.05, 1.0), seeds=3)
    assert {(row.outcome, row.difference.value) for row in rows} == {("unclear", 0.0)}


def test_a_model_of_random_weights_is_drawn_for_every_seed() -> None:
    before = [features(0.5, seed) for seed in range(3)]
    rows, _ = compare_features(before, features(4.0, 9), CLASSES, (1.0,), seeds=3, is_random=True)
    for row in rows:
        assert row.seeds == 3
        assert len(set(row.before_accuracies)) > 1
        assert len(set(row.after_accuracies)) == 1
    single, _ = compare_features(before[:1], features(4.0, 9), CLASSES, (1.0,), seeds=1, is_random=True)
    assert {row.outcome for row in single} == {"unknown"}


def test_with_one_seed_only_results_that_cannot_vary_have_an_interval() -> None:
    rows, _ = compare_features([features(1.0, 0)], features(4.0, 1), CLASSES, (0.05, 1.0), seeds=1)
    outcomes = {name: row.outcome for name, row in by_name(rows).items()}
    assert outcomes["linear", 0.05] == "unknown"
    assert outcomes["linear", 1.0] == "better"


def test_neighbours_are_those_of_scikit_learn() -> None:
    model = features(1.5, 3)
    reference = KNeighborsClassifier(20, metric="cosine").fit(*model.labelled)
    expected = reference.predict(model.test[0]) == model.test[1].numpy()
    assert np.mean(knn_correct(model, 20, CLASSES) == expected) > 0.97  # ties are broken differently


def test_fewer_than_twenty_labels_leave_k_20_out() -> None:
    small = features(2.0, 0, labelled=12)
    rows, notes = compare_features([small], small, CLASSES, (1.0,), seeds=2)
    assert notes == ["nearest neighbours with k = 20: left out, there are 12 labelled images of 3 classes"]
    assert "nearest neighbours (k = 20)" not in {row.name for row in rows}


def test_a_linear_classifier_uses_only_the_labels_of_its_subset() -> None:
    model = features(3.0, 0)
    rows = torch.arange(9)
    changed = model.labelled[1].clone()
    changed[9:] = 0
    other = ModelFeatures(labelled=(model.labelled[0], changed), test=model.test)
    assert np.array_equal(linear_correct(model, rows, CLASSES), linear_correct(other, rows, CLASSES))


def test_one_image_per_class_separates_what_lies_far_apart() -> None:
    """Features that differ by noise alone must not be scaled up to those that tell the classes apart."""
    model = features(12.0, 0)
    noise = torch.randn(270, 200, generator=torch.Generator().manual_seed(1))
    labelled, test = (
        (torch.cat([x, part], dim=1), labels)
        for (x, labels), part in zip((model.labelled, model.test), noise.split([120, 150]), strict=True)
    )
    correct = linear_correct(ModelFeatures(labelled=labelled, test=test), torch.arange(3), CLASSES)
    assert correct.mean() > 0.9  # 0.40 with every feature scaled to the same deviation


@pytest.mark.parametrize("count", [100, MAX_FOLD_IMAGES, MAX_FOLD_IMAGES + 5000])
def test_folds_of_many_images_use_an_even_share_of_every_class(count: int) -> None:
    labels = torch.arange(count) % 5
    folds = stratified_folds(labels)
    evaluated = torch.cat([rows for _, rows in folds])
    assert len(evaluated) == len(evaluated.unique()) == min(count, MAX_FOLD_IMAGES)
    assert labels[evaluated].bincount().tolist() == [min(count, MAX_FOLD_IMAGES) // 5] * 5
    for fitted, rows in folds:
        assert sorted(torch.cat([fitted, rows]).tolist()) == sorted(evaluated.tolist())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_classifiers_on_a_gpu_agree_with_the_cpu() -> None:
    def on_gpu(model: ModelFeatures) -> ModelFeatures:
        labelled, test = ((x.cuda(), labels.cuda()) for x, labels in (model.labelled, model.test))
        return ModelFeatures(labelled=labelled, test=test)

    before, after = features(1.0, 0), features(2.0, 1)
    on_cpu, _ = compare_features([before], after, CLASSES, (0.05, 1.0), seeds=2)
    rows, _ = compare_features([on_gpu(before)], on_gpu(after), CLASSES, (0.05, 1.0), seeds=2)
    for row, expected in zip(rows, on_cpu, strict=True):
        assert row.after.value == pytest.approx(expected.after.value, abs=0.02)
