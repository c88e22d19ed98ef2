"""Figures against scikit-learn, and how they are shown on a terminal."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats
from sklearn import metrics as sklearn
from torch import Tensor, nn

from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.errors import VitralError
from vitral.evaluation.metrics import Metrics, logits_of, logits_together, measure, wilson
from vitral.reporting.terminal import tables as terminal


def names(K: int) -> tuple[str, ...]:
    return tuple(f"class {k}" for k in range(K))


def answers(N: int, K: int, seed: int, skill: float = 2.0, missing: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and labels; the last `missing` classes occur in no label."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, K - missing, (N,), generator=draws)
    return torch.randn(N, K, generator=draws) + skill * nn.functional.one_hot(labels, K), labels


@settings(max_examples=50, deadline=None)
@given(
    N=st.integers(1, 120),
    K=st.integers(2, 14),
    seed=st.integers(0, 10_000),
    skill=st.floats(-3, 6),
    missing=st.integers(0, 1),
)
def test_all_figures_are_those_of_scikit_learn(N: int, K: int, seed: int, skill: float, missing: int) -> None:
    logits, labels = answers(N, K, seed, skill, missing)
    found = measure(logits, labels, names(K))
    said, everyone = logits.argmax(dim=1), list(range(K))
    assert found.images == N
    assert found.top1 == pytest.approx(sklearn.accuracy_score(labels, said))
    assert np.array_equal(found.confusion, sklearn.confusion_matrix(labels, said, labels=everyone))
    scores = torch.softmax(logits.double(), dim=1).numpy()
    assert found.loss == pytest.approx(sklearn.log_loss(labels, scores, labels=everyone), rel=1e-4, abs=1e-6)
    if K > 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scikit-learn finds a k of all classes pointless
            best = sklearn.top_k_accuracy_score(labels, scores, k=min(5, K), labels=everyone)
        assert found.top5 == pytest.approx(best)
    else:
        assert found.top5 == 1
    precision, recall, f1, support = sklearn.precision_recall_fscore_support(
        labels, said, labels=everyone, zero_division=0
    )
    for k, figures in enumerate(found.per_class):
        assert figures.name == f"class {k}"
        assert (figures.precision, figures.recall, figures.f1) == pytest.approx((precision[k], recall[k], f1[k]))
        assert figures.images == support[k]


def test_the_interval_lies_around_the_accuracy() -> None:
    logits, labels = answers(500, 5, seed=1)
    found = measure(logits, labels, names(5))
    assert 0 < found.top1_low < found.top1 < found.top1_high < 1
    assert (found.top1_low, found.top1_high) == wilson(found.top1, 500)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilsons_interval_has_the_published_values(right: int, count: int, low: float, high: float) -> None:
    assert wilson(right / count, count) == pytest.approx((low, high), abs=6e-5)


@given(count=st.integers(1, 100_000), share=st.floats(0, 1))
def test_wilsons_interval_is_scipys(count: int, share: float) -> None:
    right = round(share * count)
    low, high = wilson(right / count, count)
    wanted = stats.binomtest(right, count).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((wanted.low, wanted.high), abs=1e-4)
    assert 0 <= low <= right / count + 1e-12
    assert right / count - 1e-12 <= high <= 1


def of_confusion(rows: list[list[int]]) -> Metrics:
    """The metrics of a model that makes exactly these answers."""
    K = len(rows)
    pairs = [(true, said) for true in range(K) for said in range(K) for _ in range(rows[true][said])]
    logits = 9.0 * nn.functional.one_hot(torch.tensor([said for _, said in pairs]), K)
    return measure(logits, torch.tensor([true for true, _ in pairs]), tuple("abcdefgh"[:K]))


def test_mistakes_come_commonest_first_and_right_answers_not_at_all() -> None:
    found = of_confusion([[90, 2, 7], [1, 80, 0], [7, 3, 70]])
    assert found.confusion == ((90, 2, 7), (1, 80, 0), (7, 3, 70))
    assert found.mistakes() == [("a", "c", 7), ("c", "a", 7), ("c", "b", 3), ("a", "b", 2), ("b", "a", 1)]
    assert found.mistakes(2) == [("a", "c", 7), ("c", "a", 7)]
    assert of_confusion([[3, 0], [0, 4]]).mistakes() == []


def test_there_is_nothing_to_measure_without_images(cpu: Hardware) -> None:
    with pytest.raises(VitralError, match="no images"):
        measure(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), names(3))
    preprocessing = Preprocessing(image_size=(4, 4), channels=1, mean=(0.0,), std=(1.0,))
    with pytest.raises(VitralError, match="no images"):
        logits_of(nn.Flatten(), torch.zeros(0, 1, 4, 4, dtype=torch.uint8), preprocessing, cpu)


@pytest.mark.parametrize("label", [-1, 3, 255])
def test_labels_outside_the_classes_are_named(label: int) -> None:
    labels = torch.tensor([0, label, 2, 1])
    with pytest.raises(VitralError, match=f"outside the model's 3 classes: {label}"):
        measure(torch.zeros(4, 3), labels, names(3))


def test_a_wrong_number_of_names_is_an_error() -> None:
    with pytest.raises(VitralError, match="3 classes, but 2 are named"):
        measure(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long), names(2))


@pytest.mark.parametrize("batch", [1, 3, 7, 512])
def test_logits_do_not_depend_on_how_the_images_are_cut_into_batches(batch: int, cpu: Hardware) -> None:
    images = torch.randint(0, 256, (7, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    preprocessing = Preprocessing(image_size=(4, 4), channels=1, mean=(0.2,), std=(0.5,))
    logits = logits_of(nn.Flatten(), images, preprocessing, cpu, batch=batch)
    torch.testing.assert_close(logits, (images.flatten(1) / 255 - 0.2) / 0.5)
    assert logits.dtype == torch.float32


def test_metrics_survive_json() -> None:
    found = of_confusion([[3, 1], [0, 4]])
    plain = json.loads(json.dumps(found.as_dict()))
    assert plain["top1"] == found.top1
    assert plain["confusion"] == [[3, 1], [0, 4]]
    assert plain["per_class"][0] == {
        "name": "a",
        "precision": 1.0,
        "recall": 0.75,
        "f1": pytest.approx(6 / 7),
        "images": 4,
    }


def test_a_thousand_classes_are_measured() -> None:
    found = measure(*answers(2000, 1000, seed=0, skill=5), names(1000))
    assert len(found.confusion) == 1000
    assert sum(map(sum, found.confusion)) == 2000
    assert math.isfinite(found.loss)


def shown(metrics: Metrics) -> None:
    console = Console(highlight=False)
    terminal.show_classes(metrics, console)
    terminal.show_confusion(metrics, console)


def test_the_terminal_shows_every_class_and_every_count(capsys: pytest.CaptureFixture[str]) -> None:
    shown(of_confusion([[90, 2, 7], [1, 80, 0], [7, 3, 70]]))
    out = capsys.readouterr().out
    cells = [line.split() for line in out.splitlines()]
    assert ["a", "90", "2", "7"] in cells
    assert ["b", "1", "80", "·"] in cells
    assert ["c", "7", "3", "70"] in cells


def test_class_names_that_look_like_markup_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    logits, labels = answers(20, 3, seed=0)
    shown(measure(logits, labels, ("[red]", "[/bold]", "a[b]")))
    lines = capsys.readouterr().out.splitlines()
    for name in ("[red]", "[/bold]", "a[b]"):
        assert sum(name in line for line in lines) == 3, "in both tables, and as a column"


def test_more_classes_than_a_terminal_is_wide_are_listed_without_a_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    shown(measure(*answers(90, 30, seed=0), names(30)))
    out = capsys.readouterr().out
    assert "class 29" in out
    assert "said →" not in out


def test_between_batches_it_says_how_many_images_are_answered(cpu: Hardware) -> None:
    preprocessing = Preprocessing(image_size=(2, 2), channels=1, mean=(0.5,), std=(0.5,))
    images = torch.randint(0, 256, (10, 1, 2, 2), dtype=torch.uint8)
    heard: list[int] = []
    told = logits_together(nn.Flatten(), images, preprocessing, cpu, batch=4, heard=heard.append)
    assert heard == [4, 8]
    torch.testing.assert_close(told, logits_of(nn.Flatten(), images, preprocessing, cpu))
