"""Deletion, insertion and pointing, for models and maps whose answers are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from explain.test_methods import alive
from support.common import textures
from vitral.data.datasets import Split
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.explain import faithfulness as f
from vitral.explain.pair import widen_for_pair
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViTConfig
from vitral.runs.model_io import ModelConfig


def reads_two_patches(images_BCHW: Tensor) -> Tensor:
    """Of 14×14 patches of two pixels: certain with patches 0 and 195 shown, halfway with one of them, else not."""
    one, other = images_BCHW[:, 0, 0, 0] != 0, images_BCHW[:, 0, 27, 27] != 0
    chance = (one.float() + other.float()) / 2
    return torch.stack([chance, 1 - chance], dim=1).clamp(1e-9, 1).log()


def test_the_curves_of_a_known_model_are_known() -> None:
    images = torch.ones(2, 1, 28, 28)
    heat = torch.zeros(2, 28, 28)
    heat[:, 0, 0] = 2.0
    heat[0, 27, 27] = 1.0  # the first map marks both patches that are read, the second the other one last
    heat[1, :2, 2:] = heat[1, 2:26] = 0.5
    heat[1, 26:, :26] = 0.5
    down, up = f.deletion_insertion_curves(reads_two_patches, images, torch.zeros(2, dtype=torch.long), heat)
    assert down.shape == up.shape == (2, 17)
    torch.testing.assert_close(down[0], torch.tensor([1.0] + [0.0] * 16))
    torch.testing.assert_close(up[0], torch.tensor([0.0] + [1.0] * 16))
    torch.testing.assert_close(down[1], torch.tensor([1.0] + [0.5] * 15 + [0.0]))
    assert f.area_under_curve(down).tolist() == pytest.approx([1 / 32, 0.5])


def test_patches_are_marked_in_the_order_of_their_heat() -> None:
    marked = f.top_patches(torch.tensor([[0.1, 0.9, 0.5, 0.2]]))
    assert marked[0].tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]]
    assert f.mean_per_patch(torch.arange(16.0).view(1, 4, 4), (2, 2)).tolist() == [[2.5, 4.5, 10.5, 12.5]]


def test_pointing_counts_right_halves() -> None:
    pasted, classes = torch.zeros(4, 1, 2, 4), torch.tensor([[0, 1]] * 4)

    def knows(images: Tensor, targets: Tensor) -> Tensor:  # the class's own half for two images, the other for one
        heat = torch.zeros(4, 2, 4)
        for index, target in enumerate(targets.tolist()):
            side = target if index < 2 else 1 - target
            heat[index, :, 2 * side : 2 * side + 2] = 1.0
        heat[3] = 1.0
        return heat

    assert f.pointing_scores(knows, pasted, classes).tolist() == [1.0, 1.0, 0.0, 0.5]
    blind = torch.rand(4, 2, 4)
    assert f.pointing_scores(lambda images, targets: blind, pasted, classes).tolist() == [0.5] * 4


@pytest.mark.parametrize("positions", ["learned", "sincos", "rotary", "learned+rotary", "none"])
def test_a_model_for_two_pictures_sees_each_at_its_own_place(positions: str) -> None:
    """Either half's tokens are those of the picture alone."""
    config = ViTConfig(image_size=(8, 8), patch_size=4, num_classes=3, width=16, depth=1, heads=2, positions=positions)
    model = alive("plain", replace(config, registers=1))
    wide, image = widen_for_pair(model), torch.randn(1, 3, 8, 8)
    alone = model.trace(image).tokens[0]
    both = wide.trace(torch.cat([image, image], dim=3)).tokens[0]
    torch.testing.assert_close(both[:, :2], alone[:, :2])
    grid = both[:, 2:].unflatten(1, (2, 4))
    for half in grid.split(2, dim=2):
        torch.testing.assert_close(half.flatten(1, 2), alone[:, 2:])


def test_the_interval_of_known_values_is_that_of_the_normal_approximation() -> None:
    values = torch.from_numpy(np.random.default_rng(1).normal(3, 2, size=400))
    score = f.bootstrap(values)
    error = float(values.std()) / 20
    assert score.mean == pytest.approx(float(values.mean()))
    assert score.low == pytest.approx(score.mean - 1.96 * error, abs=0.2 * error)
    assert score.high == pytest.approx(score.mean + 1.96 * error, abs=0.2 * error)


