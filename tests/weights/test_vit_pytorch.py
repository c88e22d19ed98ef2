"""vit-pytorch's ViT and SimpleViT, to vitral and back: the same logits, the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.common import identical
from support.references import answers, lively, ours, pictures, vit_pytorch
from vitral import weights
from vitral.errors import VitralError
from vitral.models.variants.patch_norm import PatchNormViT
from vitral.models.vit import ViT, ViTConfig

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


@pytest.mark.parametrize("kind", KINDS)
def test_vit_pytorch_and_vitral_give_the_same_logits_both_ways(kind: str, tmp_path: Path) -> None:
    make, changes = KINDS[kind]
    given = SMALL | changes
    theirs = lively(make(**given))
    torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
    checkpoint = weights.read(tmp_path / "theirs.pt", heads=given["heads"], image_size=given["image_size"])
    x = pictures(*given["image_size"], channels=given.get("channels", 3))
    assert (checkpoint.family, checkpoint.variant) == ("vit-pytorch", "patch-norm")
    torch.testing.assert_close(answers(checkpoint.build(), x), answers(theirs, x), atol=1e-4, rtol=0)
    weights.write(checkpoint, tmp_path / "back.pt", to="vit-pytorch")
    back = make(**given).eval()
    back.load_state_dict(torch.load(tmp_path / "back.pt", weights_only=True))
    assert identical(back.state_dict(), theirs.state_dict())
    weights.write(checkpoint, tmp_path / "ours", to="vitral")
    assert identical(weights.read(tmp_path / "ours").state, checkpoint.state)


def test_the_shapes_of_earlier_versions_are_read(tmp_path: Path) -> None:
    theirs = lively(vit_pytorch.ViT(**SMALL))
    tensors = theirs.state_dict()
    tensors |= {name: tensors[name][None] for name in ("cls_token", "pos_embedding")}
    torch.save(tensors, tmp_path / "earlier.pt")
    x = pictures(32, 32)
    ours = weights.read(tmp_path / "earlier.pt", heads=4).build()
    torch.testing.assert_close(answers(ours, x), answers(theirs, x), atol=1e-4, rtol=0)


def test_heads_wider_or_narrower_than_the_model_are_refused(tmp_path: Path) -> None:
    torch.save(vit_pytorch.ViT(**SMALL | {"dim_head": 64}).state_dict(), tmp_path / "wide.pt")
    with pytest.raises(VitralError, match="its heads together are 256 wide, the model 48"):
        weights.read(tmp_path / "wide.pt", heads=4)


def test_a_simple_vit_needs_its_image_size(tmp_path: Path) -> None:
    torch.save(vit_pytorch.SimpleViT(**SMALL).state_dict(), tmp_path / "simple.pt")
    with pytest.raises(VitralError, match="do not tell its image size"):
        weights.read(tmp_path / "simple.pt", heads=4)


def test_early_layouts_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"transformer.layers.0.0.fn.to_qkv.weight": torch.zeros(3, 1)}, tmp_path / "early.pt")
    with pytest.raises(VitralError, match="early versions of vit-pytorch"):
        weights.read(tmp_path / "early.pt")


SIZES: dict[str, Any] = {"image_size": (32, 32), "patch_size": 8, "width": 48, "depth": 2, "heads": 4, "classes": 7}


def test_a_vit_without_patch_norms_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(VitralError, match="no plain ViT, only with what vitral calls patch-norm"):
        weights.write(ours(ViT(ViTConfig(**SIZES))), tmp_path / "no.pt", to="vit-pytorch")


def test_a_bias_in_qkv_is_dropped_only_where_it_is_zero(tmp_path: Path) -> None:
    model = PatchNormViT(ViTConfig(**SIZES, norm_eps=1e-5))
    weights.write(ours(model), tmp_path / "zero.pt", to="vit-pytorch")
    with pytest.raises(VitralError, match=r"it has no encoder\.blocks\.0\.attention\.qkv\.bias"):
        weights.write(ours(lively(model)), tmp_path / "no.pt", to="vit-pytorch")
