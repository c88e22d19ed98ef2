"""Probes against NumPy and scikit-learn, that nothing is chosen on the test set, and how the result is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifier
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.errors import VitralError
from vitral.evaluation import probe as module
from vitral.evaluation.metrics import wilson
from vitral.evaluation.probe import (
    INVERSE_PENALTIES,
    Labelled,
    ProbeResult,
    ProbeRow,
    draw,
    features_of,
    few_shots,
    folds,
    least_squares,
    logistic,
    neighbours,
    over_draws,
    probe,
    standardised,
    vote,
)
from vitral.models.vit import ViT, ViTConfig
from vitral.reporting.figures import training as figures
from vitral.reporting.terminal import tables as terminal


def clouds(N: int, K: int, D: int = 12, apart: float = 3.0, seed: int = 0) -> Labelled:
    """K round Gaussians whose centres, the same for every seed, lie `apart`·√2 from each other; fp32 like features."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(N) % K
    return apart * torch.eye(K, D)[labels] + torch.randn(N, D, generator=draws), labels


def names(K: int) -> tuple[str, ...]:
    return tuple(f"class {k}" for k in range(K))


def rows_by(result: ProbeResult) -> dict[Any, ProbeRow]:
    return {row.shots or row.method: row for row in result.rows}


# Least squares


@pytest.mark.parametrize(("N", "D"), [(40, 7), (7, 40), (9, 9), (2, 5)], ids=["tall", "wide", "square", "two"])
@pytest.mark.parametrize("penalty", [1e-3, 1.0, 1024.0])
def test_least_squares_is_lstsq_with_ridge_rows_and_scikit_learns_ridge(N: int, D: int, penalty: float) -> None:
    draws = torch.Generator().manual_seed(N * D)
    x = 3 + torch.randn(N, D, generator=draws, dtype=torch.float64)
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
def test_least_squares_answers_as_scikit_learns_ridge_classifier(K: int) -> None:
    (x, labels), (asked, _) = clouds(40, K, apart=1.0), clouds(200, K, apart=1.0, seed=1)
    weights, bias = least_squares(x.double(), labels, K, 5.0)
    said = (asked.double() @ weights + bias).argmax(dim=1)
    theirs = RidgeClassifier(alpha=5.0).fit(x.double().numpy(), labels.numpy()).predict(asked.double().numpy())
    np.testing.assert_array_equal(said, theirs)


def test_few_shots_see_the_drawn_images_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even mean and deviation come from the others. With a small penalty, so that the features' scale matters."""
    monkeypatch.setattr(module, "PENALTY", 1.0)
    train, test = clouds(120, 3, apart=0.7), clouds(300, 3, apart=0.7, seed=1)
    row = few_shots(train, test, 3, shots=15, seeds=3)
    assert (row.images, row.shots, row.value) == (45, 15, 1)
    unseen = torch.ones(120, dtype=torch.bool)
    for seed in range(3):
        unseen[draw(train[1], 15, seed)] = False
    assert unseen.sum() > 15
    poisoned = torch.where(unseen[:, None], 1e6, train[0]), train[1]
    assert few_shots(poisoned, test, 3, shots=15, seeds=3) == row


@pytest.mark.parametrize("K", [2, 10])
def test_one_image_of_well_separated_classes_is_enough(K: int) -> None:
    """With two images the deviation of a feature is chance: dividing each by its own would drown what tells them."""
    train, test = clouds(20 * K, K, D=64, apart=12.0), clouds(200, K, D=64, apart=12.0, seed=1)
    result = probe(train, None, test, names(K), shots=(1,))
    assert result.rows[0].accuracy > 0.97


def test_draws_take_exactly_n_of_each_class_without_replacement() -> None:
    labels = torch.tensor([0] * 30 + [2] * 12 + [1] * 5)[torch.randperm(47, generator=torch.Generator().manual_seed(0))]
    for shots in (1, 3, 5):
        seen = set()
        for seed in range(6):
            drawn = draw(labels, shots, seed)
            assert labels[drawn].bincount().tolist() == [shots] * 3
            assert len(drawn.unique()) == len(drawn)
            assert torch.equal(drawn, draw(labels, shots, seed))
            assert set(drawn.tolist()) <= set(draw(labels, shots + 2, seed).tolist())
            seen.add(tuple(drawn.tolist()))
        assert len(seen) == 6


