"""What the tensors of a checkpoint do not determine is listed as assumed, and an option corrects it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.references import (
    Eva,
    VisionTransformer,
    as_checkpoint,
    assert_same_logits,
    random_images,
    randomize_weights,
    torchvision,
    transformers,
    vit_pytorch,
)
from vitral import weights
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.checkpoint_options import CheckpointOptions

TIMM: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 7}
LUCID: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "num_classes": 7, "dim": 48, "depth": 2, "heads": 4, "dim_head": 12,
    "mlp_dim": 80,
}  # fmt: skip


def save(model: Any, path: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    return path


def assumptions(checkpoint: weights.Checkpoint) -> list[str]:
    return [str(assumption) for assumption in checkpoint.assumptions]


# name → changes of TIMM, the assumption that is wrong for this model, the option that corrects it
TIMM_KINDS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "mean pooling, no fc_norm": (
        {"global_pool": "avg", "fc_norm": False}, "class-token pooling (--pooling)", {"pooling": "mean"},
    ),
    "class pooling, fc_norm": ({"fc_norm": True}, "mean pooling (--pooling)", {"pooling": "class"}),
    "ReLU": ({"act_layer": "relu"}, "gelu activation (--activation)", {"activation": "relu"}),
    "quick GELU": ({"act_layer": "quick_gelu"}, "gelu activation (--activation)", {"activation": "quick_gelu"}),
    "tanh GELU": ({"act_layer": "gelu_tanh"}, "gelu activation (--activation)", {"activation": "gelu_tanh"}),
    "not square": (
        {"img_size": (16, 64)}, "square images of 32×32 (--image-size)", {"image_size": (16, 64)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TIMM_KINDS)
def test_bare_timm_file_is_read_correctly_with_the_option_that_its_note_names(kind: str, tmp_path: Path) -> None:
    changes, wrong, correction = TIMM_KINDS[kind]
    reference = randomize_weights(VisionTransformer(**TIMM | changes))
    file = save(reference, tmp_path / "bare.safetensors")
    assumed = weights.read(file, CheckpointOptions(heads=4))
    corrected = weights.read(file, CheckpointOptions(heads=4, **correction))
    assert wrong in assumptions(assumed)
    assert f"assumed: {', '.join(assumptions(assumed))}" == assumed.notes[-1]
    assert wrong not in assumptions(corrected)
    assert_same_logits(corrected.build(), reference, random_images(*reference.patch_embed.img_size))


def test_config_json_leaves_nothing_of_the_architecture_assumed_and_is_not_contradicted(tmp_path: Path) -> None:
    weights.write(as_checkpoint(ViT(ViTConfig(width=48, depth=1, heads=4))), tmp_path / "model", to="timm")
    assert weights.read(tmp_path / "model").assumptions == ()
    assert weights.read(tmp_path / "model", CheckpointOptions(heads=4, pooling="class", activation="gelu"))
    for options, reason in (
        (CheckpointOptions(heads=3), r"heads is 4 \(config.json .*, got --heads 3"),
        (CheckpointOptions(pooling="mean"), r"pooling is class \(config.json\), got --pooling mean"),
        (CheckpointOptions(activation="relu"), r"activation is gelu \(config.json\), got --activation relu"),
    ):
        with pytest.raises(VitralError, match=reason):
            weights.read(tmp_path / "model", options)


def test_pooling_that_the_tensors_exclude_is_refused(tmp_path: Path) -> None:
    file = save(VisionTransformer(**TIMM, class_token=False, global_pool="avg"), tmp_path / "mean.safetensors")
    for pooling, reason in (("class", "has no class token"), ("attention", "has no attention pooling")):
        options = CheckpointOptions(heads=4, pooling=pooling)  # type: ignore[arg-type]
        with pytest.raises(VitralError, match=reason) as error:
            weights.read(file, options)
        assert error.value.hint == "Use --pooling mean"


@pytest.mark.parametrize("correction", [{"channels": 4}, {"image_size": (32, 32)}])
def test_channels_of_a_vit_pytorch_file_are_assumed_or_given(correction: dict[str, Any], tmp_path: Path) -> None:
    """4·8² values per patch are also 1·16²."""
    reference = randomize_weights(vit_pytorch.ViT(**LUCID | {"channels": 4}))
    file = save(reference, tmp_path / "rgba.safetensors")
    assumed = weights.read(file, CheckpointOptions(heads=4))
    assert "1 channel in patches of 16×16 (--channels)" in assumptions(assumed)
    checkpoint = weights.read(file, CheckpointOptions(heads=4, **correction))
    assert (checkpoint.config.channels, checkpoint.config.patch_size) == (4, 8)
    assert_same_logits(checkpoint.build(), reference, random_images(32, 32, channels=4))
    weights.write(checkpoint, tmp_path / "written.pt", to="vit-pytorch")
    assert torch.equal(
        torch.load(tmp_path / "written.pt", weights_only=True)["to_patch_embedding.2.weight"],
        reference.state_dict()["to_patch_embedding.2.weight"],
    )
    with pytest.raises(VitralError, match="patches of 256 values are not square with 3 channels"):
        weights.read(file, CheckpointOptions(heads=4, channels=3))


def test_mean_pooling_of_a_vit_pytorch_file_with_a_class_token_is_refused(tmp_path: Path) -> None:
    file = save(vit_pytorch.ViT(**LUCID), tmp_path / "class.safetensors")
    assert "class-token pooling (--pooling)" in assumptions(weights.read(file, CheckpointOptions(heads=4)))
    with pytest.raises(VitralError, match="includes the class token"):
        weights.read(file, CheckpointOptions(heads=4, pooling="mean"))


EVA: dict[str, Any] = TIMM | {"qkv_fused": True, "use_rot_pos_emb": True, "global_pool": "token"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"init_values": 0.1, "qkv_bias": False}, "EVA blocks"),
        ({}, "EVA blocks"),
        ({"qkv_bias": False, "use_abs_pos_emb": False}, "no pos_embed: rotary or relative positions"),
    ],
)
def test_eva_blocks_and_rotary_positions_are_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    file = save(Eva(**EVA | changes), tmp_path / "eva.safetensors")
    with pytest.raises(VitralError, match=reason):
        weights.read(file, CheckpointOptions(heads=4))


def test_rotary_positions_that_leave_no_tensor_are_listed_as_an_assumption(tmp_path: Path) -> None:
    file = save(Eva(**EVA, qkv_bias=False), tmp_path / "eva.safetensors")
    assert "no rotary positions" in assumptions(weights.read(file, CheckpointOptions(heads=4)))


def test_transformers_file_without_config_lists_activation_eps_and_preprocessing(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "hidden_size": 48, "num_hidden_layers": 1}
    config = transformers.ViTConfig(
        **sizes, num_attention_heads=4, num_labels=7, intermediate_size=80, hidden_act="relu", layer_norm_eps=1e-3
    )
    reference = randomize_weights(transformers.ViTForImageClassification(config))
    torch.save(reference.state_dict(), tmp_path / "bare.pt")
    assert assumptions(weights.read(tmp_path / "bare.pt", CheckpointOptions(heads=4))) == [
        "square images of 32×32 (--image-size)",
        "gelu activation (--activation)",
        "norm eps 1e-12 (--norm-eps)",
        "mean 0.5 std 0.5 (--mean --std)",
        "crop 1 (--crop)",
        "bilinear interpolation (--interpolation)",
    ]
    options = CheckpointOptions(heads=4, activation="relu", norm_eps=1e-3)
    assert_same_logits(weights.read(tmp_path / "bare.pt", options).build(), reference, random_images(32, 32))


@pytest.mark.parametrize(("size", "crop"), [(32, 1.0), (112, 1.0), (128, 0.9), (224, 0.9)])
def test_small_images_are_not_cropped_unless_it_is_stated(size: int, crop: float, tmp_path: Path) -> None:
    file = save(VisionTransformer(**TIMM | {"img_size": size, "depth": 1}), tmp_path / "bare.safetensors")
    assert weights.read(file, CheckpointOptions(heads=4)).preprocessing.crop == crop
    assert weights.read(file, CheckpointOptions(heads=4, crop=0.8)).preprocessing.crop == 0.8


def test_small_torchvision_model_is_not_cropped(tmp_path: Path) -> None:
    model = torchvision.models.VisionTransformer(
        image_size=28, patch_size=7, num_layers=1, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10
    )
    file = save(model, tmp_path / "small.safetensors")
    assert weights.read(file, CheckpointOptions(heads=2)).preprocessing.crop == 1.0


def test_preprocessing_options_replace_what_is_assumed_and_what_is_stored(tmp_path: Path) -> None:
    bare = save(VisionTransformer(**TIMM | {"img_size": 224}), tmp_path / "bare.safetensors")
    options = CheckpointOptions(heads=4, mean=(0.4,), std=(0.2, 0.3, 0.4), crop=0.7, interpolation="bilinear")
    weights.write(as_checkpoint(ViT(ViTConfig(width=48, depth=1, heads=4))), tmp_path / "stored", to="timm")
    for source in (bare, tmp_path / "stored"):
        checkpoint = weights.read(source, options)
        preprocessing = checkpoint.preprocessing
        assert (preprocessing.mean, preprocessing.std) == ((0.4, 0.4, 0.4), (0.2, 0.3, 0.4))
        assert (preprocessing.crop, preprocessing.interpolation) == (0.7, "bilinear")
        assert "--mean, --std, --crop, --interpolation as specified" in "\n".join(checkpoint.notes)
        assert not any("crop" in text or "mean 0" in text for text in assumptions(checkpoint))
    with pytest.raises(VitralError, match="--mean needs one value or one per channel, 3, got 2"):
        weights.read(bare, CheckpointOptions(heads=4, mean=(0.4, 0.5)))


@pytest.mark.parametrize(
    "fields",
    [{"crop": 0.0}, {"crop": 1.5}, {"std": (0.0,)}, {"mean": (float("nan"),)}, {"heads": 0}, {"activation": "tanh"},
     {"pooling": "max"}, {"image_size": (0, 8)}, {"norm_eps": 0.0}, {"channels": 0}, {"interpolation": "nearest"}],
)  # fmt: skip
def test_invalid_options_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(fields))} must be"):
        CheckpointOptions(**fields)


def test_options_may_repeat_but_not_contradict_a_model_of_vitral(tmp_path: Path) -> None:
    """Its config.json states everything, and its calibration was fitted with this preprocessing."""
    model = ViT(ViTConfig(image_size=(32, 32), patch_size=8, width=48, depth=1, heads=4, num_classes=7))
    weights.write(as_checkpoint(model), tmp_path / "model", to="vitral")
    equal = CheckpointOptions(heads=4, activation="gelu", pooling="class", mean=(0.5,), crop=1.0, image_size=(32, 32))
    assert Predictor.load(tmp_path / "model", options=equal, device="cpu").model_config.architecture.heads == 4
    assert weights.read(tmp_path / "model", equal).config.heads == 4
    for options, reason in (
        (CheckpointOptions(heads=2), "has heads 4, got --heads 2"),
        (CheckpointOptions(crop=0.9), "has crop 1.0, got --crop 0.9"),
        (CheckpointOptions(mean=(0.4,)), "has mean 0.5, got --mean 0.4"),
    ):
        for load in (lambda path, o: Predictor.load(path, options=o), weights.read):
            with pytest.raises(VitralError, match=reason) as error:
                load(tmp_path / "model", options)
            assert error.value.hint.startswith("Omit --")


def test_settings_survive_a_conversion_to_vitral(tmp_path: Path) -> None:
    reference = randomize_weights(VisionTransformer(**TIMM | {"act_layer": "quick_gelu"}))
    file = save(reference, tmp_path / "bare.safetensors")
    options = CheckpointOptions(heads=4, activation="quick_gelu", crop=0.8)
    weights.convert(file, tmp_path / "model", "vitral", options)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architecture"]["activation"] == "quick_gelu"
    predictor = Predictor.load(tmp_path / "model", device="cpu")
    assert predictor.engine.name == "fp32"  # the CPU engine supports every activation
    assert_same_logits(predictor.model, reference, random_images(32, 32))
