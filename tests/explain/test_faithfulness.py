"""Deletion, insertion and pointing for models and heatmaps with known results."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from support.common import textures
from support.vit_kinds import random_model
from vitral.data.datasets import Split
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.explain import METHODS
from vitral.explain import faithfulness as f
from vitral.explain.pair import widen_for_pair
from vitral.inference.predictor import Predictor
from vitral.models.vit import Positions, ViTConfig
from vitral.reporting.terminal.faithfulness import faithfulness_to_dict
from vitral.runs.model_io import ModelConfig
from vitral.utils.intervals import Interval
from vitral.utils.json_toml import dump_json


def two_patch_classifier(images_BCHW: Tensor) -> Tensor:
    """Probability of class 0: the visible fraction of patches 0 and 195 (14×14 patches of two pixels)."""
    first, last = images_BCHW[:, 0, 0, 0] != 0, images_BCHW[:, 0, 27, 27] != 0
    probability = (first.float() + last.float()) / 2
    return torch.stack([probability, 1 - probability], dim=1).clamp(1e-9, 1).log()


def test_deletion_and_insertion_curves_of_a_known_model() -> None:
    images = torch.ones(2, 1, 28, 28)
    heat = torch.zeros(2, 28, 28)
    heat[:, 0, 0] = 2.0
    heat[0, 27, 27] = 1.0  # the first heatmap ranks both patches first, the second ranks patch 195 last
    heat[1, :2, 2:] = heat[1, 2:26] = 0.5
    heat[1, 26:, :26] = 0.5
    deletion, insertion = f.deletion_insertion_curves(
        two_patch_classifier, images, torch.zeros(2, dtype=torch.long), heat
    )
    assert deletion.shape == insertion.shape == (2, 17)
    torch.testing.assert_close(deletion[0], torch.tensor([1.0] + [0.0] * 16))
    torch.testing.assert_close(insertion[0], torch.tensor([0.0] + [1.0] * 16))
    torch.testing.assert_close(deletion[1], torch.tensor([1.0] + [0.5] * 15 + [0.0]))
    assert f.area_under_curve(deletion).tolist() == pytest.approx([1 / 32, 0.5])


def test_patches_are_ranked_by_heat() -> None:
    masks = f.top_patches(torch.tensor([[0.1, 0.9, 0.5, 0.2]]))
    assert masks[0].tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]]
    assert f.mean_per_patch(torch.arange(16.0).view(1, 4, 4), (2, 2)).tolist() == [[2.5, 4.5, 10.5, 12.5]]


def test_pointing_scores_count_correct_halves() -> None:
    pasted, classes = torch.zeros(4, 1, 2, 4), torch.tensor([[0, 1]] * 4)

    def explain(images: Tensor, targets: Tensor) -> Tensor:  # correct half for images 0 and 1, wrong half for image 2
        heat = torch.zeros(4, 2, 4)
        for index, target in enumerate(targets.tolist()):
            side = target if index < 2 else 1 - target
            heat[index, :, 2 * side : 2 * side + 2] = 1.0
        heat[3] = 1.0
        return heat

    assert f.pointing_scores(explain, pasted, classes).tolist() == [1.0, 1.0, 0.0, 0.5]
    class_independent = torch.rand(4, 2, 4)
    assert f.pointing_scores(lambda images, targets: class_independent, pasted, classes).tolist() == [0.5] * 4


@pytest.mark.parametrize("positions", ["learned", "sincos", "rotary", "learned+rotary", "none"])
def test_pair_model_embeds_each_half_like_a_single_image(positions: Positions) -> None:
    config = ViTConfig(image_size=(8, 8), patch_size=4, num_classes=3, width=16, depth=1, heads=2, positions=positions)
    model = random_model("plain", replace(config, registers=1))
    pair_model, image = widen_for_pair(model), torch.randn(1, 3, 8, 8)
    single = model.trace(image).tokens[0]
    pair = pair_model.trace(torch.cat([image, image], dim=3)).tokens[0]
    torch.testing.assert_close(pair[:, :2], single[:, :2])
    grid = pair[:, 2:].unflatten(1, (2, 4))
    for half in grid.split(2, dim=2):
        torch.testing.assert_close(half.flatten(1, 2), single[:, 2:])


def test_bootstrap_interval_agrees_with_the_normal_approximation() -> None:
    values = torch.from_numpy(np.random.default_rng(1).normal(3, 2, size=400))
    score = f.bootstrap_mean(values)
    error = float(values.std()) / 20
    assert score.value == pytest.approx(float(values.mean()))
    assert score.low == pytest.approx(score.value - 1.96 * error, abs=0.2 * error)
    assert score.high == pytest.approx(score.value + 1.96 * error, abs=0.2 * error)


def row_with_gains(name: str, seconds: float = 1.0, **gains: tuple[float, float]) -> f.MethodScore:
    """A row with the mean and the lower end of its gains over random heatmaps."""
    zero = Interval(value=0, low=0, high=0)
    intervals = {test: Interval(value=mean, low=low, high=2 * mean) for test, (mean, low) in gains.items()}
    return f.MethodScore(
        method=name, deletion=zero, insertion=zero, pointing=zero, gains=intervals,  # type: ignore[arg-type]
        seconds=seconds, deletion_curve=(), insertion_curve=(),
    )  # fmt: skip


def test_the_best_mean_rank_of_the_methods_that_beat_random_is_recommended() -> None:
    random = row_with_gains("random")
    chance = row_with_gains("rollout", deletion=(0.3, 0.2), insertion=(0.3, 0.2), pointing=(-0.12, -0.3))
    good = row_with_gains("relevance", deletion=(0.2, 0.1), insertion=(0.2, 0.1), pointing=(0.4, 0.3))
    better = row_with_gains("occlusion", deletion=(0.3, 0.1), insertion=(0.3, 0.1), pointing=(0.3, 0.1))
    assert f.recommend([chance, good, random], 64, 64) == "relevance"
    assert f.recommend([chance, good, better, random], 64, 64) == "occlusion", "ranks 0 0 1 against 1 1 0"
    assert f.recommend([chance, random], 64, 64) is None, "pointing is at chance level"
    without_pairs = row_with_gains("rollout", deletion=(0.3, 0.2), insertion=(0.3, 0.2))
    assert f.recommend([without_pairs, random], 64, 0) == "rollout"
    uncertain = row_with_gains("gradcam", deletion=(0.3, -0.01), insertion=(0.3, 0.2))
    assert f.recommend([uncertain, random], 64, 0) is None
    faster = row_with_gains("attention", 0.5, deletion=(0.3, 0.2), insertion=(0.3, 0.2))
    assert f.recommend([without_pairs, faster, random], 64, 0) == "attention"


def test_a_handful_of_images_recommends_nothing() -> None:
    good = row_with_gains("relevance", deletion=(0.2, 0.1), insertion=(0.2, 0.1), pointing=(0.4, 0.3))
    random = row_with_gains("random")
    assert f.recommend([good, random], 9, 64) is None
    assert f.recommend([good, random], 64, 9) is None
    result = f.FaithfulnessResult(rows=(good, random), images=9, pairs=0, best=None)
    assert result.recommendation() == "No method can be recommended for this model: 9 images are too few"


def test_gains_are_paired_by_image() -> None:
    """Images differ far more than methods do: only paired differences show which one is better."""
    rng = torch.Generator().manual_seed(0)
    level = torch.rand(40, 1, generator=rng).expand(40, 17)
    noise = 0.01 * torch.randn(40, 1, generator=rng)
    empty = torch.zeros(0, dtype=torch.float64)
    random = f._Scores(deletion_curves=level, insertion_curves=level, hits=empty, seconds=1)
    better = f._Scores(deletion_curves=level - 0.05, insertion_curves=level + 0.05 + noise, hits=empty, seconds=1)
    row = f.method_score("relevance", better, random)
    baseline = f.method_score(f.RANDOM, random, random)
    assert baseline.gains == {}
    assert row.insertion.low < baseline.insertion.high, "the intervals of the two means overlap"
    assert row.beats_random("deletion")
    assert row.beats_random("insertion")
    assert not row.beats_random("pointing")
    assert row.gains["deletion"].value == pytest.approx(0.05, abs=1e-6)
    assert row.gains["insertion"].value == pytest.approx(0.05 + float(noise.mean()), abs=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_heatmaps_are_not_recommended(cpu: Hardware, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A method at chance level must not be recommended, however it ranks."""

    def chance(model: object, images_BCHW: Tensor, targets_B: Tensor) -> Tensor:
        return torch.rand(len(images_BCHW), *images_BCHW.shape[2:], generator=torch.Generator().manual_seed(seed))

    monkeypatch.setitem(METHODS, "chance", chance)
    result = f.measure_faithfulness(make_predictor(cpu), textures(64, seed=4), ["chance"], num_images=48, num_pairs=32)
    assert result.best is None
    assert "no method beats random heatmaps in every test" in result.recommendation()