def test_intervals_over_draws_are_students_and_shrink_with_seeds() -> None:
    mean, low, high = over_draws([0.5, 0.6, 0.7])
    assert mean == pytest.approx(0.6)
    assert high - mean == pytest.approx(4.302653 * 0.1 / 3**0.5)  # t of two degrees of freedom, from a table
    assert mean - low == pytest.approx(high - mean)
    assert over_draws([0.9, 0.9, 0.9]) == (pytest.approx(0.9), pytest.approx(0.9), pytest.approx(0.9))
    assert over_draws([0.0, 1.0])[1:] == (0.0, 1.0)

    train, test = clouds(200, 4, apart=2.0), clouds(200, 4, apart=2.0, seed=1)
    data = [tuple(t.double() if t.is_floating_point() else t for t in split) for split in (train, test)]
    widths = []
    for seeds in (3, 10, 40):
        row = few_shots(data[0], data[1], 4, shots=2, seeds=seeds)
        assert row.low < row.accuracy < row.high
        widths.append(row.high - row.low)
    assert widths[2] < widths[1] < widths[0]
    assert widths[2] < 0.6 * widths[0]


# Nearest neighbours


@pytest.mark.parametrize(("k", "K"), [(1, 5), (3, 2), (7, 2), (11, 5)])
def test_nearest_neighbours_are_scikit_learns(k: int, K: int) -> None:
    (bank, labels), (asked, _) = clouds(150, K, apart=1.0), clouds(120, K, apart=1.0, seed=1)
    similar, index = neighbours(bank.double(), asked.double(), k)
    theirs = KNeighborsClassifier(k, metric="cosine").fit(bank.double().numpy(), labels.numpy())
    distances, found = theirs.kneighbors(asked.double().numpy())
    np.testing.assert_array_equal(index, found)
    np.testing.assert_allclose(1 - similar, distances, atol=1e-12)

    votes = torch.nn.functional.one_hot(labels[index], K).sum(dim=1)
    clear = (votes == votes.amax(dim=1, keepdim=True)).sum(dim=1) == 1  # scikit-learn lets the first class win a tie
    assert clear.sum() > 60
    said = vote(similar, labels[index], K)
    np.testing.assert_array_equal(said[clear], theirs.predict(asked.double().numpy())[clear.numpy()])


def test_a_tie_goes_to_the_more_similar_and_never_outweighs_a_vote() -> None:
    similar = torch.tensor([[0.9, 0.5, 0.4, 0.3], [1.0, -1.0, -1.0, -1.0]], dtype=torch.float64)
    labels = torch.tensor([[2, 0, 0, 2], [0, 1, 1, 2]])
    assert vote(similar, labels, 3).tolist() == [2, 1]


def test_neighbours_in_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    (bank, _), (asked, _) = clouds(50, 3), clouds(40, 3, seed=1)
    at_once = neighbours(bank, asked, 5)
    split = Tensor.split
    monkeypatch.setattr(Tensor, "split", lambda self, rows: split(self, min(rows, 7)))
    for one, other in zip(at_once, neighbours(bank, asked, 5), strict=True):
        torch.testing.assert_close(one, other)


# Linear


