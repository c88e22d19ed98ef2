"""torchvision models converted to vitral and converted have the same logits and identical tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.common import identical
from support.references import (
    as_checkpoint,
    assert_same_logits,
    random_images,
    randomize_weights,
    torchvision,
)
from vitral import weights
from vitral.errors import VitralError
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.checkpoint_options import CheckpointOptions

SMALL: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_layers": 3,
    "num_heads": 4,
    "hidden_dim": 48,
    "mlp_dim": 80,
    "num_classes": 7,
}


TINY: dict[str, Any] = {
    "image_size": 224,
    "patch_size": 16,
    "num_layers": 12,
    "num_heads": 3,
    "hidden_dim": 192,
    "mlp_dim": 768,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 1},
        {"representation_size": 48},
        {"mlp_dim": 192, "num_heads": 6},
        pytest.param(TINY, marks=pytest.mark.slow),
    ],
    ids=["small", "one block", "representation layer", "six heads", "Ti/16"],
)
def test_round_trip_preserves_logits_and_tensors(changes: dict[str, Any], tmp_path: Path) -> None:
    arguments = SMALL | changes
    reference = randomize_weights(torchvision.models.VisionTransformer(**arguments))
    torch.save(reference.state_dict(), tmp_path / "reference.pth")
    checkpoint = weights.read(tmp_path / "reference.pth", CheckpointOptions(heads=arguments["num_heads"]))
    x = random_images(arguments["image_size"], arguments["image_size"])
    assert checkpoint.format == "torchvision"
    assert_same_logits(checkpoint.build(), reference, x)
    weights.write(checkpoint, tmp_path / "converted.pth", to="torchvision")
    converted = torchvision.models.VisionTransformer(**arguments).eval()
    converted.load_state_dict(torch.load(tmp_path / "converted.pth", weights_only=True))
    assert identical(converted.state_dict(), reference.state_dict())


def test_architecture_of_vit_b_16_is_inferred(tmp_path: Path) -> None:
    with torch.device("meta"):
        shapes = torchvision.models.vit_b_16().state_dict()
    tensors = {name: torch.zeros(()).expand(tensor.shape) for name, tensor in shapes.items()}
    torch.save(tensors, tmp_path / "vit_b_16.pth")
    checkpoint = weights.read(tmp_path / "vit_b_16.pth")
    config = checkpoint.config
    assert (config.width, config.depth, config.heads, config.patch_size) == (768, 12, 12, 16)
    assert (config.image_size, config.num_classes) == ((224, 224), 1000)
    assert (checkpoint.preprocessing.crop, checkpoint.preprocessing.mean[0]) == (0.875, 0.485)


def test_layer_scale_is_folded_into_the_weights(tmp_path: Path) -> None:
    config = ViTConfig(image_size=(32, 32), patch_size=8, width=48, depth=2, heads=4, num_classes=7, layer_scale=0.5)
    model = randomize_weights(ViT(config))
    notes = weights.write(as_checkpoint(model), tmp_path / "folded.pth", to="torchvision")
    assert any("layer scale is multiplied into the preceding projections" in note for note in notes)
    reference = torchvision.models.VisionTransformer(**SMALL | {"num_layers": 2, "mlp_dim": 192}).eval()
    reference.load_state_dict(torch.load(tmp_path / "folded.pth", weights_only=True))
    x = random_images(32, 32)
    assert_same_logits(reference, model, x)


def test_missing_qkv_bias_is_written_as_zeros(tmp_path: Path) -> None:
    config = ViTConfig(image_size=(32, 32), patch_size=8, width=48, depth=2, heads=4, num_classes=7, qkv_bias=False)
    model = randomize_weights(ViT(config))
    weights.write(as_checkpoint(model), tmp_path / "zeros.safetensors", to="torchvision")
    converted = weights.read(tmp_path / "zeros.safetensors", CheckpointOptions(heads=4)).build()
    x = random_images(32, 32)
    assert_same_logits(converted, model, x)


@pytest.mark.parametrize(
    ("changes", "variant", "reason"),
    [
        ({"pooling": "mean"}, "plain", "mean pooling"),
        ({"registers": 2}, "plain", "2 registers"),
        ({"qk_norm": True}, "plain", "q and k norms"),
        ({"positions": "rotary"}, "plain", "rotary positions"),
        ({}, "distilled", "variant 'distilled'"),
        ({"image_size": (32, 48)}, "plain", "square images with 3 channels, got 32×48"),
        ({"channels": 1}, "plain", "3 channels, got 32×32 with 1"),
    ],
)
def test_unsupported_feature_is_refused(changes: dict[str, Any], variant: str, reason: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "image_size": (32, 32),
        "patch_size": 8,
        "width": 48,
        "depth": 2,
        "heads": 4,
        "num_classes": 7,
    }
    model = VARIANTS[variant](ViTConfig(**sizes | {"num_classes": 7} | changes))
    with pytest.raises(VitralError, match=reason):
        weights.write(as_checkpoint(model), tmp_path / "refused.pth", to="torchvision")
    assert not (tmp_path / "refused.pth").exists()
