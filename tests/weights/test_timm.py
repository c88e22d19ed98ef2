"""timm's models, to vitral and back: the same logits, the same bits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from support.common import identical
from support.references import VisionTransformer, VisionTransformerDistilled, answers, lively, pictures, timm
from vitral import weights
from vitral.data.decode import image_files
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor

SMALL: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 48,
    "depth": 3,
    "num_heads": 4,
    "num_classes": 7,
}
GAP = {"class_token": False, "global_pool": "avg"}
# name → arguments of timm's model, vitral's variant, whether the tensors come back bit for bit
KINDS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "plain": ({}, "plain", True),
    "one block": ({"depth": 1}, "plain", True),
    "narrow MLP": ({"mlp_ratio": 2.5}, "plain", True),
    "not square": ({"img_size": (24, 40)}, "plain", True),
    "one channel": ({"in_chans": 1}, "plain", True),
    "no bias in qkv": ({"qkv_bias": False}, "plain", True),
    "norms on q and k": ({"qk_norm": True}, "plain", True),
    "tanh GELU": ({"act_layer": "gelu_tanh"}, "plain", True),
    "deit3: class token without a position": ({"no_embed_class": True, "init_values": 1e-6}, "plain", True),
    "dinov2 reg4": ({"no_embed_class": True, "init_values": 1e-5, "reg_tokens": 4}, "plain", True),
    "reg4 gap": ({**GAP, "reg_tokens": 4, "no_embed_class": True, "init_values": 1e-5}, "late-norm", True),
    "gap": (GAP, "late-norm", True),
    "gap, norm before": ({**GAP, "fc_norm": False}, "plain", True),
    "map": ({"class_token": False, "global_pool": "map"}, "plain", True),
    "registers with positions": ({"reg_tokens": 2}, "plain", False),
    "gap beside a class token": ({"global_pool": "avg"}, "late-norm", False),
    "map beside a class token": ({"global_pool": "map"}, "plain", False),
    "norm after taking the class token": ({"fc_norm": True}, "plain", False),
}


def saved(folder: Path, model: Any, given: dict[str, Any]) -> Path:
    """As timm's save_for_hf lays a model out."""
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    config = {
        "architecture": "vit_base_patch16_224",
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "model_args": given,
        "pretrained_cfg": {
            "input_size": [model.in_chans, *model.patch_embed.img_size],
            "mean": [0.1] * model.in_chans,
            "std": [0.3] * model.in_chans,
            "crop_pct": 0.95,
            "interpolation": "bilinear",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_timm_and_vitral_give_the_same_logits_both_ways(kind: str, tmp_path: Path) -> None:
    changes, variant, exact = KINDS[kind]
    given = SMALL | changes
    theirs = lively(VisionTransformer(**given))
    source = saved(tmp_path / "theirs", theirs, given)
    checkpoint = weights.read(source)
    x = pictures(*theirs.patch_embed.img_size, channels=theirs.in_chans)
    assert checkpoint.family == "timm"
    assert checkpoint.variant == variant
    torch.testing.assert_close(answers(checkpoint.build(), x), answers(theirs, x), atol=1e-4, rtol=0)
    weights.write(checkpoint, tmp_path / "back", to="timm")
    back = timm.create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True).eval()
    torch.testing.assert_close(answers(back, x), answers(theirs, x), atol=1e-4, rtol=0)
    if exact:
        assert identical(back.state_dict(), theirs.state_dict())
    again = weights.read(tmp_path / "back")
    assert again.config == checkpoint.config
    assert identical(again.state, checkpoint.state) or not exact
    assert again.preprocessing == checkpoint.preprocessing


def test_a_distilled_deit_has_the_same_logits_both_ways(tmp_path: Path) -> None:
    theirs = lively(VisionTransformerDistilled(**SMALL))
    checkpoint = weights.read(saved(tmp_path / "theirs", theirs, SMALL))
    x = pictures(32, 32)
    assert checkpoint.variant == "distilled"
    torch.testing.assert_close(answers(checkpoint.build(), x), answers(theirs, x), atol=1e-4, rtol=0)
    weights.write(checkpoint, tmp_path / "back", to="timm")
    back = timm.create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True).eval()
    assert identical(back.state_dict(), theirs.state_dict())
    torch.testing.assert_close(answers(back, x), answers(theirs, x), atol=1e-5, rtol=0)


def test_a_bare_file_of_a_real_size_needs_nothing_else_and_says_what_was_assumed(tmp_path: Path) -> None:
    theirs = lively(timm.create_model("vit_tiny_patch16_224"))
    file = tmp_path / "vit_tiny.safetensors"
    save_file(theirs.state_dict(), file)
    checkpoint = weights.read(file)
    x = pictures(224, 224, count=1)
    torch.testing.assert_close(answers(checkpoint.build(), x), answers(theirs, x), atol=1e-4, rtol=0)
    assert checkpoint.config.heads == 3
    assert checkpoint.preprocessing.mean == checkpoint.preprocessing.std == (0.5, 0.5, 0.5)
    assert (checkpoint.preprocessing.crop, checkpoint.preprocessing.interpolation) == (0.9, "bicubic")
    said = "\n".join(checkpoint.notes)
    assert "heads: 3, ASSUMED" in said
    assert "preprocessing ASSUMED" in said
    assert "152 tensors" in said
    weights.write(checkpoint, tmp_path / "back.pth", to="timm")
    assert identical(torch.load(tmp_path / "back.pth", weights_only=True), load_file(file))