@pytest.mark.parametrize("C", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("K", [3, 5])
def test_the_linear_probe_is_scikit_learns_logistic_regression(C: float, K: int) -> None:
    x, labels = clouds(200, K, D=20, apart=1.0)
    x = x.double()
    ours = logistic(x, labels, K, C)
    warm = logistic(x, labels, K, C, logistic(x, labels, K, C / 10))
    theirs = LogisticRegression(C=C, tol=1e-10, max_iter=10_000).fit(x.numpy(), labels.numpy())
    single = logistic(x.float(), labels, K, C)
    assert single.dtype == torch.float32
    for found in (ours, warm, single.double()):
        np.testing.assert_allclose(found[:-1].T, theirs.coef_, atol=2e-3)
        chances = (x @ found[:-1] + found[-1]).softmax(dim=1)
        np.testing.assert_allclose(chances, theirs.predict_proba(x.numpy()), atol=1e-3)


def test_on_gaussians_the_linear_probe_reaches_what_is_possible() -> None:
    """Two round clouds: no classifier beats Φ(half their distance)."""
    apart = 2.0
    bayes = torch.special.ndtr(torch.tensor(apart / 2**0.5)).item()  # centres are apart·√2 from each other
    train, validation, test = (clouds(N, 2, apart=apart, seed=s) for N, s in ((1500, 0), (500, 1), (4000, 2)))
    found = rows_by(probe(train, validation, test, names(2), shots=(1,)))["linear"]
    assert found.accuracy == pytest.approx(bayes, abs=0.02)
    assert found.low <= bayes <= found.high


@pytest.mark.parametrize("validated", [True, False])
def test_on_noise_no_probe_beats_chance(validated: bool) -> None:
    K = 4
    train, validation, test = (clouds(N, K, apart=0, seed=s) for N, s in ((240, 0), (160, 1), (2000, 2)))
    result = probe(train, validation if validated else None, test, names(K), shots=(1, 5))
    for row in result.rows:
        assert abs(row.accuracy - 1 / K) < 4.5 * (0.25 * 0.75 / 2000) ** 0.5


def test_scale_and_offset_of_a_feature_do_not_matter_to_the_linear_probe() -> None:
    train, validation, test = (clouds(N, 3, apart=1.5, seed=s) for N, s in ((150, 0), (90, 1), (300, 2)))
    plain = rows_by(probe(train, validation, test, names(3), shots=(1,)))["linear"]
    scale, offset = 10.0 ** torch.linspace(-3, 3, 12).double(), torch.linspace(-5, 5, 12).double()
    moved = [((features.double() + offset) * scale, labels) for features, labels in (train, validation, test)]
    assert rows_by(probe(moved[0], moved[1], moved[2], names(3), shots=(1,)))["linear"] == plain


def test_standardised_by_the_first_and_a_constant_feature_stays_finite() -> None:
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 7 + 3
    x[:, 2] = 0.1
    asked = x[:5] + 1
    fitted, moved = standardised(x, asked)
    torch.testing.assert_close(fitted.mean(dim=0), torch.zeros(4, dtype=torch.float64))
    assert fitted.std(dim=0, correction=0)[[0, 1, 3]].tolist() == pytest.approx([1, 1, 1])
    assert moved[:, 2].tolist() == pytest.approx([1] * 5)
    torch.testing.assert_close(
        moved - fitted[:5], (1 / torch.where(torch.arange(4) == 2, 1, x.std(0, correction=0))).expand(5, 4)
    )
    assert torch.equal(standardised(torch.full((3, 2), 5.0))[0], torch.zeros(3, 2))


# What is chosen, and on what


def poisoned(split: Labelled) -> Labelled:
    return split[0] + 100, (split[1] + 1) % 3


@pytest.mark.parametrize("validated", [True, False])
def test_nothing_is_chosen_on_the_test_set(validated: bool) -> None:
    train, validation, test = (clouds(N, 3, apart=1.0, seed=s) for N, s in ((120, 0), (90, 1), (150, 2)))
    judged = validation if validated else None
    plain = probe(train, judged, test, names(3))
    other = probe(train, judged, poisoned(test), names(3))
    assert [row.value for row in plain.rows] == [row.value for row in other.rows]
    assert [row.accuracy for row in plain.rows] != [row.accuracy for row in other.rows]
    wrong = probe(train, judged, (test[0], (test[1] + 1) % 3), names(3))
    for right_row, wrong_row in zip(plain.rows, wrong.rows, strict=True):
        assert wrong_row.accuracy < right_row.accuracy
        assert right_row.value == wrong_row.value
    assert plain.chosen_on == ("validation" if validated else "cross-validation")


@pytest.mark.parametrize("validated", [True, False])
def test_an_answer_does_not_depend_on_the_other_test_images(validated: bool) -> None:
    """Nothing, neither a mean nor a deviation, is fitted to the test images: right answers add up."""
    train, validation, test = (clouds(N, 3, apart=1.0, seed=s) for N, s in ((120, 0), (90, 1), (150, 2)))
    wild = 1000 * clouds(60, 3, seed=3)[0] - 300, test[1][:60]
    both = torch.cat([test[0], wild[0]]), torch.cat([test[1], wild[1]])
    judged = validation if validated else None
    results = [probe(train, judged, split, names(3)) for split in (test, wild, both)]
    for near, far, all_of_them in zip(*(result.rows for result in results), strict=True):
        assert 150 * near.accuracy + 60 * far.accuracy == pytest.approx(210 * all_of_them.accuracy)


def test_k_follows_the_validation_images_and_no_image_judges_itself() -> None:
    train = clouds(300, 3, apart=2.0)
    chosen = [
        rows_by(probe(train, validation, train, names(3), shots=(1,)))["nearest neighbours"].value
        for validation in (train, clouds(300, 3, apart=2.0, seed=5), None)
    ]
    assert chosen[0] == 1  # each validation image is its own nearest neighbour
    assert chosen[1] > 1
    assert chosen[2] > 1


def test_the_sweep_takes_the_c_that_is_best_on_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[tuple[int, float]] = []
    fit = logistic

    def noting(x: Tensor, labels: Tensor, K: int, C: float, start: Tensor | None = None) -> Tensor:
        fits.append((len(x), C))
        return fit(x, labels, K, C, start)

    monkeypatch.setattr(module, "logistic", noting)
    train, validation, test = (clouds(N, 3, D=40, apart=1.0, seed=s) for N, s in ((60, 0), (400, 1), (100, 2)))
    row = rows_by(probe(train, validation, test, names(3)))["linear"]
    swept = [C for N, C in fits if N == 60]
    assert fits == [(60, C) for C in swept] + [(460, row.value)]
    assert swept == list(INVERSE_PENALTIES[: len(swept)])
    assert row.images == 460

    x, asked = standardised(train[0].double(), validation[0].double())
    right = {}  # over all of them, those that the sweep left out too
    for C in INVERSE_PENALTIES:
        weights = fit(x, train[1], 3, C)
        right[C] = int(((asked @ weights[:-1] + weights[-1]).argmax(dim=1) == validation[1]).sum())
    assert right[row.value] == max(right.values())


def test_folds_hold_every_image_out_once_and_deal_classes_evenly() -> None:
    labels = torch.tensor([0] * 23 + [1] * 11 + [2] * 2)
    trials = folds(labels)
    assert len(trials) == 5
    assert sorted(torch.cat([judged for _, judged in trials]).tolist()) == list(range(36))
    for learned, judged in trials:
        assert sorted([*learned.tolist(), *judged.tolist()]) == list(range(36))
        assert 4 <= (labels[judged] == 0).sum() <= 5
        assert 2 <= (labels[judged] == 1).sum() <= 3
    assert len(folds(labels[:3])) == 3
    assert all(len(learned) == 2 for learned, _ in folds(labels[:3]))


def test_the_same_twice_and_the_global_random_state_is_left_alone() -> None:
    train, test = clouds(60, 3, apart=1.0), clouds(60, 3, apart=1.0, seed=1)
    before, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[union-attr]
    assert probe(train, None, test, names(3)) == probe(train, None, test, names(3))
    assert torch.equal(before, torch.get_rng_state())
    assert (numpys == np.random.get_state()[1]).all()


# What a set lacks


def test_rows_for_which_there_are_too_few_images_are_left_out_and_it_is_said() -> None:
    features, labels = clouds(60, 3)
    keep = (labels != 1) | (torch.arange(60) < 21)  # seven of class 1
    result = probe((features[keep], labels[keep]), None, clouds(30, 3, seed=1), names(3), shots=(10, 1, 5, 25))
    assert [row.shots for row in result.rows] == [1, 5, None, None]
    assert result.notes == (
        "10 images a class: left out, class 1 has only 7 in training",
        "25 images a class: left out, class 1 has only 7 in training",
    )


def test_draws_of_all_there_is_are_said_to_be_the_same() -> None:
    result = probe(clouds(20, 2), None, clouds(30, 2, seed=1), names(2), shots=(1, 10))
    assert result.notes == ("10 images a class: these are all, so that every draw is the same",)
    row = rows_by(result)[10]
    assert row.low == pytest.approx(row.high)


@pytest.mark.parametrize("validated", [True, False])
def test_a_class_without_test_images(validated: bool) -> None:
    train, validation = clouds(90, 3), clouds(60, 3, seed=1)
    features, labels = clouds(90, 3, seed=2)
    test = features[labels != 2], labels[labels != 2]
    result = probe(train, validation if validated else None, test, names(3))
    assert result.test_images == 60
    assert result.notes == ()
    assert all(row.accuracy > 0.5 for row in result.rows)


def test_a_class_without_training_images_is_named_and_never_answered() -> None:
    features, labels = clouds(120, 4, apart=6.0)
    seen = labels != 2
    result = probe((features[seen], labels[seen]), None, clouds(100, 4, apart=6.0, seed=1), names(4), shots=(5,))
    assert result.notes == ("class 2: no training images",)
    assert rows_by(result)[5].images == 15
    for row in result.rows:
        assert row.accuracy <= 0.75
    assert rows_by(result)["linear"].accuracy == pytest.approx(0.75, abs=0.02)


def test_the_smallest_set_and_a_class_of_one() -> None:
    two = torch.eye(2), torch.tensor([0, 1])
    result = probe(two, None, two, names(2), shots=(1, 5))
    assert [row.shots for row in result.rows] == [1, None, None]
    features, labels = clouds(12, 2)
    labels = torch.where(torch.arange(12) == 0, 0, 1)
    assert probe((features, labels), None, (features, labels), names(2)).rows[0].shots == 1


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"seeds": 1}, "seeds is 1"),
        ({"shots": ()}, "shots must be"),
        ({"shots": (0, 5)}, "shots must be"),
        ({"test": (torch.zeros(0, 12), torch.zeros(0))}, "there are no test images"),
        ({"test": clouds(10, 2, D=5)}, "test features have width 5, training features 12"),
        ({"test": (torch.zeros(4, 12), torch.zeros(3))}, "one label an image"),
        ({"test": (torch.zeros(4, 12), torch.tensor([0, 1, 2, -1]))}, "outside the 2 classes: -1, 2"),
        ({"train": (torch.full((4, 12), torch.nan), torch.arange(4) % 2)}, "some training features are not finite"),
        ({"train": (torch.zeros(4, 12), torch.zeros(4))}, "two classes or more"),
    ],
)
def test_what_cannot_be_probed_is_said(change: dict[str, Any], what: str) -> None:
    arguments = {"train": clouds(20, 2), "validation": None, "test": clouds(20, 2, seed=1), "classes": names(2)}
    with pytest.raises(VitralError, match=what):
        probe(**(arguments | change))


