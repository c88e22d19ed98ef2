"""Scratch, probe or fine-tune: the statistics, the sentence that follows from them, and the whole on small images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from support.photos import save_photo
from vitral import api as workshop
from vitral.cli import main as cli
from vitral.data.lazy_images import LazyImages, select_images
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.evaluation.feature_classifiers import fit_linear_head, fit_logistic_regression, standardise
from vitral.evaluation.metrics import wilson_interval
from vitral.evaluation.strategy_comparison import Strategy, bootstrap_accuracies, rank_strategies
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig, load_model, save_model
from vitral.training import compare_strategies as comparing
from vitral.training.compare_strategies import put_head


def way(name: str, wrong: list[list[int]], seconds: float, images: int = 100) -> Strategy:
    """`wrong`: for each seed, the images that it was wrong about."""
    right = np.ones((len(wrong), images), dtype=bool)
    for seed, images_wrong in enumerate(wrong):
        right[seed, images_wrong] = False
    return Strategy(name=name, correct=right, seconds=seconds)


def test_the_interval_of_one_seed_is_that_of_a_share():
    (drawn,) = bootstrap_accuracies([way("x", [list(range(30))], 1.0)])
    low, high = np.percentile(drawn, [2.5, 97.5])
    expected = stats.binom.ppf([0.025, 0.975], 100, 0.7) / 100  # a draw of 100 images is binomial
    assert (low, high) == pytest.approx(tuple(expected), abs=0.011)


def test_seeds_that_differ_widen_the_interval():
    same = rank_strategies([way("x", [list(range(20))] * 3, 1.0)]).rows[0]
    apart = rank_strategies([way("x", [[], list(range(20)), list(range(40))], 1.0)]).rows[0]
    assert same.accuracy == pytest.approx(apart.accuracy) == pytest.approx(0.8)
    assert apart.high - apart.low > 1.5 * (same.high - same.low)


def test_a_way_without_mistakes_is_not_certain():
    row = rank_strategies([way("x", [[]], 1.0)]).rows[0]
    assert (row.low, row.high) == pytest.approx(wilson_interval(1.0, 100))


def test_what_is_measurably_better_is_taken_whatever_it_costs():
    found = rank_strategies(
        [way("slow", [[0, 1]], 100.0), way("quick", [list(range(20))], 1.0)], {"slow": "the slow one"}
    )
    assert (found.best, found.recommended) == ("slow", "slow")
    assert found.gaps[0].more == pytest.approx(0.18)
    assert found.gaps[0].low > 0
    assert found.summary.startswith("Take the slow one: 98.0%, 18.0 points more, 95 % interval 11.0 to 2")
    assert found.summary.endswith("than quick.")


def test_pairing_sees_a_difference_that_two_intervals_would_hide():
    hard = list(range(30))  # wrong for both
    found = rank_strategies([way("a", [hard], 10.0), way("b", [[*hard, *range(30, 38)]], 1.0)])
    assert found.rows[0].low < found.rows[1].high, "the intervals overlap"
    assert found.recommended == "a"


def test_where_the_difference_may_be_chance_the_cheaper_is_taken_and_it_says_so():
    found = rank_strategies(
        [way("slow", [[0, 1, 2]], 600.0), way("quick", [[3, 4, 5, 6]], 20.0), way("bad", [list(range(50))], 1.0)]
    )
    assert (found.best, found.recommended) == ("slow", "quick")
    assert "Take quick: slow is not measurably better (1.0 points more" in found.summary
    assert found.summary.endswith("and costs 10 min instead of 20 s.")


def test_the_best_that_is_also_the_quickest_names_those_that_may_be_as_good():
    found = rank_strategies([way("slow", [[0, 1, 2, 3]], 60.0), way("quick", [[3, 4, 5]], 20.0)])
    assert (found.best, found.recommended) == ("quick", "quick")
    assert found.summary == "Take quick: 97.0% in 20 s; slow may be as good, but took longer (60 s)."


# ── the probe as a model ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_head_on_raw_features_answers_like_the_regression_on_standardised_ones():
    torch.manual_seed(0)
    labels = torch.arange(60) % 3
    features = 5 + 0.1 * torch.randn(60, 6) * torch.tensor([1.0, 10, 0.1, 1, 0, 1]) + 0.1 * labels[:, None]
    weight, bias = fit_linear_head((features, labels), 3)
    said = features @ weight.T + bias
    (x,) = standardise(features)
    fits = [fit_logistic_regression(x, labels, 3, 10 ** (half / 2)) for half in range(-8, 3)]
    assert any(torch.allclose(x @ fit[:-1] + fit[-1], said, atol=1e-3) for fit in fits)


@pytest.mark.parametrize("variant", ["plain", "distilled", "class-and-mean"])
def test_a_fitted_head_is_put_into_any_variant(variant):
    config = ViTConfig(image_size=(8, 8), patch_size=4, num_classes=3, width=8, depth=1, heads=2)
    model = VARIANTS[variant](config).eval()
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        features = model.features(images)
        weight, bias = torch.randn(3, features.shape[1]), torch.randn(3)
        put_head(model, weight, bias)
        assert torch.allclose(model(images), features @ weight.T + bias, atol=1e-5)


# ── the whole ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("compare")
    for index in range(40):
        save_photo(place / "photos" / ("ants", "bees")[index % 2] / f"{index}.png", (index % 2 * 200, 90, 90), index)
    torch.manual_seed(0)
    config = ViTConfig(image_size=(32, 32), patch_size=8, num_classes=3, width=16, depth=1, heads=2)
    seen = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    card = ModelConfig(architecture=config, preprocessing=seen, classes=("x", "y", "z"), trained_on="x", epoch=1)
    save_model(place / "source", ViT(config), card)
    return place


@pytest.fixture
def small_scratch(monkeypatch):
    recipe = comparing.from_scratch

    def small(tuned):
        plan = recipe(tuned)
        return replace(plan, model=replace(plan.model, image_size=(32, 32), width=24, depth=1, heads=2))

    monkeypatch.setattr(comparing, "from_scratch", small)


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([str(word) for word in words])
    return stop.value.code or 0


def test_compare_trains_all_ways_and_does_not_repeat_what_is_there(place, small_scratch, capsys):
    words = [
        "train",
        place / "photos",
        "--init-from",
        place / "source",
        "--compare",
        "--epochs",
        1,
        "--out",
        place / "all",
    ]
    assert command(*words, "--seeds", 1) == 0
    said = capsys.readouterr().out
    for name in ("scratch", "probe", "fine-tune", "95 % interval", "Take ", "judged on 6 validation images"):
        assert name in said
    for name in ("probe", "scratch-0", "fine-tune-0"):
        _, card = load_model(place / "all" / name)
        assert card.classes == ("ants", "bees")
    assert (place / "all" / "comparison.png").stat().st_size > 5000
    told = json.loads((place / "all" / "comparison.json").read_text())
    assert [row["name"] for row in told["verdict"]["rows"]] == ["scratch", "probe", "fine-tune"]
    assert told["verdict"]["sentence"] in said.replace("\n", " ")

    kept = {file: file.stat().st_mtime_ns for file in (place / "all").glob("*/answers.json")}
    assert command(*words, "--seeds", 2, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["seeds"] for row in told["verdict"]["rows"]] == [2, 1, 2]
    assert all(file.stat().st_mtime_ns == before for file, before in kept.items())
    assert (place / "all" / "scratch-1" / "answers.json").is_file()

    assert command(*words, "--optim.lr", 1e-4) == 2
    assert "holds a comparison of something else" in capsys.readouterr().err


def test_the_probe_is_a_model_that_answers_as_it_was_judged(place, small_scratch):
    result = workshop.compare(str(place / "photos"), str(place / "source"), seeds=1, epochs=1, out=place / "probing")
    told = json.loads((place / "probing" / "probe" / "answers.json").read_text())
    found = workshop.evaluate(place / "probing" / "probe", data=str(place / "photos"), split="validation")
    alone = workshop.evaluate(place / "probing" / "probe")
    assert (alone.split, alone.top1) == ("validation", found.top1), "there are no test images"
    assert found.top1 == pytest.approx(np.mean(told["right"]))
    assert result.verdict.images == len(told["right"]) == 6
    before, after = (
        load_model(place / "source")[0].state_dict(),
        load_model(place / "probing" / "probe")[0].state_dict(),
    )
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("head."))


def test_the_judges_chose_nothing(place, small_scratch, monkeypatch):
    """Neither training nor the choice of the epoch sees an image that judges."""
    seen: list[int] = []
    fit = comparing.fit

    def watched(plan, dataset, *rest):
        seen.append(len(dataset.train) + len(dataset.validation))
        fit(plan, dataset, *rest)

    monkeypatch.setattr(comparing, "fit", watched)
    workshop.compare(str(place / "photos"), str(place / "source"), seeds=1, epochs=1, out=place / "judged")
    assert seen == [34, 34]


def test_a_part_of_a_set_that_is_read_from_disk_is_read_from_there():
    class OnDisk(LazyImages):
        def __init__(self, held):
            self.held, self.shape = held, tuple(held.shape)

        def batches(self, chosen):
            return (self.held[rows] for rows in chosen)

    held = torch.randint(0, 256, (9, 1, 2, 2), dtype=torch.uint8)
    chosen = torch.arange(9) % 3 == 0
    part = select_images(OnDisk(held), chosen)
    assert len(part) == 3
    assert torch.equal(torch.cat(list(part.split(2))), held[chosen])
    assert torch.equal(part[torch.tensor([2, 0])], held[torch.tensor([6, 0])])
    assert torch.equal(select_images(held, chosen), held[chosen])


def test_compare_without_a_checkpoint_is_refused(place, capsys):
    assert command("train", place / "photos", "--compare", "--out", place / "none") == 2
    assert "--compare needs a checkpoint" in capsys.readouterr().err
    with pytest.raises(VitralError, match="seeds must be at least 1"):
        workshop.compare(str(place / "photos"), str(place / "source"), seeds=0, out=place / "none")