def test_heads_that_nothing_tells_are_asked_for(tmp_path: Path) -> None:
    save_file(lively(VisionTransformer(**SMALL)).state_dict(), tmp_path / "small.safetensors")
    with pytest.raises(VitralError, match="how many heads a model of width 48") as error:
        weights.read(tmp_path / "small.safetensors")
    assert error.value.hint.startswith("say it once: vitral convert")
    assert weights.read(tmp_path / "small.safetensors", heads=4).config.heads == 4
    with pytest.raises(VitralError, match="a width of 48 cannot be shared by 5 heads"):
        weights.read(tmp_path / "small.safetensors", heads=5)


def test_an_image_that_is_not_square_is_asked_for_where_nothing_tells(tmp_path: Path) -> None:
    theirs = lively(VisionTransformer(**SMALL | {"img_size": (24, 48)}))
    save_file(theirs.state_dict(), tmp_path / "wide.safetensors")
    with pytest.raises(VitralError, match="19 positions are no square image"):
        weights.read(tmp_path / "wide.safetensors", heads=4)
    checkpoint = weights.read(tmp_path / "wide.safetensors", heads=4, image_size=(24, 48))
    x = pictures(24, 48)
    torch.testing.assert_close(answers(checkpoint.build(), x), answers(theirs, x), atol=1e-4, rtol=0)
    with pytest.raises(VitralError, match="do not fit images of 24×40"):
        weights.read(tmp_path / "wide.safetensors", heads=4, image_size=(24, 40))


def test_weights_without_a_classifier_are_features(tmp_path: Path) -> None:
    theirs = lively(VisionTransformer(**SMALL | {"num_classes": 0}))
    checkpoint = weights.read(saved(tmp_path / "theirs", theirs, SMALL | {"num_classes": 0}))
    x = pictures(32, 32)
    assert checkpoint.headless
    assert any("no classifier" in note for note in checkpoint.notes)
    with torch.inference_mode():
        torch.testing.assert_close(checkpoint.build().features(x), theirs(x), atol=1e-4, rtol=0)
    weights.write(checkpoint, tmp_path / "ours", to="vitral")
    ours = weights.read(tmp_path / "ours")
    assert ours.headless
    weights.write(ours, tmp_path / "back", to="timm")
    assert identical(load_file(tmp_path / "back" / "model.safetensors"), theirs.state_dict())


def test_an_old_representation_layer_becomes_the_hidden_layer_of_the_head(tmp_path: Path) -> None:
    theirs = lively(VisionTransformer(**SMALL))
    hidden = lively(torch.nn.Linear(48, 48), seed=3)
    tensors = theirs.state_dict() | {f"pre_logits.fc.{name}": t for name, t in hidden.state_dict().items()}
    save_file(tensors, tmp_path / "old.safetensors")
    checkpoint = weights.read(tmp_path / "old.safetensors", heads=4)
    x = pictures(32, 32)
    with torch.inference_mode():
        pooled = theirs.forward_head(theirs.forward_features(x), pre_logits=True)
        torch.testing.assert_close(checkpoint.build()(x), theirs.head(hidden(pooled).tanh()), atol=1e-4, rtol=0)
    with pytest.raises(VitralError, match="timm cannot hold this model: it has no hidden layer"):
        weights.write(checkpoint, tmp_path / "back", to="timm")