# Features


@pytest.fixture
def model() -> ViT:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=(8, 8), patch_size=4, channels=1, classes=4, width=16, depth=2, heads=2, dropout=0.5, drop_path=0.5
    )
    return ViT(config)


def test_features_are_what_the_head_sees_in_batches_and_without_dropout(
    model: ViT, preprocessing: Preprocessing, cpu: Hardware
) -> None:
    images = torch.randint(0, 256, (11, 1, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    model.train()
    found = features_of(model, images, preprocessing, cpu, batch=4)
    assert model.training
    model.eval()
    with torch.no_grad():
        wanted = model.features(preprocessing.normalise(images))
    assert (found.shape, found.dtype, found.requires_grad) == ((11, 16), torch.float32, False)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        features_of(model, images, preprocessing, replace(cpu, precision="bf16")), wanted, rtol=0.1, atol=0.1
    )
    with pytest.raises(VitralError, match="no images"):
        features_of(model, images[:0], preprocessing, cpu)


def test_features_of_a_model_can_be_probed_even_where_gradients_are_off(
    model: ViT, preprocessing: Preprocessing, cpu: Hardware, dataset: Any
) -> None:
    splits = (dataset.train, dataset.validation, dataset.test)
    train, validation, test = ((features_of(model, s.images, preprocessing, cpu), s.labels) for s in splits)
    with torch.no_grad():
        result = probe(train, validation, test, dataset.classes)
    found = rows_by(result)
    assert found["linear"].accuracy > 0.5  # random features, chance is 0.25
    assert found["linear"].images == 136
    assert (found["linear"].low, found["linear"].high) == pytest.approx(wilson(found["linear"].accuracy, 40))


# How it is shown


@pytest.fixture
def result() -> ProbeResult:
    few = {"method": "least squares", "parameter": "λ", "value": 1024.0}
    rows: list[dict[str, Any]] = [
        {"shots": 1, "images": 3, "accuracy": 0.5, "low": 0.4, "high": 0.6, **few},
        {"shots": 5, "images": 15, "accuracy": 0.7, "low": 0.65, "high": 0.75, **few},
        {"method": "nearest neighbours", "shots": None, "images": 300, "accuracy": 0.8, "low": 0.75, "high": 0.84}
        | {"parameter": "k", "value": 20},
        {"method": "linear", "shots": None, "images": 300, "accuracy": 0.9, "low": 0.87, "high": 0.925}
        | {"parameter": "C", "value": 10**-1.5},
    ]
    return ProbeResult(
        rows=tuple(ProbeRow(**row) for row in rows),
        classes=("ant", "bee", "[red]fox"),
        test_images=1234,
        seeds=5,
        chosen_on="validation",
        notes=("25 images a class: left out, [red]fox has only 20 in training",),
    )


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    found: list[Figure] = []
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (found.append(self), savefig(self, *a, **k)))
    return found


