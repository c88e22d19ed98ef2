"""Probes against NumPy and scikit-learn; no hyperparameter is selected_k on the test set."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifier
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from support.logits import class_names
from support.models import build_model, cpu_fp32, smooth_images
from vitral.errors import VitralError
from vitral.evaluation import feature_classifiers
from vitral.evaluation import probe as probe_module
from vitral.evaluation.feature_classifiers import (
    INVERSE_PENALTIES,
    LabelledFeatures,
    fit_logistic_regression,
    least_squares,
    neighbours,
    sample_shots,
    standardise,
    stratified_folds,
    vote,
)
from vitral.evaluation.probe import ProbeResult, ProbeRow, few_shot_regression, mean_and_interval, probe
from vitral.inference.forward import compute_features
from vitral.utils.intervals import wilson_interval


def clouds(N: int, K: int, D: int = 12, apart: float = 3.0, seed: int = 0) -> LabelledFeatures:
    """K isotropic Gaussians whose centres are `apart`·√2 from each other and do not depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(N) % K
    return apart * torch.eye(K, D)[labels] + torch.randn(N, D, generator=generator), labels


def rows_by(result: ProbeResult) -> dict[Any, ProbeRow]:
    return {row.shots or row.method: row for row in result.rows}


# Least squares


@pytest.mark.parametrize(("N", "D"), [(40, 7), (7, 40), (9, 9), (2, 5)], ids=["tall", "wide", "square", "two"])
@pytest.mark.parametrize("penalty", [1e-3, 1.0, 1024.0])
def test_least_squares_agrees_with_lstsq_and_ridge(N: int, D: int, penalty: float) -> None:
    generator = torch.Generator().manual_seed(N * D)
    x = 3 + torch.randn(N, D, generator=generator, dtype=torch.float64)
    labels = torch.arange(N) % 3
    weights, bias = least_squares(x, labels, 3, penalty)
    targets = np.where(np.arange(3) == labels.numpy()[:, None], 1.0, -1.0)

    # ‖[X 1; √λI 0]·[W; b] − [Y; 0]‖²
    rows = np.block([[x.numpy(), np.ones((N, 1))], [np.sqrt(penalty) * np.eye(D), np.zeros((D, 1))]])
    stacked = np.linalg.lstsq(rows, np.concatenate([targets, np.zeros((D, 3))]), rcond=None)[0]
    np.testing.assert_allclose(weights, stacked[:-1], atol=1e-9)
    np.testing.assert_allclose(bias, stacked[-1], atol=1e-9)

    ridge = Ridge(alpha=penalty, solver="svd").fit(x.numpy(), targets)
    np.testing.assert_allclose(weights.T, ridge.coef_, atol=1e-9)
    np.testing.assert_allclose(bias, ridge.intercept_, atol=1e-9)


@pytest.mark.parametrize("K", [2, 4])
def test_least_squares_predictions_agree_with_ridge_classifier(K: int) -> None:
    (x, labels), (queries, _) = clouds(40, K, apart=1.0), clouds(200, K, apart=1.0, seed=1)
    weights, bias = least_squares(x.double(), labels, K, 5.0)
    predicted = (queries.double() @ weights + bias).argmax(dim=1)
    sklearn_model = RidgeClassifier(alpha=5.0).fit(x.double().numpy(), labels.numpy()).predict(queries.double().numpy())
    np.testing.assert_array_equal(predicted, sklearn_model)


