"""At other image sizes than the trained one, models compute the same as in the library they come from."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch
from torch import Tensor
from torchvision.models.vision_transformer import interpolate_embeddings

from support.references import (
    VisionTransformer,
    as_checkpoint,
    compute_logits,
    random_images,
    randomize_weights,
    transformers,
)
from vitral import weights
from vitral.models.vit import ViT, ViTConfig, resample_positions
from vitral.recipes.checkpoint_options import CheckpointOptions

SIZES = [(16, 16), (48, 48), (24, 40), (64, 16)]  # the models are for 32×32
HF: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_labels": 7,
}  # fmt: skip


@pytest.fixture(autouse=True)
def ignore_resampling_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="positions resampled")
        yield


def assert_equal_at_all_sizes(model: ViT, reference: Any, **arguments: Any) -> None:
    for size in SIZES:
        x = random_images(*size)
        with torch.inference_mode():
            output = reference(x, **arguments)
        expected = output if isinstance(output, Tensor) else output.logits
        torch.testing.assert_close(compute_logits(model, x), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("ViT", {"interpolate_pos_encoding": True}),
        ("DeiT", {"interpolate_pos_encoding": True}),
        ("Dinov2", {}),
        ("Dinov2WithRegisters", {}),
    ],
)
def test_transformers(family: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    config = getattr(transformers, f"{family}Config")(**HF)
    reference = randomize_weights(getattr(transformers, f"{family}ForImageClassification")(config))
    reference.save_pretrained(tmp_path / "reference")
    checkpoint = weights.read(tmp_path / "reference")
    assert_equal_at_all_sizes(checkpoint.build(), reference, **arguments)
    weights.write(checkpoint, tmp_path / "model", to="vitral")
    assert_equal_at_all_sizes(weights.read(tmp_path / "model").build(), reference, **arguments)


def test_timm(tmp_path: Path) -> None:
    reference = randomize_weights(
        VisionTransformer(
            img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=7, dynamic_img_size=True
        )
    )
    torch.save(reference.state_dict(), tmp_path / "bare.pt")
    assert_equal_at_all_sizes(weights.read(tmp_path / "bare.pt", CheckpointOptions(heads=4)).build(), reference)


@pytest.mark.parametrize("side", [16, 48])
def test_torchvision(side: int) -> None:
    table = torch.randn(1, 1 + 16, 48)
    expected = interpolate_embeddings(side, 8, {"encoder.pos_embedding": table})["encoder.pos_embedding"]
    grid = (side // 8, side // 8)
    torch.testing.assert_close(resample_positions(table[:, 1:], (4, 4), grid, "bicubic-corners"), expected[:, 1:])


@pytest.mark.parametrize("grid", [(2, 2), (6, 6), (3, 5)])
def test_vision_transformer_and_big_vision(grid: tuple[int, int]) -> None:
    """Both resize with scipy.ndimage.zoom of order 1."""
    table = torch.randn(1, 16, 48)
    zoom = (grid[0] / 4, grid[1] / 4, 1)
    expected = scipy.ndimage.zoom(table.view(4, 4, 48).numpy(), zoom, order=1)
    resampled = resample_positions(table, (4, 4), grid, "bilinear-corners").view(*grid, 48)
    np.testing.assert_allclose(resampled.numpy(), expected, atol=1e-5)


def test_formats_store_their_convention_and_note_a_difference(tmp_path: Path) -> None:
    model = ViT(ViTConfig(image_size=(32, 32), patch_size=8, width=48, depth=1, heads=4, num_classes=7))
    conventions = {"torchvision": ("bicubic-corners", ".pth"), "npz": ("bilinear-corners", ".npz")}
    conventions |= {"timm": ("bicubic-antialias", ""), "transformers": ("bicubic", "")}
    for format_name, (convention, suffix) in conventions.items():
        destination = tmp_path / f"{format_name}{suffix}"
        notes = weights.write(as_checkpoint(model), destination, to=format_name)
        assert any("resamples positions" in note for note in notes) == (format_name != "timm")
        reread = weights.read(destination, CheckpointOptions(heads=4))
        assert reread.config.position_resampling == convention


def test_note_states_resampling_at_inference(tmp_path: Path) -> None:
    config = transformers.Dinov2Config(**HF)
    transformers.Dinov2ForImageClassification(config).save_pretrained(tmp_path / "reference")
    processor = {"crop_size": 16, "do_center_crop": True, "size": {"shortest_edge": 16}, "image_std": [0.5] * 3}
    (tmp_path / "reference" / "preprocessor_config.json").write_text(json.dumps(processor))
    checkpoint = weights.read(tmp_path / "reference")
    assert "images are 16×16, positions are for 32×32: resampled as in transformers (bicubic)" in checkpoint.notes