def test_the_figure_shows_accuracies_and_intervals(result: ProbeResult, tmp_path: Path, drawn: list[Figure]) -> None:
    path = figures.probe(result, tmp_path / "probe.png")
    with Image.open(path) as image:
        assert image.width > 600
    (axes,) = drawn[0].axes
    assert axes.get_xscale() == "log"
    shown = {bars.get_label(): bars for bars in axes.containers}
    assert list(shown) == [
        "least squares, few images (5 draws)",
        "nearest neighbours, all images (k = 20)",
        "linear, all images (C = 0.0316)",
    ]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(shown)
    few, near, straight = shown.values()
    assert few[0].get_xydata().tolist() == [[1, 0.5], [5, 0.7]]
    assert near[0].get_ydata() == [0.8]
    assert straight[0].get_ydata() == [0.9]
    for one in (near, straight):
        assert one[0].get_xdata()[0] == pytest.approx(100, rel=0.1)  # 300 images, 3 classes
    assert near[0].get_xdata()[0] != straight[0].get_xdata()[0]
    ends = [segment[:, 1].tolist() for bars in shown.values() for segment in bars[2][0].get_segments()]
    np.testing.assert_allclose(ends, [[0.4, 0.6], [0.65, 0.75], [0.75, 0.84], [0.87, 0.925]])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "5", "all\n(100)"]
    assert axes.get_ylabel() == "accuracy on 1,234 test images"
    assert "60%" in [label.get_text() for label in axes.get_yticklabels()]