def test_few_shot_regression_uses_only_the_drawn_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even mean and standard deviation. With a small penalty, so that the scale of the features matters."""
    monkeypatch.setattr(probe_module, "PENALTY", 1.0)
    train, test = clouds(120, 3, apart=0.7), clouds(300, 3, apart=0.7, seed=1)
    row = few_shot_regression(train, test, 3, shots=15, seeds=3)
    assert (row.images, row.shots, row.value) == (45, 15, 1)
    unseen = torch.ones(120, dtype=torch.bool)
    for seed in range(3):
        unseen[sample_shots(train[1], 15, seed)] = False
    assert unseen.sum() > 15
    poisoned = torch.where(unseen[:, None], 1e6, train[0]), train[1]
    assert few_shot_regression(poisoned, test, 3, shots=15, seeds=3) == row


@pytest.mark.parametrize("K", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_one_image_per_class_suffices_for_well_separated_classes(K: int) -> None:
    train, test = clouds(20 * K, K, D=64, apart=12.0), clouds(200, K, D=64, apart=12.0, seed=1)
    result = probe(train, None, test, class_names(K), shots=(1,))
    assert result.rows[0].accuracy > 0.97


def test_shots_are_drawn_per_class_without_replacement() -> None:
    labels = torch.tensor([0] * 30 + [2] * 12 + [1] * 5)[torch.randperm(47, generator=torch.Generator().manual_seed(0))]
    for shots in (1, 3, 5):
        seen = set()
        for seed in range(6):
            drawn = sample_shots(labels, shots, seed)
            assert labels[drawn].bincount().tolist() == [shots] * 3
            assert len(drawn.unique()) == len(drawn)
            assert torch.equal(drawn, sample_shots(labels, shots, seed))
            assert set(drawn.tolist()) <= set(sample_shots(labels, shots + 2, seed).tolist())
            seen.add(tuple(drawn.tolist()))
        assert len(seen) == 6


def test_intervals_over_draws_are_students_t_and_shrink_with_more_seeds() -> None:
    mean, low, high = mean_and_interval([0.5, 0.6, 0.7])
    assert mean == pytest.approx(0.6)
    assert high - mean == pytest.approx(4.302653 * 0.1 / 3**0.5)  # Student's t with two degrees of freedom
    assert mean - low == pytest.approx(high - mean)
    assert mean_and_interval([0.9, 0.9, 0.9]) == pytest.approx((0.9, 0.9, 0.9))
    assert mean_and_interval([0.0, 1.0])[1:] == (0.0, 1.0)

    train, test = clouds(200, 4, apart=2.0), clouds(200, 4, apart=2.0, seed=1)
    train, test = (train[0].double(), train[1]), (test[0].double(), test[1])
    widths = []
    for seeds in (3, 10, 40):
        row = few_shot_regression(train, test, 4, shots=2, seeds=seeds)
        assert row.low < row.accuracy < row.high
        widths.append(row.high - row.low)
    assert widths[2] < widths[1] < widths[0]
    assert widths[2] < 0.6 * widths[0]


# Nearest neighbours


@pytest.mark.parametrize(("k", "K"), [(1, 5), (3, 2), (7, 2), (11, 5)])
def test_nearest_neighbours_agree_with_scikit_learn(k: int, K: int) -> None:
    (bank, labels), (queries, _) = clouds(150, K, apart=1.0), clouds(120, K, apart=1.0, seed=1)
    similar, index = neighbours(bank.double(), queries.double(), k)
    sklearn_model = KNeighborsClassifier(k, metric="cosine").fit(bank.double().numpy(), labels.numpy())
    distances, actual = sklearn_model.kneighbors(queries.double().numpy())
    np.testing.assert_array_equal(index, actual)
    np.testing.assert_allclose(1 - similar, distances, atol=1e-12)

    votes = torch.nn.functional.one_hot(labels[index], K).sum(dim=1)
    clear = (votes == votes.amax(dim=1, keepdim=True)).sum(dim=1) == 1  # scikit-learn resolves ties by class order
    assert clear.sum() > 60
    predicted = vote(similar, labels[index], K)
    np.testing.assert_array_equal(predicted[clear], sklearn_model.predict(queries.double().numpy())[clear.numpy()])


def test_similarity_breaks_ties_but_never_outweighs_a_vote() -> None:
    similar = torch.tensor([[0.9, 0.5, 0.4, 0.3], [1.0, -1.0, -1.0, -1.0]], dtype=torch.float64)
    labels = torch.tensor([[2, 0, 0, 2], [0, 1, 1, 2]])
    assert vote(similar, labels, 3).tolist() == [2, 1]


def test_neighbours_do_not_depend_on_the_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    (bank, _), (queries, _) = clouds(50, 3), clouds(40, 3, seed=1)
    at_once = neighbours(bank, queries, 5)
    monkeypatch.setattr(feature_classifiers, "MAX_SIMILARITIES", 7 * len(bank))
    for one, other in zip(at_once, neighbours(bank, queries, 5), strict=True):
        torch.testing.assert_close(one, other)


# Linear


@pytest.mark.parametrize("C", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("K", [3, 5])
def test_logistic_regression_agrees_with_scikit_learn(C: float, K: int) -> None:
    x, labels = clouds(200, K, D=20, apart=1.0)
    x = x.double()
    cold_start = fit_logistic_regression(x, labels, K, C)
    warm_start = fit_logistic_regression(x, labels, K, C, fit_logistic_regression(x, labels, K, C / 10))
    sklearn_model = LogisticRegression(C=C, tol=1e-10, max_iter=10_000).fit(x.numpy(), labels.numpy())
    fp32 = fit_logistic_regression(x.float(), labels, K, C)
    assert fp32.dtype == torch.float32
    for actual in (cold_start, warm_start, fp32.double()):
        np.testing.assert_allclose(actual[:-1].T, sklearn_model.coef_, atol=2e-3)
        probabilities = (x @ actual[:-1] + actual[-1]).softmax(dim=1)
        np.testing.assert_allclose(probabilities, sklearn_model.predict_proba(x.numpy()), atol=1e-3)


def test_the_linear_probe_reaches_the_bayes_accuracy_on_gaussians() -> None:
    """For two isotropic Gaussians no classifier is better than Φ(half their distance)."""
    apart = 2.0
    bayes = torch.special.ndtr(torch.tensor(apart / 2**0.5)).item()  # centres are apart·√2 from each other
    train, validation, test = (clouds(N, 2, apart=apart, seed=s) for N, s in ((1500, 0), (500, 1), (4000, 2)))
    actual = rows_by(probe(train, validation, test, class_names(2), shots=(1,)))["linear"]
    assert actual.accuracy == pytest.approx(bayes, abs=0.02)
    assert actual.low <= bayes <= actual.high


@pytest.mark.parametrize("has_validation", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_probes_are_at_chance_on_noise(has_validation: bool) -> None:
    K = 4
    train, validation, test = (clouds(N, K, apart=0, seed=s) for N, s in ((240, 0), (160, 1), (2000, 2)))
    result = probe(train, validation if has_validation else None, test, class_names(K), shots=(1, 5))
    for row in result.rows:
        assert abs(row.accuracy - 1 / K) < 4.5 * (0.25 * 0.75 / 2000) ** 0.5


def test_the_linear_probe_is_invariant_to_scale_and_offset_of_features() -> None:
    train, validation, test = (clouds(N, 3, apart=1.5, seed=s) for N, s in ((150, 0), (90, 1), (300, 2)))
    expected = rows_by(probe(train, validation, test, class_names(3), shots=(1,)))["linear"]
    scale, offset = 10.0 ** torch.linspace(-3, 3, 12).double(), torch.linspace(-5, 5, 12).double()
    transformed = [((features.double() + offset) * scale, labels) for features, labels in (train, validation, test)]
    assert (
        rows_by(probe(transformed[0], transformed[1], transformed[2], class_names(3), shots=(1,)))["linear"] == expected
    )


def test_standardise_uses_the_first_set_and_keeps_constant_features_finite() -> None:
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 7 + 3
    x[:, 2] = 0.1
    queries = x[:5] + 1
    fitted, transformed = standardise(x, queries)
    torch.testing.assert_close(fitted.mean(dim=0), torch.zeros(4, dtype=torch.float64))
    assert fitted.std(dim=0, correction=0)[[0, 1, 3]].tolist() == pytest.approx([1, 1, 1])
    assert transformed[:, 2].tolist() == pytest.approx([1] * 5)
    torch.testing.assert_close(
        transformed - fitted[:5], (1 / torch.where(torch.arange(4) == 2, 1, x.std(0, correction=0))).expand(5, 4)
    )
    assert torch.equal(standardise(torch.full((3, 2), 5.0))[0], torch.zeros(3, 2))


# Hyperparameters


def poisoned(split: LabelledFeatures) -> LabelledFeatures:
    return split[0] + 100, (split[1] + 1) % 3


@pytest.mark.slow
@pytest.mark.parametrize("has_validation", [True, False])
def test_no_hyperparameter_depends_on_the_test_set(has_validation: bool) -> None:
    train, validation, test = (clouds(N, 3, apart=1.0, seed=s) for N, s in ((120, 0), (90, 1), (150, 2)))
    evaluated = validation if has_validation else None
    expected = probe(train, evaluated, test, class_names(3))
    other = probe(train, evaluated, poisoned(test), class_names(3))
    assert [row.value for row in expected.rows] == [row.value for row in other.rows]
    assert [row.accuracy for row in expected.rows] != [row.accuracy for row in other.rows]
    wrong = probe(train, evaluated, (test[0], (test[1] + 1) % 3), class_names(3))
    for right_row, wrong_row in zip(expected.rows, wrong.rows, strict=True):
        assert wrong_row.accuracy < right_row.accuracy
        assert right_row.value == wrong_row.value
    assert expected.tuned_on == ("validation" if has_validation else "cross-validation")


@pytest.mark.slow
@pytest.mark.parametrize("has_validation", [True, False])
def test_a_prediction_does_not_depend_on_other_test_images(has_validation: bool) -> None:
    """Nothing, not even a mean, is fitted to the test images: the numbers of correct predictions add up."""
    train, validation, test = (clouds(N, 3, apart=1.0, seed=s) for N, s in ((120, 0), (90, 1), (150, 2)))
    outliers = 1000 * clouds(60, 3, seed=3)[0] - 300, test[1][:60]
    both = torch.cat([test[0], outliers[0]]), torch.cat([test[1], outliers[1]])
    evaluated = validation if has_validation else None
    results = [probe(train, evaluated, split, class_names(3)) for split in (test, outliers, both)]
    for first, second, combined in zip(*(result.rows for result in results), strict=True):
        assert 150 * first.accuracy + 60 * second.accuracy == pytest.approx(210 * combined.accuracy)


@pytest.mark.slow
def test_k_is_chosen_on_images_other_than_the_bank() -> None:
    train = clouds(300, 3, apart=2.0)
    selected_k = [
        rows_by(probe(train, validation, train, class_names(3), shots=(1,)))["nearest neighbours"].value
        for validation in (train, clouds(300, 3, apart=2.0, seed=5), None)
    ]
    assert selected_k[0] == 1  # each validation image is its own nearest neighbour
    assert selected_k[1] > 1
    assert selected_k[2] > 1


def test_the_penalty_is_the_best_on_the_validation_images(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[tuple[int, float]] = []
    fit = fit_logistic_regression

    def recording(x: Tensor, labels: Tensor, K: int, C: float, start: Tensor | None = None) -> Tensor:
        fits.append((len(x), C))
        return fit(x, labels, K, C, start)

    monkeypatch.setattr(probe_module, "fit_logistic_regression", recording)
    monkeypatch.setattr(feature_classifiers, "fit_logistic_regression", recording)
    train, validation, test = (clouds(N, 3, D=40, apart=1.0, seed=s) for N, s in ((60, 0), (400, 1), (100, 2)))
    row = rows_by(probe(train, validation, test, class_names(3)))["linear"]
    tried = [C for N, C in fits if N == 60]
    assert fits == [(60, C) for C in tried] + [(460, row.value)]
    assert tried == list(INVERSE_PENALTIES[: len(tried)])
    assert row.images == 460

    x, queries = standardise(train[0].double(), validation[0].double())
    num_correct = {}  # for all values, including those that the sweep skipped
    for C in INVERSE_PENALTIES:
        weights = fit(x, train[1], 3, C)
        num_correct[C] = int(((queries @ weights[:-1] + weights[-1]).argmax(dim=1) == validation[1]).sum())
    assert num_correct[row.value] == max(num_correct.values())


def test_folds_hold_out_every_image_once_and_are_stratified() -> None:
    labels = torch.tensor([0] * 23 + [1] * 11 + [2] * 2)
    folds = stratified_folds(labels)
    assert len(folds) == 5
    assert sorted(torch.cat([evaluated for _, evaluated in folds]).tolist()) == list(range(36))
    for fitted, evaluated in folds:
        assert sorted([*fitted.tolist(), *evaluated.tolist()]) == list(range(36))
        assert 4 <= (labels[evaluated] == 0).sum() <= 5
        assert 2 <= (labels[evaluated] == 1).sum() <= 3
    assert len(stratified_folds(labels[:3])) == 3
    assert all(len(fitted) == 2 for fitted, _ in stratified_folds(labels[:3]))


@pytest.mark.slow
def test_probe_is_deterministic_and_leaves_the_global_random_state_unchanged() -> None:
    train, test = clouds(60, 3, apart=1.0), clouds(60, 3, apart=1.0, seed=1)
    before, numpy_state = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].copy()
    assert probe(train, None, test, class_names(3)) == probe(train, None, test, class_names(3))
    assert torch.equal(before, torch.get_rng_state())
    assert (numpy_state == np.random.get_state(legacy=False)["state"]["key"]).all()


# Small and incomplete datasets


def test_shots_that_a_class_does_not_have_are_left_out_with_a_note() -> None:
    features, labels = clouds(60, 3)
    keep = (labels != 1) | (torch.arange(60) < 21)  # seven of class 1
    result = probe((features[keep], labels[keep]), None, clouds(30, 3, seed=1), class_names(3), shots=(10, 1, 5, 25))
    assert [row.shots for row in result.rows] == [1, 5, None, None]
    assert result.notes == (
        "10 images per class: left out, class 1 has only 7 training images",
        "25 images per class: left out, class 1 has only 7 training images",
    )


def test_using_all_images_as_shots_is_noted() -> None:
    result = probe(clouds(20, 2), None, clouds(30, 2, seed=1), class_names(2), shots=(1, 10))
    assert result.notes == ("10 images per class: these are all training images, so every draw is the same",)
    row = rows_by(result)[10]
    assert row.low == pytest.approx(row.high)


@pytest.mark.parametrize("has_validation", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_class_without_test_images_is_allowed(has_validation: bool) -> None:
    train, validation = clouds(90, 3), clouds(60, 3, seed=1)
    features, labels = clouds(90, 3, seed=2)
    test = features[labels != 2], labels[labels != 2]
    result = probe(train, validation if has_validation else None, test, class_names(3))
    assert result.test_images == 60
    assert result.notes == ()
    assert all(row.accuracy > 0.5 for row in result.rows)


def test_a_class_without_training_images_is_noted_and_never_predicted() -> None:
    features, labels = clouds(120, 4, apart=6.0)
    seen = labels != 2
    result = probe((features[seen], labels[seen]), None, clouds(100, 4, apart=6.0, seed=1), class_names(4), shots=(5,))
    assert result.notes == ("class 2: no training images",)
    assert rows_by(result)[5].images == 15
    for row in result.rows:
        assert row.accuracy <= 0.75
    assert rows_by(result)["linear"].accuracy == pytest.approx(0.75, abs=0.02)


def test_one_image_per_class_is_enough_to_probe() -> None:
    two = torch.eye(2), torch.tensor([0, 1])
    result = probe(two, None, two, class_names(2), shots=(1, 5))
    assert [row.shots for row in result.rows] == [1, None, None]
    features, labels = clouds(12, 2)
    labels = torch.where(torch.arange(12) == 0, 0, 1)
    assert probe((features, labels), None, (features, labels), class_names(2)).rows[0].shots == 1


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"seeds": 1}, "seeds must be at least 2, got 1"),
        ({"shots": ()}, "shots must be"),
        ({"shots": (0, 5)}, "shots must be"),
        ({"test": (torch.zeros(0, 12), torch.zeros(0))}, "no test images"),
        ({"test": clouds(10, 2, D=5)}, "test features have width 5, training features 12"),
        ({"test": (torch.zeros(4, 12), torch.zeros(3))}, "expected features"),
        ({"test": (torch.zeros(4, 12), torch.tensor([0, 1, 2, -1]))}, "labels outside the 2 classes: -1, 2"),
        ({"train": (torch.full((4, 12), torch.nan), torch.arange(4) % 2)}, "some training features are not finite"),
        ({"train": (torch.zeros(4, 12), torch.zeros(4))}, "at least two classes"),
    ],
)
def test_invalid_input_is_refused(change: dict[str, Any], what: str) -> None:
    arguments = {"train": clouds(20, 2), "validation": None, "test": clouds(20, 2, seed=1), "classes": class_names(2)}
    with pytest.raises(VitralError, match=what):
        probe(**(arguments | change))


# Features of a model


def test_features_of_a_model_can_be_probed_under_no_grad() -> None:
    model, preprocessing = build_model("class", num_classes=4)
    images, labels = smooth_images(200), torch.arange(200) % 4
    images = images // 2 + 32 * labels[:, None, None, None].to(torch.uint8)  # brightness depends on the class
    features = compute_features(model, images, preprocessing, cpu_fp32())
    train, validation, test = (
        (features[part], labels[part]) for part in (slice(100), slice(100, 140), slice(140, 200))
    )
    with torch.no_grad():
        row = rows_by(probe(train, validation, test, class_names(4)))["linear"]
    assert row.accuracy > 0.5  # chance is 0.25
    assert row.images == 140
    assert (row.low, row.high) == pytest.approx(wilson_interval(row.accuracy, 60))


def test_a_result_can_be_written_as_json() -> None:
    result = probe(clouds(60, 3), None, clouds(60, 3, seed=1), class_names(3), shots=(1, 25))
    values = json.loads(json.dumps(result.as_dict()))
    assert values["rows"][0]["shots"] == 1
    assert "shots" not in values["rows"][-1]
    assert values["notes"] == list(result.notes)
    assert values["tuned_on"] == "cross-validation"