def row(name: str, deletion: float, insertion: float, pointing: float | None, seconds: float = 1.0) -> f.MethodScore:
    d, i = (f.MeanWithInterval(mean=x, low=x, high=x) for x in (deletion, insertion))
    p = None if pointing is None else f.MeanWithInterval(mean=pointing, low=pointing, high=pointing)
    return f.MethodScore(
        method=name, deletion=d, insertion=i, pointing=p, seconds=seconds, deletion_curve=(), insertion_curve=()
    )


def test_the_best_mean_rank_is_recommended_and_chance_where_nothing_beats_it() -> None:
    rows = [row("a", 0.1, 0.9, 0.5), row("b", 0.2, 0.8, 0.9), row("random", 0.5, 0.5, 0.5)]
    assert f.recommend(rows) == "a"  # ranks 0 0 1 against 1 1 0
    rows[0] = row("a", 0.3, 0.8, 0.5)
    assert f.recommend(rows) == "b"
    assert f.recommend([row("a", 0.6, 0.4, None), row("random", 0.5, 0.5, None)]) == "random"
    assert f.recommend([row("a", 0.3, 0.6, None, 2.0), row("b", 0.3, 0.6, None, 1.0)]) == "b"


def predictor_of(split: Split, cpu: Hardware) -> Predictor:
    config = ViTConfig(image_size=(8, 8), patch_size=4, channels=1, num_classes=4, width=16, depth=1, heads=2)
    seen = Preprocessing(image_size=(8, 8), channels=1, mean=(0.4,), std=(0.3,))
    card = ModelConfig(architecture=config, preprocessing=seen, classes=tuple("abcd"), trained_on="x", epoch=1)
    return Predictor(alive("plain", config), card, cpu)


def test_all_tests_for_all_methods(cpu: Hardware) -> None:
    split = textures(24, seed=4)
    seen: list[str] = []
    methods = ["attention", "rollout", "relevance", "occlusion"]
    result = f.measure_faithfulness(
        predictor_of(split, cpu), split, methods, num_images=8, num_pairs=6, log=seen.append
    )
    assert seen == [row.method for row in result.rows] == [*methods, "random"]
    assert result.images == 8
    assert result.pairs <= 6
    assert all(len(row.deletion_curve) == len(row.insertion_curve) == 5 for row in result.rows)
    firsts = {round(row.deletion_curve[0], 5) for row in result.rows} | {
        round(row.insertion_curve[-1], 5) for row in result.rows
    }
    assert len(firsts) == 1, "every curve begins with the whole picture"
    for row in result.rows:
        assert row.deletion.low <= row.deletion.mean <= row.deletion.high
    again = f.measure_faithfulness(predictor_of(split, cpu), split, methods[:1], num_images=8, num_pairs=6)
    assert again.rows[0].deletion == result.rows[0].deletion
    assert result.recommendation_reason()


def test_without_images_or_pairs(cpu: Hardware) -> None:
    split = textures(8, seed=4)
    predictor = predictor_of(split, cpu)
    same = Split(images=split.images, labels=torch.zeros(8, dtype=torch.long))
    result = f.measure_faithfulness(predictor, same, ["rollout"], num_images=4, num_pairs=4)
    assert (result.pairs, result.rows[0].pointing) == (0, None)
    with pytest.raises(VitralError, match="no images"):
        f.measure_faithfulness(predictor, Split(images=split.images[:0], labels=split.labels[:0]), ["rollout"])
    with pytest.raises(VitralError, match="at least 1"):
        f.measure_faithfulness(predictor, split, ["rollout"], num_images=0)


def test_only_pairs_of_which_either_half_is_known_are_kept(cpu: Hardware) -> None:
    """A model that tells light from dark, asked about pictures a few of which have the wrong label."""
    light = torch.tensor([0, 1] * 20)
    images = torch.where(light == 1, 220, 20).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    labels = light.clone()
    labels[:4] = 1 - labels[:4]
    split = Split(images=images, labels=labels)

    def tells(images_BCHW: Tensor) -> Tensor:
        mean = images_BCHW.mean(dim=(1, 2, 3))
        return torch.stack([-mean, mean], dim=1)

    draws = torch.Generator().manual_seed(0)
    pasted, classes = f.recognised_pairs(predictor_of(split, cpu), tells, split, 30, draws)
    assert len(pasted) == 30
    assert pasted.shape[2:] == (8, 16)
    assert (classes[:, 0] != classes[:, 1]).all()
    shown = torch.stack([pasted[..., 0, 0, 0] > 0, pasted[..., 0, 0, 15] > 0], dim=1).long()
    assert (shown == classes).all(), "a mislabelled picture is not known"
