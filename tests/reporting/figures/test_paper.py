"""The paper's figures say what is known beforehand."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.decomposition import PCA
from torch import Tensor

from explain.test_methods import KINDS, TINY, alive
from vitral.cli.commands import figures as command
from vitral.data.preprocess import Preprocessing
from vitral.device.hardware import Hardware
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT, ViTConfig, rotate
from vitral.reporting.figures import paper
from vitral.runs.run import ModelCard, save_model


def predictor_for(model: ViT, cpu: Hardware) -> Predictor:
    config, C = model.config, model.config.channels
    seen = Preprocessing(image_size=config.image_size, channels=C, mean=(0.5,) * C, std=(0.5,) * C)
    variant = next(v for k, (v, c) in KINDS.items() if c == config)
    card = ModelCard(
        architecture=config, preprocessing=seen, classes=tuple("abcde"), trained_on="x", epoch=1, variant=variant
    )
    return Predictor(model, card, cpu)


# ── filters ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_components_are_those_of_scikit_learn() -> None:
    filters = torch.randn(40, 12, generator=torch.Generator().manual_seed(0)) @ torch.diag(torch.linspace(3, 0.1, 12))
    found, share = paper.components(filters, 5)
    reference = PCA(5).fit(filters.double().numpy())
    alike = np.abs((found.double().numpy() * reference.components_).sum(axis=1))
    np.testing.assert_allclose(alike, 1, atol=1e-5)  # a component has no sign
    np.testing.assert_allclose(share.numpy(), reference.explained_variance_ratio_, rtol=1e-4)


def test_filters_made_of_one_pattern_have_it_as_their_first_component() -> None:
    pattern = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    model = ViT(ViTConfig(**{**TINY, "patch_size": 2, "channels": 1}))
    strengths = torch.randn(16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.patch_embedding.project.weight.copy_(strengths[:, None] * pattern.flatten())
    weight, what = paper.filters_of(model)
    assert (tuple(weight.shape), what) == ((16, 1, 2, 2), "the patch embedding")
    found, share = paper.components(weight.flatten(1))
    assert share[0] == pytest.approx(1)
    torch.testing.assert_close(found[0].abs(), torch.full((4,), 0.5))
    assert paper.as_picture(pattern[None]).tolist() == [[1.0, 0.0], [0.0, 1.0]]


# ── positions ────────────────────────────────────────────────────────────────────────────────────────────────


def test_similarity_of_known_vectors() -> None:
    rows = torch.tensor([[2.0, 0.0], [0.0, 1.0], [-3.0, 0.0], [1.0, 1.0]])
    half = 1 / math.sqrt(2)
    wanted = [[1, 0, -1, half], [0, 1, 0, half], [-1, 0, 1, -half], [half, half, -half, 1]]
    torch.testing.assert_close(paper.similarity(rows), torch.tensor(wanted, dtype=torch.float32))


def test_likeness_of_rotary_positions_is_what_a_turned_query_and_key_have_in_common() -> None:
    model = alive("plain", ViTConfig(**TINY, positions="rotary", pooling="mean"))
    rotary = model.encoder.rotary_position
    assert rotary is not None
    alike = paper.turned_alike(rotary.turn)
    same = torch.ones(1, 1, 6, 8)  # one vector at every place
    turned = torch.nn.functional.normalize(rotate(same, rotary.turn)[0, 0], dim=-1)
    torch.testing.assert_close(alike, turned @ turned.T)
    torch.testing.assert_close(alike.diag(), torch.ones(6))
    assert alike[0, 3] == pytest.approx(float(alike[1, 4])), "the same step apart, the same likeness"


def test_each_place_has_its_panel_row_by_row() -> None:
    alike = np.arange(36.0).reshape(6, 6)
    mosaic, rows, columns = paper.grid_of_grids(alike, (2, 3))
    assert mosaic.shape == (2 * 2 + 1, 3 * 3 + 2)
    assert (rows, columns) == ([0, 1], [0, 1, 2])
    np.testing.assert_array_equal(mosaic[3:5, 4:7], alike[4].reshape(2, 3))
    assert np.isnan(mosaic[2]).all()
    mosaic, rows, _ = paper.grid_of_grids(np.zeros((40 * 2, 40 * 2)), (40, 2))
    assert rows == list(range(0, 40, 3))


# ── distance ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_attention_distance_of_matrices_made_by_hand() -> None:
    """Two rows of three patches of 8 pixels, a class token in front that nobody counts."""

    def head(to: list[int]) -> Tensor:
        matrix = torch.zeros(7, 7)
        matrix[0, 0] = 1
        for patch, seen in enumerate(to):
            matrix[1 + patch, 1 + seen], matrix[1 + patch, 0] = 0.5, 0.5
        return matrix

    itself, neighbour, opposite = head([0, 1, 2, 3, 4, 5]), head([1, 0, 1, 4, 3, 4]), head([5, 4, 3, 2, 1, 0])
    found = paper.attention_distance(torch.stack([itself, neighbour, opposite])[None], (2, 3), 8)
    across = 8 * math.sqrt(1 + 4)
    assert found.tolist() == pytest.approx([0, 8, (4 * across + 2 * 8) / 6])
    two = torch.stack([torch.stack([itself, itself]), torch.stack([neighbour, neighbour])])
    assert paper.attention_distance(two, (2, 3), 8).tolist() == pytest.approx([4, 4])


def test_distances_of_a_model_are_those_of_its_attention() -> None:
    model, images = alive(*KINDS["registers, one channel"]), torch.randn(20, 1, 8, 12)
    found = paper.distances(model, images)
    with torch.no_grad():
        second = paper.attention_distance(model.trace(images).attention[1], (2, 3), 4)
    assert found.shape == (2, 2)
    torch.testing.assert_close(found[1], second)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["registers, mean", "patch norm", "hybrid"])
def test_every_kind_of_vit_has_its_figures(kind: str, tmp_path: Path, cpu: Hardware) -> None:
    variant, config = KINDS[kind]
    images = torch.randint(0, 255, (3, config.channels, 8, 12), dtype=torch.uint8)
    written, missing = paper.draw(predictor_for(alive(variant, config), cpu), tmp_path, images)
    names = {file.name for file in written}
    assert {f"paper-{n}.{k}" for n in ("filters", "distance", "attention") for k in ("png", "svg")} <= names
    assert ("paper-positions.png" in names) == (config.positions != "none") == (missing == [])
    for file in written:
        if file.suffix == ".svg":
            assert ElementTree.parse(file).getroot().tag.endswith("svg")
        else:
            with Image.open(file) as picture:
                assert min(picture.size) > 150


def test_the_command_draws_what_it_can_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cpu: Hardware
) -> None:
    monkeypatch.chdir(tmp_path)
    predictor = predictor_for(alive(*KINDS["class"]), cpu)
    save_model(tmp_path / "model", predictor.model, predictor.card)
    assert command.run(["model", "--out", "there"]) == 0
    said = capsys.readouterr().out
    assert "there/paper-positions.svg" in said
    assert "not drawn: distance and attention: they need images" in said
    Image.new("RGB", (40, 30), "red").save("a.png")
    assert command.run(["model", "--images", "a.png"]) == 0
    assert Path("figures/paper-distance.png").is_file()
    with pytest.raises(VitralError, match="at least 1"):
        command.run(["model", "--count", "0"])
    Path("empty").mkdir()
    with pytest.raises(VitralError, match=r"no images in empty"):
        command.run(["model", "--images", "empty"])
