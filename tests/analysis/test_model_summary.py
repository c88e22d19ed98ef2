"""Model summaries against published figures and against a real forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from vitral.analysis.model_summary import summarise
from vitral.models.presets import preset
from vitral.models.vit import ViT, ViTConfig

MNIST = ViTConfig(image_size=(28, 28), patch_size=7, channels=1, width=64, depth=3, heads=4, num_classes=10)


@pytest.mark.parametrize(
    ("name", "giga"),
    [
        ("Ti/16", "1.25"),
        pytest.param("B/32", "4.41", marks=pytest.mark.slow),
        pytest.param("S/16", "4.60", marks=pytest.mark.slow),
        pytest.param("B/16", "17.56", marks=pytest.mark.slow),
        pytest.param("L/16", "61.55", marks=pytest.mark.slow),
        pytest.param("H/14", "167.3", marks=pytest.mark.slow),
    ],
)
def test_multiply_adds_equal_the_published_figures(name: str, giga: str) -> None:
    summary = summarise(preset(name), depth=1)
    digits = len(giga.split(".")[1])
    assert f"{summary.multiply_adds / 1e9:.{digits}f}" == giga


def test_multiply_adds_follow_from_the_equations() -> None:
    T, N, D, E, M, K = 17, 16, 64, 49, 256, 10
    block = T * D * 3 * D + 2 * T * T * D + T * D * D + 2 * T * D * M
    assert summarise(MNIST).multiply_adds == N * E * D + 3 * block + D * K


def test_attention_dropout_does_not_change_the_count() -> None:
    config = ViTConfig(
        image_size=(28, 28), patch_size=7, channels=1, width=64, depth=3, heads=4, num_classes=10, dropout_attention=0.1
    )
    assert summarise(config).multiply_adds == summarise(MNIST).multiply_adds


def test_table_lists_layers_with_shapes_and_parameters() -> None:
    summary = summarise(MNIST, depth=4)
    model = ViT(MNIST)
    assert summary.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert summary.weight_bytes == 4 * summary.parameters
    for part in ("PatchEmbedding", "ClassToken", "PositionEmbedding", "Encoder", "ClassificationHead"):
        assert f"{part} (" in summary.table
    assert summary.table.count("EncoderBlock (") == 3
    assert summary.table.count("MultiHeadAttention (attention)") == 3
    assert summary.table.count("FeedForward (mlp)") == 3
    assert "[1, 17, 64]" in summary.table
    assert "[1, 10]" in summary.table
    assert f"{49 * 64 + 64:,}" in next(line for line in summary.table.splitlines() if "Linear (project)" in line)
    assert "EncoderBlock" not in summarise(MNIST, depth=1).table


def test_text_contains_every_figure() -> None:
    summary = summarise(preset("B/16"))
    text = str(summary)
    assert text.startswith(summary.table)
    for figure in ("86,567,656", "330.2 MiB", "17.56 GMACs = 35.13 GFLOPs"):
        assert figure in text


def test_small_models_are_counted_in_millions() -> None:
    summary = summarise(MNIST)
    assert f"{summary.multiply_adds / 1e6:.2f} MMACs = {2 * summary.multiply_adds / 1e6:.2f} MFLOPs" in str(summary)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"pooling": "mean", "positions": "sincos", "head": "mlp"}, marks=pytest.mark.slow),
        {"pooling": "attention", "positions": "learned+rotary", "qk_norm": True, "layer_scale": 0.1, "registers": 2},
        pytest.param(
            {"dropout": 0.1, "dropout_attention": 0.1, "dropout_embedding": 0.1, "drop_path": 0.1},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_activation_bytes_equal_what_autograd_saves(settings: dict[str, Any]) -> None:
    config = ViTConfig(image_size=(28, 28), patch_size=7, channels=1, width=64, depth=3, heads=4, **settings)
    model = ViT(config)
    saved_bytes: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        logits = model(torch.rand(1, 1, 28, 28))
    for parameter in model.parameters():
        saved_bytes.pop(parameter.untyped_storage().data_ptr(), None)
    assert logits.requires_grad
    assert summarise(config).activation_bytes == pytest.approx(sum(saved_bytes.values()), rel=0.01)


@pytest.mark.slow
def test_summary_of_a_huge_model_allocates_no_weights() -> None:
    assert summarise(preset("G/14"), depth=1).weight_bytes == 4 * 1_844_440_680
