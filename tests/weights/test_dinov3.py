"""DINOv3 of transformers: the same features at several sizes, identical tensors after a round trip, and to timm."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.common import identical
from support.references import random_images, randomize_weights, timm, transformers
from vitral import weights
from vitral.errors import VitralError
from vitral.recipes.checkpoint_options import CheckpointOptions

SMALL: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 80, "num_register_tokens": 4,
}  # fmt: skip
GATED = {"use_gated_mlp": True, "hidden_act": "silu"}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # changes, and the resulting fields of ViTConfig
    "S/16": ({}, {"rope": "centered", "rope_base": 100.0, "key_bias": False, "norm_eps": 1e-5, "registers": 4}),
    "SwiGLU, as in H+ and 7B": (GATED, {"activation": "swiglu", "mlp_width": 80}),
    "no registers": ({"num_register_tokens": 0}, {"registers": 0}),
    "no biases of q, k and v": ({"query_bias": False, "value_bias": False}, {"qkv_bias": False}),
    "all biases": ({"key_bias": True}, {"key_bias": True, "qkv_bias": True}),
    "another base and eps": ({"rope_theta": 40.0, "layer_norm_eps": 1e-4}, {"rope_base": 40.0, "norm_eps": 1e-4}),
    "not square": ({"image_size": [24, 40]}, {"image_size": (24, 40)}),
}


def make_dinov3(folder: Path, **changes: Any) -> Any:
    model = randomize_weights(transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**SMALL | changes)))
    model.save_pretrained(folder)
    return model


def assert_same_features(model: Any, reference: Any, images: torch.Tensor) -> None:
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(model.features(images), reference(images).pooler_output, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_preserves_features_and_tensors(kind: str, tmp_path: Path) -> None:
    changes, fields = KINDS[kind]
    reference = make_dinov3(tmp_path / "reference", **changes)
    checkpoint = weights.read(tmp_path / "reference")
    assert checkpoint.headless
    assert {field: getattr(checkpoint.config, field) for field in fields} == fields
    model = checkpoint.build()
    for size in (checkpoint.config.image_size, (56, 24)):
        assert_same_features(model, reference, random_images(*size))
    weights.write(checkpoint, tmp_path / "converted", to="transformers")
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("reference", "converted")]
    for tensors in files:
        del tensors["embeddings.mask_token"]  # used in pre-training only
    assert identical(*files)
    converted = transformers.AutoModel.from_pretrained(tmp_path / "converted").eval()
    assert_same_features(model, converted, random_images(40, 40))
    reread = weights.read(tmp_path / "converted")
    assert (reread.config, reread.preprocessing) == (checkpoint.config, checkpoint.preprocessing)


@pytest.mark.parametrize("changes", [{}, GATED], ids=["GELU", "SwiGLU"])
def test_conversion_to_timm_and_back_preserves_every_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = make_dinov3(tmp_path / "reference", **changes)
    checkpoint = weights.read(tmp_path / "reference")
    weights.write(checkpoint, tmp_path / "timm", to="timm")
    converted = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    x = random_images(32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(converted(x), reference(x).pooler_output, atol=1e-4, rtol=0)
    weights.write(weights.read(tmp_path / "timm"), tmp_path / "back", to="transformers")
    assert identical(weights.read(tmp_path / "back").state, checkpoint.state)


def test_preprocessing_is_that_of_the_image_processor(tmp_path: Path) -> None:
    make_dinov3(tmp_path / "reference")
    transformers.DINOv3ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "reference")
    checkpoint = weights.read(tmp_path / "reference")
    assert checkpoint.preprocessing.mean == (0.485, 0.456, 0.406)
    assert checkpoint.preprocessing.std == (0.229, 0.224, 0.225)
    assert (checkpoint.preprocessing.crop, checkpoint.preprocessing.interpolation) == (1.0, "bilinear")


def test_tensors_saved_from_memory_without_config_are_read(tmp_path: Path) -> None:
    reference = make_dinov3(tmp_path / "reference", **GATED)
    torch.save(reference.state_dict(), tmp_path / "bare.pt")
    checkpoint = weights.read(tmp_path / "bare.pt", CheckpointOptions(heads=4))
    assert_same_features(checkpoint.build(), reference, random_images(32, 32))
    assert "square images of 224×224 (--image-size)" in checkpoint.notes[-1]


def test_gated_mlp_with_another_activation_is_refused(tmp_path: Path) -> None:
    make_dinov3(tmp_path / "reference", use_gated_mlp=True)  # hidden_act gelu
    with pytest.raises(VitralError, match="gated MLP with activation gelu"):
        weights.read(tmp_path / "reference")


def test_classifier_cannot_be_written(tmp_path: Path) -> None:
    make_dinov3(tmp_path / "reference")
    checkpoint = weights.read(tmp_path / "reference")
    checkpoint.headless = False
    with pytest.raises(VitralError, match="transformers cannot represent this model: its DINOv3 has no classifier"):
        weights.write(checkpoint, tmp_path / "converted", to="transformers")


def test_missing_tensor_is_named_as_transformers_calls_it(tmp_path: Path) -> None:
    make_dinov3(tmp_path / "reference")
    tensors = load_file(tmp_path / "reference" / "model.safetensors")
    del tensors["layer.1.norm2.weight"]
    save_file(tensors, tmp_path / "reference" / "model.safetensors")
    with pytest.raises(VitralError, match=r"layer\.1\.norm2\.weight"):
        weights.read(tmp_path / "reference")
