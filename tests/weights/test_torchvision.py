"""torchvision's VisionTransformer, to vitral and back: the same logits, the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.common import identical
from support.references import answers, lively, ours, pictures, torchvision
from vitral import weights
from vitral.errors import VitralError
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT, ViTConfig

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
    [{}, {"num_layers": 1}, {"representation_size": 48}, {"mlp_dim": 192, "num_heads": 6}, TINY],
    ids=["small", "one block", "representation layer", "six heads", "Ti/16"],
)
def test_torchvision_and_vitral_give_the_same_logits_both_ways(changes: dict[str, Any], tmp_path: Path) -> None:
    given = SMALL | changes
    theirs = lively(torchvision.models.VisionTransformer(**given))
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    checkpoint = weights.read(tmp_path / "theirs.pth", heads=given["num_heads"])
    x = pictures(given["image_size"], given["image_size"])
    assert checkpoint.family == "torchvision"
    torch.testing.assert_close(answers(checkpoint.build(), x), answers(theirs, x), atol=1e-4, rtol=0)
    weights.write(checkpoint, tmp_path / "back.pth", to="torchvision")
    back = torchvision.models.VisionTransformer(**given).eval()
    back.load_state_dict(torch.load(tmp_path / "back.pth", weights_only=True))
    assert identical(back.state_dict(), theirs.state_dict())


def test_vit_b_16_is_known_without_help(tmp_path: Path) -> None:
    with torch.device("meta"):
        shapes = torchvision.models.vit_b_16().state_dict()
    tensors = {name: torch.zeros(()).expand(tensor.shape) for name, tensor in shapes.items()}
    torch.save(tensors, tmp_path / "vit_b_16.pth")
    checkpoint = weights.read(tmp_path / "vit_b_16.pth")
    config = checkpoint.config
    assert (config.width, config.depth, config.heads, config.patch_size) == (768, 12, 12, 16)
    assert (config.image_size, config.classes) == ((224, 224), 1000)
    assert (checkpoint.preprocessing.crop, checkpoint.preprocessing.mean[0]) == (0.875, 0.485)


def test_layer_scale_is_folded_where_there_is_none(tmp_path: Path) -> None:
    config = ViTConfig(image_size=(32, 32), patch_size=8, width=48, depth=2, heads=4, classes=7, layer_scale=0.5)
    model = lively(ViT(config))
    notes = weights.write(ours(model), tmp_path / "folded.pth", to="torchvision")
    assert any("layer scale is multiplied" in note for note in notes)
    theirs = torchvision.models.VisionTransformer(**SMALL | {"num_layers": 2, "mlp_dim": 192}).eval()
    theirs.load_state_dict(torch.load(tmp_path / "folded.pth", weights_only=True))
    x = pictures(32, 32)
    torch.testing.assert_close(answers(theirs, x), answers(model, x), atol=1e-4, rtol=0)


def test_a_model_without_bias_in_qkv_gets_one_of_zeros(tmp_path: Path) -> None:
    config = ViTConfig(image_size=(32, 32), patch_size=8, width=48, depth=2, heads=4, classes=7, qkv_bias=False)
    model = lively(ViT(config))
    weights.write(ours(model), tmp_path / "zeros.safetensors", to="torchvision")
    back = weights.read(tmp_path / "zeros.safetensors", heads=4).build()
    x = pictures(32, 32)
    torch.testing.assert_close(answers(back, x), answers(model, x), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "variant", "reason"),
    [
        ({"pooling": "mean"}, "plain", "no pooling 'mean'"),
        ({"registers": 2}, "plain", "no registers, this model 2"),
        ({"qk_norm": True}, "plain", "no norms on q and k"),
        ({"positions": "rotary"}, "plain", "no positions 'rotary'"),
        ({}, "distilled", "no variant 'distilled'"),
        ({"image_size": (32, 48)}, "plain", "square images"),
        ({"channels": 1}, "plain", "3 channels"),
    ],
)
def test_what_torchvision_has_not_is_refused_with_the_reason(
    changes: dict[str, Any], variant: str, reason: str, tmp_path: Path
) -> None:
    small = {"image_size": (32, 32), "patch_size": 8, "width": 48, "depth": 2, "heads": 4, "classes": 7}
    model = VARIANTS[variant](ViTConfig(**small | changes))
    with pytest.raises(VitralError, match=reason):
        weights.write(ours(model), tmp_path / "no.pth", to="torchvision")
    assert not (tmp_path / "no.pth").exists()
