from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.models import randomize_weights
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.variants.ensemble import EnsembleConfig, EnsembleViT
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig, load_model, save_model

CONFIG = ViTConfig(image_size=(8, 8), patch_size=4, channels=1, num_classes=3, width=16, depth=1, heads=2)
NORMALISATIONS = [((0.5,), (0.5,)), ((0.4,), (0.2,))]


def member_models() -> list[ViT]:
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(randomize_weights(ViT(CONFIG)).eval())
    return models


@torch.no_grad()
def test_probabilities_are_the_mean_of_the_calibrated_members() -> None:
    models, pixels = member_models(), torch.rand(5, 1, 8, 8)
    ensemble = EnsembleViT.average(models, "plain", [1.0, 2.5], NORMALISATIONS)
    logits = [model((pixels - mean[0]) / std[0]) for model, (mean, std) in zip(models, NORMALISATIONS, strict=True)]
    expected = (logits[0].softmax(dim=1) + (logits[1] / 2.5).softmax(dim=1)) / 2
    actual = ensemble((pixels - 0.5) / 0.5)
    torch.testing.assert_close(actual.softmax(dim=1), expected)
    energies = torch.stack([each.logsumexp(dim=1) for each in logits]).mean(dim=0)
    torch.testing.assert_close(actual.logsumexp(dim=1), energies)


@torch.no_grad()
def test_an_ensemble_is_saved_and_loaded_like_any_model(tmp_path: Path) -> None:
    ensemble = EnsembleViT.average(member_models(), "plain", [1.0, 2.5], NORMALISATIONS)
    preprocessing = Preprocessing(image_size=(8, 8), channels=1, mean=(0.5,), std=(0.5,))
    config = ModelConfig(
        architecture=ensemble.config, preprocessing=preprocessing, classes=("a", "b", "c"), trained_on="x", epoch=1,
        variant="ensemble",
    )  # fmt: skip
    save_model(tmp_path, ensemble, config)
    loaded, loaded_config = load_model(tmp_path)
    assert loaded_config == config
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(loaded(images), ensemble(images))
    assert loaded.features(images).shape == (2, 32)


def test_what_needs_a_single_model_says_so() -> None:
    ensemble = EnsembleViT.average(member_models(), "plain", [1.0, 1.0], NORMALISATIONS)
    for use in (lambda: ensemble.trace(torch.rand(1, 1, 8, 8)), lambda: ensemble.encoder):
        with pytest.raises(VitralError, match="needs a single model, and this is an ensemble of 2"):
            use()


def test_members_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="member_variant must be one of"):
        EnsembleConfig.of(CONFIG, "hybrid", 2)
    with pytest.raises(ValueError, match="members must be an integer"):
        EnsembleConfig.of(CONFIG, "plain", 0)