def make_predictor(cpu: Hardware) -> Predictor:
    config = ViTConfig(image_size=(8, 8), patch_size=4, channels=1, num_classes=4, width=16, depth=1, heads=2)
    preprocessing = Preprocessing(image_size=(8, 8), channels=1, mean=(0.4,), std=(0.3,))
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=tuple("abcd"), trained_on="x", epoch=1
    )
    return Predictor(random_model("plain", config), model_config, cpu)


def test_all_methods_are_measured_reproducibly(cpu: Hardware) -> None:
    split = textures(24, seed=4)
    messages: list[str] = []
    methods = ["attention", "rollout", "relevance", "occlusion"]
    result = f.measure_faithfulness(
        make_predictor(cpu), split, methods, num_images=8, num_pairs=6, log=messages.append,
        on_estimate=lambda seconds: messages.append(f"{seconds > 0}"),
    )  # fmt: skip
    assert messages.pop(0) == "True", "the expected duration comes first"
    assert messages == [row.method for row in result.rows] == [*methods, "random"]
    assert result.images == 8
    assert result.pairs <= 6
    assert all(len(row.deletion_curve) == len(row.insertion_curve) == 5 for row in result.rows)
    probabilities = {round(row.deletion_curve[0], 5) for row in result.rows} | {
        round(row.insertion_curve[-1], 5) for row in result.rows
    }
    assert len(probabilities) == 1, "all curves start or end with the whole image"
    for row in result.rows:
        assert row.deletion.low <= row.deletion.value <= row.deletion.high
    repeated = f.measure_faithfulness(make_predictor(cpu), split, methods[:1], num_images=8, num_pairs=6)
    assert repeated.rows[0].deletion == result.rows[0].deletion
    assert result.best is None, "8 images are too few"
    row = json.loads(dump_json(faithfulness_to_dict(result)))["rows"][0]
    assert row["gains"].keys() >= {"deletion", "insertion"}
    assert row["deletion"].keys() == row["gains"]["insertion"].keys() == {"mean", "low", "high"}