def test_dinov2s_own_file_has_a_position_for_the_class_token_alone(tmp_path: Path) -> None:
    given = SMALL | {"reg_tokens": 4, "no_embed_class": True, "init_values": 1e-5, "num_classes": 0}
    theirs = lively(VisionTransformer(**given))
    state = theirs.state_dict()
    row = torch.randn(1, 1, 48)
    moved = {"cls_token": state["cls_token"] - row, "pos_embed": torch.cat([row, state["pos_embed"]], dim=1)}
    tensors = state | moved | {"register_tokens": state["reg_token"], "mask_token": torch.zeros(1, 48)}
    del tensors["reg_token"]
    torch.save(tensors, tmp_path / "dinov2.pth")
    checkpoint = weights.read(tmp_path / "dinov2.pth", heads=4)
    x = pictures(32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(checkpoint.build().features(x), theirs(x), atol=1e-4, rtol=0)
    assert checkpoint.preprocessing.mean == (0.485, 0.456, 0.406)


def test_class_names_and_preprocessing_come_from_config_json(tmp_path: Path) -> None:
    folder = saved(tmp_path / "theirs", lively(VisionTransformer(**SMALL)), SMALL)
    config = json.loads((folder / "config.json").read_text())
    config["label_names"] = [f"n{k}" for k in range(7)]
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = weights.read(folder)
    assert checkpoint.classes == tuple(f"n{k}" for k in range(7))
    assert checkpoint.preprocessing.mean == (0.1, 0.1, 0.1)
    assert (checkpoint.preprocessing.crop, checkpoint.preprocessing.interpolation) == (0.95, "bilinear")
    weights.write(checkpoint, tmp_path / "back", to="timm")
    again = weights.read(tmp_path / "back")
    assert (again.classes, again.preprocessing) == (checkpoint.classes, checkpoint.preprocessing)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "vit_base_patch16_rpn_224"}, "post-norm"),
        ({"architecture": "vit_base_patch32_clip_quickgelu_224"}, "activation is quick_gelu"),
        ({"model_args": {"act_layer": "silu"}}, "activation is silu"),
        ({"model_args": {"norm_layer": "rmsnorm"}}, "norm_layer"),
        ({"global_pool": "avgmax"}, "pooling is 'avgmax'"),
    ],
)
def test_what_config_json_says_and_vitral_has_not_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "theirs", lively(VisionTransformer(**SMALL)), SMALL)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(VitralError, match=reason):
        weights.read(folder)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("swin_tiny_patch4_window7_224", "relative positions"),
        ("beit_base_patch16_224", "relative positions"),
        ("vit_relpos_small_patch16_224", "relative positions"),
        ("vit_giant_patch14_dinov2", "SwiGLU"),
        ("vit_base_patch32_clip_224", "norm before the first block"),
        ("eva02_tiny_patch14_224", "rotary positions|SwiGLU"),
        ("vit_small_r26_s32_224", "convolutional network before its patches"),
        ("vit_small_patch16_18x2_224", "side by side"),
        ("vit_pwee_patch16_reg1_gap_256", "side by side"),
        ("test_vit4", "RMS norm"),
        ("resnet18", "not a Vision Transformer"),
        ("convnext_atto", "not a Vision Transformer"),
    ],
)
def test_other_architectures_are_refused_with_the_reason(architecture: str, reason: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        shapes = timm.create_model(architecture).state_dict()
    few = {name: t for name, t in shapes.items() if not any(f".{i}." in name for i in range(2, 60))}
    tensors = {name: torch.zeros((), dtype=t.dtype).expand(t.shape) for name, t in few.items()}
    torch.save(tensors, tmp_path / "other.pth")  # expanded zeros: a giant in a few kilobytes
    with pytest.raises(VitralError, match=reason) as error:
        weights.read(tmp_path / "other.pth", heads=1)
    assert str(error.value).count("\n") == 1


@pytest.mark.slow
def test_heads_and_gelu_of_timms_own_names_are_known() -> None:
    from vitral.weights.timm import TANH, _heads_of

    for name in [*timm.list_models("vit_*"), *timm.list_models("deit*")]:
        with torch.device("meta"):
            model = timm.create_model(name)
        names = set(model.state_dict())
        plain = {
            "patch_embed.proj.weight",
            "blocks.0.attn.qkv.weight",
            "blocks.0.mlp.fc1.weight",
            "blocks.0.norm1.bias",
        }
        if not plain <= names or "norm_pre.weight" in names or any("rel_pos" in n or "backbone" in n for n in names):
            continue
        block = model.blocks[0]
        if block.mlp.fc1.out_features == block.mlp.fc2.in_features:  # else SwiGLU
            assert _heads_of(name, model.embed_dim) == block.attn.num_heads, name
            assert ("tanh" in repr(block.mlp.act).lower()) == name.startswith(TANH), name


REAL = Path(os.environ.get("VITRAL_TEST_WEIGHTS", "")) / "vit_tiny_patch16_224.timm.safetensors"
PHOTOGRAPHS = Path(os.environ.get("VITRAL_TEST_PHOTOS", ""))  # a folder with ants/ and bees/


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_file() or not (PHOTOGRAPHS / "ants").is_dir(), reason="no real weights, no photographs")
def test_the_real_tiny_vit_sees_what_it_sees_in_timm(tmp_path: Path) -> None:
    weights.convert(REAL, tmp_path / "model", to="vitral")
    predictor = Predictor.load(tmp_path / "model", device="cpu")
    theirs = timm.create_model("vit_tiny_patch16_224").eval()
    theirs.load_state_dict(load_file(REAL))
    said = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 0.9, "interpolation": "bicubic"}
    transform = timm.data.create_transform(input_size=(3, 224, 224), **said)
    for insect, right in (("ants", 310), ("bees", 309)):
        files = image_files([PHOTOGRAPHS / insect])
        ours = [answer.best.name for answer in predictor.predict_files(files)]
        batch = torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
        assert ours == [f"class {k}" for k in answers(theirs, batch).argmax(dim=1).tolist()]
        assert sum(name == f"class {right}" for name in ours) / len(ours) > 0.85