def test_the_figure_without_few_shot_rows_and_with_all_near_a_shot(
    result: ProbeResult, tmp_path: Path, drawn: list[Figure]
) -> None:
    figures.probe(replace(result, rows=result.rows[2:]), tmp_path / "probe.png")
    close = (*result.rows[:2], *(replace(row, images=16) for row in result.rows[2:]))
    figures.probe(replace(result, rows=close), tmp_path / "probe.png")
    sure = (*result.rows[:3], replace(result.rows[3], accuracy=1.0, high=1.0))
    figures.probe(replace(result, rows=sure), tmp_path / "probe.png")
    ticks = [[label.get_text() for label in figure.axes[0].get_xticklabels()] for figure in drawn]
    assert ticks == [["all\n(100)"], ["1", "all\n(5)"], ["1", "5", "all\n(100)"]]
    assert drawn[2].axes[0].get_ylim()[1] == pytest.approx(1.004)  # no accuracy of 105 %


def test_the_table_on_a_terminal(
    result: ProbeResult, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal.show_probe(result)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert " ".join(lines[1]) == "least squares 1 3 50.00% 40.00% – 60.00% λ = 1024"
    assert " ".join(lines[3]) == "nearest neighbours all 300 80.00% 75.00% – 84.00% k = 20"
    assert " ".join(lines[4]) == "linear all 300 90.00% 87.00% – 92.50% C = 0.0316"
    said = " ".join(word for line in lines[5:] for word in line)
    assert said.startswith("1,234 test images, 3 classes. k and C were chosen on the validation images; λ is fixed.")
    assert "over 5 draws" in said
    assert said.endswith("25 images a class: left out, [red]fox has only 20 in training")


def test_the_result_as_json(result: ProbeResult) -> None:
    plain = json.loads(json.dumps(result.as_dict()))
    assert plain["rows"][0]["shots"] == 1
    assert "shots" not in plain["rows"][3]
    assert plain["rows"][2]["value"] == 20
    assert plain["notes"] == list(result.notes)