def test_too_few_images_or_classes(cpu: Hardware) -> None:
    split = textures(8, seed=4)
    predictor = make_predictor(cpu)
    single_class = Split(images=split.images, labels=torch.zeros(8, dtype=torch.long))
    result = f.measure_faithfulness(predictor, single_class, ["rollout"], num_images=4, num_pairs=4)
    assert (result.pairs, result.rows[0].pointing) == (0, None)
    with pytest.raises(VitralError, match="no images"):
        f.measure_faithfulness(predictor, Split(images=split.images[:0], labels=split.labels[:0]), ["rollout"])
    with pytest.raises(VitralError, match="at least 1"):
        f.measure_faithfulness(predictor, split, ["rollout"], num_images=0)


def test_pairs_with_a_misclassified_half_are_dropped(cpu: Hardware) -> None:
    """The model classifies by brightness; four images have the wrong label."""
    brightness_class = torch.tensor([0, 1] * 20)
    images = torch.where(brightness_class == 1, 220, 20).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    labels = brightness_class.clone()
    labels[:4] = 1 - labels[:4]
    split = Split(images=images, labels=labels)

    def brightness_classifier(images_BCHW: Tensor) -> Tensor:
        mean = images_BCHW.mean(dim=(1, 2, 3))
        return torch.stack([-mean, mean], dim=1)

    rng = torch.Generator().manual_seed(0)
    pasted, classes = f.recognised_pairs(make_predictor(cpu), brightness_classifier, split, 30, rng)
    assert len(pasted) == 30
    assert pasted.shape[2:] == (8, 16)
    assert (classes[:, 0] != classes[:, 1]).all()
    shown_classes = torch.stack([pasted[..., 0, 0, 0] > 0, pasted[..., 0, 0, 15] > 0], dim=1).long()
    assert (shown_classes == classes).all()
