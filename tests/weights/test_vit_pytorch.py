"""vit-pytorch models converted to vitral and converted have the same logits and identical tensors."""

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
    vit_pytorch,
)
from vitral import weights
from vitral.errors import VitralError
from vitral.models.variants.patch_norm import PatchNormViT
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.checkpoint_options import CheckpointOptions

SMALL: dict[str, Any] = {
    "image_size": (32, 32),
    "patch_size": 8,
    "num_classes": 7,
    "dim": 48,
    "depth": 3,
    "heads": 4,
    "dim_head": 12,
    "mlp_dim": 80,
}
TINY: dict[str, Any] = {
    "image_size": (224, 224),
    "patch_size": 16,
    "dim": 192,
    "depth": 12,
    "heads": 3,
    "dim_head": 64,
    "mlp_dim": 768,
}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "class token": (vit_pytorch.ViT, {}),
    "mean": (vit_pytorch.ViT, {"pool": "mean"}),
    "one block": (vit_pytorch.ViT, {"depth": 1}),
    "not square": (vit_pytorch.ViT, {"image_size": (24, 48)}),
    "one channel": (vit_pytorch.ViT, {"channels": 1}),
    "Ti/16": (vit_pytorch.ViT, TINY),
    "simple": (vit_pytorch.SimpleViT, {}),
    "simple, not square": (vit_pytorch.SimpleViT, {"image_size": (24, 48)}),
    "simple, one channel": (vit_pytorch.SimpleViT, {"channels": 1, "depth": 1}),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * kind.endswith("Ti/16")) for kind in KINDS]
)
def test_round_trip_preserves_logits_and_tensors(kind: str, tmp_path: Path) -> None:
    model_class, changes = KINDS[kind]
    arguments = SMALL | changes
    reference = randomize_weights(model_class(**arguments))
    torch.save(reference.state_dict(), tmp_path / "reference.pt")
    options = CheckpointOptions(heads=arguments["heads"], image_size=arguments["image_size"])
    checkpoint = weights.read(tmp_path / "reference.pt", options)
    height, width = arguments["image_size"]
    x = random_images(height, width, channels=arguments.get("channels", 3))
    assert (checkpoint.format, checkpoint.variant) == ("vit-pytorch", "patch-norm")
    assert_same_logits(checkpoint.build(), reference, x)
    weights.write(checkpoint, tmp_path / "converted.pt", to="vit-pytorch")
    converted = model_class(**arguments).eval()
    converted.load_state_dict(torch.load(tmp_path / "converted.pt", weights_only=True))
    assert identical(converted.state_dict(), reference.state_dict())
    weights.write(checkpoint, tmp_path / "vitral", to="vitral")
    assert identical(weights.read(tmp_path / "vitral").state, checkpoint.state)


def test_token_shapes_of_earlier_versions_are_read(tmp_path: Path) -> None:
    reference = randomize_weights(vit_pytorch.ViT(**SMALL))
    tensors = reference.state_dict()
    tensors |= {name: tensors[name][None] for name in ("cls_token", "pos_embedding")}
    torch.save(tensors, tmp_path / "earlier.pt")
    x = random_images(32, 32)
    model = weights.read(tmp_path / "earlier.pt", CheckpointOptions(heads=4)).build()
    assert_same_logits(model, reference, x)


def test_attention_width_other_than_the_model_width_is_refused(tmp_path: Path) -> None:
    torch.save(vit_pytorch.ViT(**SMALL | {"dim_head": 64}).state_dict(), tmp_path / "wide.pt")
    with pytest.raises(VitralError, match="attention of width 256 in a model of width 48"):
        weights.read(tmp_path / "wide.pt", CheckpointOptions(heads=4))


def test_simple_vit_needs_the_image_size(tmp_path: Path) -> None:
    torch.save(vit_pytorch.SimpleViT(**SMALL).state_dict(), tmp_path / "simple.pt")
    with pytest.raises(VitralError, match="image size of a SimpleViT cannot be inferred"):
        weights.read(tmp_path / "simple.pt", CheckpointOptions(heads=4))


def test_wrapped_layers_of_early_versions_are_refused(tmp_path: Path) -> None:
    torch.save({"transformer.layers.0.0.fn.to_qkv.weight": torch.zeros(3, 1)}, tmp_path / "early.pt")
    with pytest.raises(VitralError, match="early vit-pytorch versions"):
        weights.read(tmp_path / "early.pt")


SIZES: dict[str, Any] = {"image_size": (32, 32), "patch_size": 8, "width": 48, "depth": 2, "heads": 4, "num_classes": 7}


def test_model_without_patch_norms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VitralError, match="does not support variant 'plain' \\(supported: patch-norm\\)"):
        weights.write(as_checkpoint(ViT(ViTConfig(**SIZES))), tmp_path / "refused.pt", to="vit-pytorch")


def test_qkv_bias_is_dropped_only_if_it_is_zero(tmp_path: Path) -> None:
    model = PatchNormViT(ViTConfig(**SIZES, norm_eps=1e-5))
    weights.write(as_checkpoint(model), tmp_path / "zero.pt", to="vit-pytorch")
    with pytest.raises(VitralError, match=r"it does not support encoder\.blocks\.0\.attention\.qkv\.bias"):
        weights.write(as_checkpoint(randomize_weights(model)), tmp_path / "refused.pt", to="vit-pytorch")
