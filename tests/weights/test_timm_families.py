"""Families of timm's ViTs, DINOv2 and DINOv3 first: the same logits, and identical tensors after a round trip."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.common import identical
from support.references import (
    as_checkpoint,
    assert_same_logits,
    compute_logits,
    random_images,
    randomize_weights,
    save_for_hub,
    timm,
)
from vitral import weights
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.checkpoint_options import CheckpointOptions

SMALL: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 4, "patch_size": 8, "img_size": 32, "num_classes": 7}
GRID = {"ref_feat_shape": (4, 4)}  # of these small models
# Architecture → changes of its arguments, and the resulting fields of ViTConfig
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vit_small_patch14_dinov2": ({}, {"layer_scale": 1e-5}),
    "vit_giant_patch14_dinov2": ({}, {"activation": "swiglu", "mlp_width": 128}),
    "vit_giant_patch14_reg4_dinov2": ({}, {"activation": "swiglu", "registers": 4}),
    "vit_small_patch16_dinov3": (
        {},
        {"positions": "rotary", "rope": "centered", "rope_base": 100.0, "qkv_bias": False, "norm_eps": 1e-5}
        | {"pooling": "mean", "class_token": True, "registers": 4},
    ),
    "vit_base_patch16_dinov3_qkvb": ({"global_pool": "token"}, {"key_bias": False, "pooling": "class"}),
    "vit_small_plus_patch16_dinov3_qkvb": ({"mlp_ratio": 2.6}, {"activation": "swiglu", "mlp_width": 128}),
    "vit_7b_patch16_dinov3": ({}, {"activation": "swiglu", "mlp_width": 128}),
    "vit_small_patch16_rope_224": ({}, {"rope": "index", "key_bias": True, "positions": "rotary"}),
    "vit_small_patch16_rope_ape_224": ({}, {"rope": "index", "positions": "learned+rotary"}),
    "vit_betwixt_patch16_rope_reg4_gap_256": (GRID, {"rope": "scaled-index", "rope_base": 1e4, "registers": 4}),
    "vit_pe_spatial_tiny_patch16_512": (GRID, {"rope": "scaled-index-1", "pre_norm": True, "final_norm": False}),
    "vit_pe_lang_gigantic_patch14_448": (GRID | {"mlp_ratio": 3.0}, {"rope": "scaled-index", "pre_norm": True}),
    "eva02_tiny_patch14_224": (GRID, {"activation": "swiglu", "positions": "learned+rotary", "key_bias": False}),
    "vit_base_patch32_clip_224": ({}, {"pre_norm": True, "norm_eps": 1e-5}),
    "vit_large_patch14_clip_quickgelu_224": ({}, {"pre_norm": True, "activation": "quick_gelu"}),
    "vit_so150m_patch16_reg4_map_256": ({}, {"pooling": "attention", "registers": 4, "register_positions": True}),
    "vit_so150m2_patch16_reg1_gap_256": ({}, {"registers": 1, "register_positions": True, "qkv_bias": False}),
    "vit_so400m_patch14_siglip_224": ({}, {"pooling": "attention"}),
    "vit_intern300m_patch14_448": ({}, {"final_norm": False}),
    "vit_medium_patch16_reg4_gap_256": ({"class_token": True}, {"class_token": True, "pooling": "mean"}),
}


def make_family(folder: Path, name: str, **changes: Any) -> tuple[Any, Path]:
    """A small model of this architecture, and a folder as timm writes it."""
    arguments = SMALL | changes
    model = randomize_weights(timm.create_model(name, **arguments))
    return model, save_for_hub(folder, model, arguments, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip_of_a_family_preserves_logits_and_tensors(name: str, tmp_path: Path) -> None:
    changes, fields = FAMILIES[name]
    reference, source = make_family(tmp_path / "reference", name, **changes)
    checkpoint = weights.read(source)
    assert {field: getattr(checkpoint.config, field) for field in fields} == fields
    x = random_images(32, 32)
    assert_same_logits(checkpoint.build(), reference, x)
    weights.write(checkpoint, tmp_path / "converted", to="timm")
    converted = timm.create_model(f"local-dir:{tmp_path / 'converted'}", pretrained=True).eval()
    assert_same_logits(converted, reference, x)
    assert identical(load_file(tmp_path / "converted" / "model.safetensors"), reference.state_dict())
    reread = weights.read(tmp_path / "converted")
    assert (reread.config, reread.variant) == (checkpoint.config, checkpoint.variant)
    assert identical(reread.state, checkpoint.state)


@pytest.mark.parametrize(
    "name",
    [
        "vit_giant_patch14_reg4_dinov2",
        "vit_small_plus_patch16_dinov3",
        "vit_base_patch32_clip_224",
        "vit_small_patch16_rope_ape_224",
        "vit_so150m2_patch16_reg1_gap_256",
    ],
)
@pytest.mark.parametrize("size", [(56, 24), (40, 40)])
def test_other_image_sizes_give_timms_logits(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    reference, source = make_family(tmp_path / "reference", name, dynamic_img_size=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_logits(weights.read(source).build(), reference, random_images(*size))


def test_non_square_rotary_model_gives_timms_logits(tmp_path: Path) -> None:
    for name in ("vit_small_patch16_dinov3", "vit_small_patch16_rope_224"):
        reference, source = make_family(tmp_path / name, name, img_size=(24, 56))
        assert_same_logits(weights.read(source).build(), reference, random_images(24, 56))


def test_bare_dinov3_file_is_read_with_its_assumptions_noted(tmp_path: Path) -> None:
    reference = randomize_weights(timm.create_model("vit_small_patch16_dinov3", **SMALL | {"global_pool": "token"}))
    save_file(reference.state_dict(), tmp_path / "dinov3.safetensors")
    checkpoint = weights.read(tmp_path / "dinov3.safetensors", CheckpointOptions(heads=4, image_size=(32, 32)))
    assert_same_logits(checkpoint.build(), reference, random_images(32, 32))
    notes = "\n".join(checkpoint.notes)
    assert "rotary positions of DINOv3" in notes
    assert "norm eps 1e-05 (--norm-eps)" in notes
    assert checkpoint.preprocessing.mean == (0.485, 0.456, 0.406)
    square = weights.read(tmp_path / "dinov3.safetensors", CheckpointOptions(heads=4))
    assert square.config.image_size == (128, 128)
    assert "square images of 128×128 (--image-size)" in "\n".join(square.notes)


def dinov3_own_file(reference: Any, gated: bool) -> dict[str, torch.Tensor]:
    """Tensors under the names of DINOv3's own files."""
    tensors = {}
    for name, tensor in reference.state_dict().items():
        if name.endswith("attn.q_bias"):
            v_bias = reference.state_dict()[name.replace("q_bias", "v_bias")]
            prefix = name.removesuffix("q_bias")
            noise = torch.randn_like(tensor)  # masked
            tensors[f"{prefix}qkv.bias"] = torch.cat([tensor, noise, v_bias])
            ones = torch.ones_like(tensor)
            tensors[f"{prefix}qkv.bias_mask"] = torch.cat([ones, torch.zeros_like(ones), ones])
        elif not name.endswith("v_bias"):
            renamed = name.replace("reg_token", "storage_tokens").replace("gamma_1", "ls1.gamma")
            renamed = renamed.replace("gamma_2", "ls2.gamma")
            if gated:
                for part, own in (("fc1_g", "w1"), ("fc1_x", "w2"), ("fc2", "w3")):
                    renamed = renamed.replace(f"mlp.{part}", f"mlp.{own}")
            tensors[renamed] = tensor
    extra = {
        "mask_token": torch.zeros(1, 48),
        "rope_embed.periods": torch.ones(3),
        "local_cls_norm.weight": torch.ones(48),
    }
    return tensors | extra


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3_qkvb", "vit_huge_plus_patch16_dinov3_qkvb"])
def test_dinov3s_own_file_gives_timms_features(name: str, tmp_path: Path) -> None:
    arguments = SMALL | {"global_pool": "token", "num_classes": 0}
    reference = randomize_weights(timm.create_model(name, **arguments))
    torch.save(dinov3_own_file(reference, "plus" in name), tmp_path / "dinov3.pth")
    checkpoint = weights.read(tmp_path / "dinov3.pth", CheckpointOptions(heads=4, image_size=(32, 32)))
    x = random_images(32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(checkpoint.build().features(x), compute_logits(reference, x), atol=1e-4, rtol=0)
    assert "local_cls_norm.weight is not needed: ignored" in checkpoint.notes


def test_dinov2_giants_own_file_gives_timms_features(tmp_path: Path) -> None:
    reference = randomize_weights(timm.create_model("vit_giant_patch14_dinov2", **SMALL | {"num_classes": 0}))
    tensors = {
        name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3"): tensor
        for name, tensor in reference.state_dict().items()
    }
    torch.save(tensors | {"mask_token": torch.zeros(1, 48)}, tmp_path / "giant.pth")
    checkpoint = weights.read(tmp_path / "giant.pth", CheckpointOptions(heads=4))
    x = random_images(32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(checkpoint.build().features(x), compute_logits(reference, x), atol=1e-4, rtol=0)


def test_norm_of_its_own_for_the_class_token_is_refused(tmp_path: Path) -> None:
    reference = timm.create_model("vit_small_patch16_dinov3", **SMALL)
    torch.save(reference.state_dict() | {"cls_norm.weight": torch.ones(48)}, tmp_path / "untied.pth")
    with pytest.raises(VitralError, match=r"a norm of its own for the class token \(cls_norm.weight\)"):
        weights.read(tmp_path / "untied.pth", CheckpointOptions(heads=4))


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "vit_giant_patch14_dinov2"])
def test_dtype_and_metadata_of_half_precision_survive(name: str, tmp_path: Path) -> None:
    reference = randomize_weights(timm.create_model(name, **SMALL)).half()
    source = save_for_hub(tmp_path / "reference", reference, SMALL, name)
    weights.write(weights.read(source), tmp_path / "converted", to="timm")
    assert identical(load_file(tmp_path / "converted" / "model.safetensors"), reference.state_dict())


def test_rotary_model_of_vitral_is_not_representable_in_timm(tmp_path: Path) -> None:
    model = ViT(ViTConfig(image_size=(16, 16), patch_size=8, width=16, depth=1, heads=2, positions="rotary"))
    with pytest.raises(VitralError, match="timm cannot represent this model: it does not support rotary positions"):
        weights.write(as_checkpoint(model), tmp_path / "converted", to="timm")
