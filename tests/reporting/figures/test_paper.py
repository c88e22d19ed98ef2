"""The figures of the paper, checked against known values."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.decomposition import PCA
from torch import Tensor

from support.vit_kinds import KINDS, TINY, predictor_for, random_model
from vitral.cli.commands import figures as command
from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor
from vitral.models.target_scaling import TargetScaling
from vitral.models.vit import ViT, ViTConfig, apply_rope
from vitral.reporting.figures import paper
from vitral.runs.model_io import save_model
from vitral.weights.checkpoint import NO_HEAD

# ── filters ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_principal_components_equal_scikit_learns() -> None:
    filters = torch.randn(40, 12, generator=torch.Generator().manual_seed(0)) @ torch.diag(torch.linspace(3, 0.1, 12))
    components, variance = paper.principal_components(filters, 5)
    reference = PCA(5).fit(filters.double().numpy())
    similarity = np.abs((components.double().numpy() * reference.components_).sum(axis=1))
    np.testing.assert_allclose(similarity, 1, atol=1e-5)  # up to the sign
    np.testing.assert_allclose(variance.numpy(), reference.explained_variance_ratio_, rtol=1e-4)


def test_filters_of_one_pattern_have_it_as_first_component() -> None:
    pattern = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    model = ViT(ViTConfig(**{**TINY, "patch_size": 2, "channels": 1}))
    strengths = torch.randn(16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.patch_embedding.project.weight.copy_(strengths[:, None] * pattern.flatten())
    weight, layer = paper.embedding_filters(model)
    assert (tuple(weight.shape), layer) == ((16, 1, 2, 2), "patch embedding")
    components, variance = paper.principal_components(weight.flatten(1))
    assert variance[0] == pytest.approx(1)
    torch.testing.assert_close(components[0].abs(), torch.full((4,), 0.5))
    assert paper.filter_to_image(pattern[None]).tolist() == [[1.0, 0.0], [0.0, 1.0]]


# ── positions ────────────────────────────────────────────────────────────────────────────────────────────────


def test_cosine_similarity_of_known_vectors() -> None:
    rows = torch.tensor([[2.0, 0.0], [0.0, 1.0], [-3.0, 0.0], [1.0, 1.0]])
    half = 1 / math.sqrt(2)
    expected = [[1, 0, -1, half], [0, 1, 0, half], [-1, 0, 1, -half], [half, half, -half, 1]]
    torch.testing.assert_close(paper.cosine_similarity(rows), torch.tensor(expected, dtype=torch.float32))


def test_rope_similarity_equals_that_of_rotated_vectors() -> None:
    model = random_model("plain", ViTConfig(**TINY, positions="rotary", pooling="mean"))
    rotary = model.encoder.rotary_position
    assert rotary is not None
    similarity = paper.rope_similarity(rotary.rope)
    vectors = torch.ones(1, 1, 6, 8)  # the same vector at every position
    rotated = torch.nn.functional.normalize(apply_rope(vectors, rotary.rope)[0, 0], dim=-1)
    torch.testing.assert_close(similarity, rotated @ rotated.T)
    torch.testing.assert_close(similarity.diag(), torch.ones(6))
    assert similarity[0, 3] == pytest.approx(float(similarity[1, 4])), "depends on the relative position only"


def test_grid_of_grids_has_a_panel_per_position() -> None:
    similarity = np.arange(36.0).reshape(6, 6)
    mosaic, rows, columns = paper.grid_of_grids(similarity, (2, 3))
    assert mosaic.shape == (2 * 2 + 1, 3 * 3 + 2)
    assert (rows, columns) == ([0, 1], [0, 1, 2])
    np.testing.assert_array_equal(mosaic[3:5, 4:7], similarity[4].reshape(2, 3))
    assert np.isnan(mosaic[2]).all()
    mosaic, rows, _ = paper.grid_of_grids(np.zeros((40 * 2, 40 * 2)), (40, 2))
    assert rows == list(range(0, 40, 3))


# ── distance ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_attention_distance_of_known_matrices() -> None:
    """Two rows of three patches of 8 pixels, after a class token that is ignored."""

    def head(targets: list[int]) -> Tensor:
        matrix = torch.zeros(7, 7)
        matrix[0, 0] = 1
        for patch, target in enumerate(targets):
            matrix[1 + patch, 1 + target], matrix[1 + patch, 0] = 0.5, 0.5
        return matrix

    itself, neighbour, opposite = head([0, 1, 2, 3, 4, 5]), head([1, 0, 1, 4, 3, 4]), head([5, 4, 3, 2, 1, 0])
    distances = paper.attention_distance(torch.stack([itself, neighbour, opposite])[None], (2, 3), 8)
    diagonal = 8 * math.sqrt(1 + 4)
    assert distances.tolist() == pytest.approx([0, 8, (4 * diagonal + 2 * 8) / 6])
    two_images = torch.stack([torch.stack([itself, itself]), torch.stack([neighbour, neighbour])])
    assert paper.attention_distance(two_images, (2, 3), 8).tolist() == pytest.approx([4, 4])


def test_attention_distances_of_a_model_equal_those_of_its_trace() -> None:
    model, images = random_model(*KINDS["registers, one channel"]), torch.randn(20, 1, 8, 12)
    distances = paper.attention_distances(model, images)
    with torch.no_grad():
        second = paper.attention_distance(model.trace(images).attention[1], (2, 3), 4)
    assert distances.shape == (2, 2)
    torch.testing.assert_close(distances[1], second)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "registers, mean",
        pytest.param("patch norm", marks=pytest.mark.slow),
        pytest.param("hybrid", marks=pytest.mark.slow),
    ],
)
def test_figures_of_every_kind_of_vit(kind: str, tmp_path: Path, cpu: Hardware) -> None:
    variant, config = KINDS[kind]
    images = torch.randint(0, 255, (3, config.channels, 8, 12), dtype=torch.uint8)
    written, skipped = paper.plot_paper_figures(predictor_for(random_model(variant, config), cpu), tmp_path, images)
    names = {file.name for file in written}
    assert {f"paper-{n}.{k}" for n in ("filters", "distance", "attention") for k in ("png", "svg")} <= names
    assert ("paper-positions.png" in names) == (config.positions != "none") == (skipped == [])
    for file in written:
        if file.suffix == ".svg":
            assert ElementTree.parse(file).getroot().tag.endswith("svg")
        else:
            with Image.open(file) as picture:
                assert min(picture.size) > 150


def test_examples_of_a_regression_show_its_values_and_those_of_features_nothing(cpu: Hardware) -> None:
    classifier = predictor_for(random_model(*KINDS["class"]), cpu)
    images = torch.randint(0, 255, (2, 3, 8, 12), dtype=torch.uint8)
    best = [prediction.best for prediction in classifier.predict(images)]
    assert paper.prediction_titles(classifier, images) == [f"{x.name} ({x.probability:.1%})" for x in best]
    scaling = TargetScaling(mean=(30.0,) * 5, std=(9.0,) * 5)
    config = replace(classifier.model_config, task="regression", target_scaling=scaling)
    regression = Predictor(classifier.model, config, cpu)
    values = [f"a {value:.4g}" for value in regression.values(images)[:, 0].tolist()]
    assert paper.prediction_titles(regression, images) == values
    assert len(paper.plot_rollout_examples(regression, images).axes) == 4
    architecture = replace(classifier.model.config, num_classes=1)
    config = replace(classifier.model_config, architecture=architecture, classes=(NO_HEAD,))
    features = Predictor(random_model("plain", architecture), config, cpu)
    assert paper.prediction_titles(features, images) == ["", ""]


@pytest.mark.slow
def test_command_reports_skipped_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cpu: Hardware
) -> None:
    monkeypatch.chdir(tmp_path)
    predictor = predictor_for(random_model(*KINDS["class"]), cpu)
    save_model(tmp_path / "model", predictor.model, predictor.model_config)
    assert command.COMMAND(["model", "--out", "there"]) == 0
    output = capsys.readouterr().out
    assert "there/paper-positions.svg" in output
    assert "Skipped distance and attention: no images" in output
    Image.new("RGB", (40, 30), "red").save("a.png")
    assert command.COMMAND(["model", "--images", "a.png"]) == 0
    assert Path("figures/paper-distance.png").is_file()
    with pytest.raises(VitralError, match="at least 1"):
        command.COMMAND(["model", "--count", "0"])
    Path("empty").mkdir()
    with pytest.raises(VitralError, match=r"no images in empty"):
        command.COMMAND(["model", "--images", "empty"])
