"""timm models converted to vitral and converted have the same logits and identical tensors."""

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
from support.references import (
    VisionTransformer,
    VisionTransformerDistilled,
    assert_same_logits,
    compute_logits,
    random_images,
    randomize_weights,
    save_for_hub,
    timm,
)
from vitral import weights
from vitral.data.files.walk import find_images
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor
from vitral.recipes.checkpoint_options import CheckpointOptions

SMALL: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 48,
    "depth": 3,
    "num_heads": 4,
    "num_classes": 7,
}
GAP = {"class_token": False, "global_pool": "avg"}
# name → arguments of timm's class, vitral's variant, whether the tensors are identical after a round trip
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
    "gap, norm before pooling": ({**GAP, "fc_norm": False}, "plain", True),
    "map": ({"class_token": False, "global_pool": "map"}, "plain", True),
    "registers with positions": ({"reg_tokens": 2}, "plain", True),
    "gap with a class token": ({"global_pool": "avg"}, "late-norm", True),
    "gap, class token and registers": (
        {"global_pool": "avg", "reg_tokens": 2, "no_embed_class": True},
        "late-norm",
        True,
    ),
    "map with a class token": ({"global_pool": "map"}, "plain", True),
    "norm after pooling the class token": ({"fc_norm": True}, "late-norm", True),
    "norm before the blocks": ({"pre_norm": True}, "plain", True),
    "no final norm": ({"final_norm": False}, "plain", True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_preserves_logits_and_tensors(kind: str, tmp_path: Path) -> None:
    changes, variant, exact = KINDS[kind]
    arguments = SMALL | changes
    reference = randomize_weights(VisionTransformer(**arguments))
    source = save_for_hub(tmp_path / "reference", reference, arguments)
    checkpoint = weights.read(source)
    height, width = reference.patch_embed.img_size
    x = random_images(height, width, channels=reference.in_chans)
    assert checkpoint.format == "timm"
    assert checkpoint.variant == variant
    assert_same_logits(checkpoint.build(), reference, x)
    weights.write(checkpoint, tmp_path / "converted", to="timm")
    converted = timm.create_model(f"local-dir:{tmp_path / 'converted'}", pretrained=True).eval()
    assert_same_logits(converted, reference, x)
    if exact:
        assert identical(converted.state_dict(), reference.state_dict())
    reread = weights.read(tmp_path / "converted")
    assert reread.config == checkpoint.config
    assert identical(reread.state, checkpoint.state) or not exact
    assert reread.preprocessing == checkpoint.preprocessing


def test_round_trip_of_a_distilled_deit(tmp_path: Path) -> None:
    reference = randomize_weights(VisionTransformerDistilled(**SMALL))
    checkpoint = weights.read(save_for_hub(tmp_path / "reference", reference, SMALL))
    x = random_images(32, 32)
    assert checkpoint.variant == "distilled"
    assert_same_logits(checkpoint.build(), reference, x)
    weights.write(checkpoint, tmp_path / "converted", to="timm")
    converted = timm.create_model(f"local-dir:{tmp_path / 'converted'}", pretrained=True).eval()
    assert identical(converted.state_dict(), reference.state_dict())
    assert_same_logits(converted, reference, x)


def test_bare_file_of_a_usual_width_is_read_with_assumptions_noted(tmp_path: Path) -> None:
    reference = randomize_weights(timm.create_model("vit_tiny_patch16_224"))
    file = tmp_path / "vit_tiny.safetensors"
    save_file(reference.state_dict(), file)
    checkpoint = weights.read(file)
    x = random_images(224, 224, count=1)
    assert_same_logits(checkpoint.build(), reference, x)
    assert checkpoint.config.heads == 3
    assert checkpoint.preprocessing.mean == checkpoint.preprocessing.std == (0.5, 0.5, 0.5)
    assert (checkpoint.preprocessing.crop, checkpoint.preprocessing.interpolation) == (0.9, "bicubic")
    notes = "\n".join(checkpoint.notes)
    assert (
        "assumed: class-token pooling (--pooling), square images of 224×224 (--image-size), no rotary positions, "
        "3 heads (--heads), gelu activation (--activation), norm eps 1e-06 (--norm-eps), "
        "mean 0.5 std 0.5 (--mean --std), crop 0.9 (--crop), bicubic interpolation (--interpolation)"
    ) in notes
    assert "152 tensors" in notes
    weights.write(checkpoint, tmp_path / "converted.pth", to="timm")
    assert identical(torch.load(tmp_path / "converted.pth", weights_only=True), load_file(file))


def test_heads_of_an_unusual_width_must_be_specified(tmp_path: Path) -> None:
    save_file(randomize_weights(VisionTransformer(**SMALL)).state_dict(), tmp_path / "small.safetensors")
    with pytest.raises(VitralError, match="number of heads of a model of width 48") as error:
        weights.read(tmp_path / "small.safetensors")
    assert error.value.hint.startswith("Pass --heads N, or store it once: vitral convert")
    assert weights.read(tmp_path / "small.safetensors", CheckpointOptions(heads=4)).config.heads == 4
    with pytest.raises(VitralError, match="width 48 is not divisible by 5 heads"):
        weights.read(tmp_path / "small.safetensors", CheckpointOptions(heads=5))


def test_non_square_image_size_must_be_specified(tmp_path: Path) -> None:
    reference = randomize_weights(VisionTransformer(**SMALL | {"img_size": (24, 48)}))
    save_file(reference.state_dict(), tmp_path / "wide.safetensors")
    with pytest.raises(VitralError, match="19 positions do not form a square image"):
        weights.read(tmp_path / "wide.safetensors", CheckpointOptions(heads=4))
    checkpoint = weights.read(tmp_path / "wide.safetensors", CheckpointOptions(heads=4, image_size=(24, 48)))
    x = random_images(24, 48)
    assert_same_logits(checkpoint.build(), reference, x)
    with pytest.raises(VitralError, match="do not fit images of 24×40"):
        weights.read(tmp_path / "wide.safetensors", CheckpointOptions(heads=4, image_size=(24, 40)))


def test_weights_without_a_classifier_give_features(tmp_path: Path) -> None:
    reference = randomize_weights(VisionTransformer(**SMALL | {"num_classes": 0}))
    checkpoint = weights.read(save_for_hub(tmp_path / "reference", reference, SMALL | {"num_classes": 0}))
    x = random_images(32, 32)
    assert checkpoint.headless
    assert any("no classifier" in note for note in checkpoint.notes)
    with torch.inference_mode():
        torch.testing.assert_close(checkpoint.build().features(x), reference(x), atol=1e-4, rtol=0)
    weights.write(checkpoint, tmp_path / "vitral", to="vitral")
    vitral_checkpoint = weights.read(tmp_path / "vitral")
    assert vitral_checkpoint.headless
    weights.write(vitral_checkpoint, tmp_path / "converted", to="timm")
    assert identical(load_file(tmp_path / "converted" / "model.safetensors"), reference.state_dict())


def test_representation_layer_of_old_files_becomes_the_hidden_head_layer(tmp_path: Path) -> None:
    reference = randomize_weights(VisionTransformer(**SMALL))
    hidden = randomize_weights(torch.nn.Linear(48, 48), seed=3)
    tensors = reference.state_dict() | {f"pre_logits.fc.{name}": t for name, t in hidden.state_dict().items()}
    save_file(tensors, tmp_path / "old.safetensors")
    checkpoint = weights.read(tmp_path / "old.safetensors", CheckpointOptions(heads=4))
    x = random_images(32, 32)
    with torch.inference_mode():
        pooled = reference.forward_head(reference.forward_features(x), pre_logits=True)
        torch.testing.assert_close(checkpoint.build()(x), reference.head(hidden(pooled).tanh()), atol=1e-4, rtol=0)
    with pytest.raises(VitralError, match="timm cannot represent this model: it does not support a hidden layer"):
        weights.write(checkpoint, tmp_path / "converted", to="timm")


def test_dinov2_file_with_a_position_for_the_class_token_only(tmp_path: Path) -> None:
    arguments = SMALL | {"reg_tokens": 4, "no_embed_class": True, "init_values": 1e-5, "num_classes": 0}
    reference = randomize_weights(VisionTransformer(**arguments))
    state = reference.state_dict()
    row = torch.randn(1, 1, 48)
    tokens = {"cls_token": state["cls_token"] - row, "pos_embed": torch.cat([row, state["pos_embed"]], dim=1)}
    tensors = state | tokens | {"register_tokens": state["reg_token"], "mask_token": torch.zeros(1, 48)}
    del tensors["reg_token"]
    torch.save(tensors, tmp_path / "dinov2.pth")
    checkpoint = weights.read(tmp_path / "dinov2.pth", CheckpointOptions(heads=4))
    x = random_images(32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(checkpoint.build().features(x), reference(x), atol=1e-4, rtol=0)
    assert checkpoint.preprocessing.mean == (0.485, 0.456, 0.406)


def test_class_names_and_preprocessing_are_read_from_config_json(tmp_path: Path) -> None:
    folder = save_for_hub(tmp_path / "reference", randomize_weights(VisionTransformer(**SMALL)), SMALL)
    config = json.loads((folder / "config.json").read_text())
    config["label_names"] = [f"n{k}" for k in range(7)]
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = weights.read(folder)
    assert checkpoint.classes == tuple(f"n{k}" for k in range(7))
    assert checkpoint.preprocessing.mean == (0.1, 0.1, 0.1)
    assert (checkpoint.preprocessing.crop, checkpoint.preprocessing.interpolation) == (0.95, "bilinear")
    weights.write(checkpoint, tmp_path / "converted", to="timm")
    reread = weights.read(tmp_path / "converted")
    assert (reread.classes, reread.preprocessing) == (checkpoint.classes, checkpoint.preprocessing)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "vit_base_patch16_rpn_224"}, "post-norm"),
        ({"architecture": "vit_small_patch16_rope_mixed_224"}, "rotary positions of type 'mixed'"),
        ({"architecture": "vit_medium_patch16_rope_reg1_gap_256"}, "rotary positions for another grid than 4×4"),
        ({"model_args": SMALL | {"act_layer": "silu"}}, "activation silu"),
        ({"model_args": {"norm_layer": "rmsnorm"}}, "norm_layer"),
        ({"global_pool": "avgmax"}, "pooling 'avgmax'"),
    ],
)
def test_unsupported_config_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = save_for_hub(tmp_path / "reference", randomize_weights(VisionTransformer(**SMALL)), SMALL)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(VitralError, match=reason):
        weights.read(folder)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("swin_tiny_patch4_window7_224", "relative positions"),
        pytest.param("beit_base_patch16_224", "relative positions", marks=pytest.mark.slow),
        pytest.param("vit_relpos_small_patch16_224", "relative positions", marks=pytest.mark.slow),
        ("vit_base_patch16_rope_mixed_224", "rotary positions with learned frequencies"),
        ("eva02_tiny_patch14_224", "EVA blocks"),
        ("eva02_base_patch14_224", "EVA-02 blocks"),
        ("vit_dwee_patch16_reg1_gap_256", "differential attention"),
        ("vit_small_r26_s32_224", "convolutional stem before the patches"),
        ("vit_small_patch16_18x2_224", "parallel attention and MLP branches"),
        pytest.param("vit_pwee_patch16_reg1_gap_256", "parallel attention and MLP branches", marks=pytest.mark.slow),
        ("test_vit4", "RMS norm"),
        ("resnet18", "not a Vision Transformer"),
        pytest.param("convnext_atto", "not a Vision Transformer", marks=pytest.mark.slow),
    ],
)
def test_unsupported_architecture_is_refused_with_the_reason(architecture: str, reason: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        shapes = timm.create_model(architecture).state_dict()
    first_blocks = {name: t for name, t in shapes.items() if not any(f".{i}." in name for i in range(2, 60))}
    tensors = {name: torch.zeros((), dtype=t.dtype).expand(t.shape) for name, t in first_blocks.items()}
    torch.save(tensors, tmp_path / "other.pth")  # expanded zeros keep the file small
    with pytest.raises(VitralError, match=reason) as error:
        weights.read(tmp_path / "other.pth", CheckpointOptions(heads=1))
    assert str(error.value).count("\n") == 1


CHECKPOINT = Path(os.environ.get("VITRAL_TEST_WEIGHTS", "")) / "vit_tiny_patch16_224.timm.safetensors"
PHOTOS = Path(os.environ.get("VITRAL_TEST_PHOTOS", ""))  # a folder with ants/ and bees/


@pytest.mark.slow
@pytest.mark.skipif(
    not CHECKPOINT.is_file() or not (PHOTOS / "ants").is_dir(),
    reason="needs VITRAL_TEST_WEIGHTS and VITRAL_TEST_PHOTOS",
)
def test_trained_vit_tiny_predicts_the_same_classes_as_in_timm(tmp_path: Path) -> None:
    weights.convert(CHECKPOINT, tmp_path / "model", to="vitral")
    predictor = Predictor.load(tmp_path / "model", device="cpu")
    reference = timm.create_model("vit_tiny_patch16_224").eval()
    reference.load_state_dict(load_file(CHECKPOINT))
    options = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 0.9, "interpolation": "bicubic"}
    transform = timm.data.create_transform(input_size=(3, 224, 224), **options)
    for insect, label in (("ants", 310), ("bees", 309)):
        files = find_images([PHOTOS / insect])
        predicted = [prediction.best.name for prediction in predictor.predict_files(files)]
        batch = torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
        assert predicted == [f"class {k}" for k in compute_logits(reference, batch).argmax(dim=1).tolist()]
        assert sum(name == f"class {label}" for name in predicted) / len(predicted) > 0.85
