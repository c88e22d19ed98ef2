"""transformers models converted to vitral and converted have the same logits and identical tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from support.common import identical
from support.references import (
    as_checkpoint,
    assert_same_logits,
    random_images,
    randomize_weights,
    transformers,
)
from vitral import weights
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.checkpoint_options import CheckpointOptions
from vitral.runs.model_io import ModelConfig

SMALL: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_labels": 7,
}
TINY: dict[str, Any] = {
    "image_size": 224,
    "patch_size": 16,
    "hidden_size": 192,
    "num_hidden_layers": 12,
    "num_attention_heads": 3,
    "intermediate_size": 768,
}
MLP = {"intermediate_size": 80}
TEACHER, STUDENT = "DeiTForImageClassificationWithTeacher", "DeiTForImageClassification"
DINO, DINO_REG = "Dinov2ForImageClassification", "Dinov2WithRegistersForImageClassification"
# name → class, changes, vitral's variant, whether the tensors are identical after a round trip
KINDS: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "vit": ("ViTForImageClassification", MLP, "plain", True),
    "vit, one block": ("ViTForImageClassification", {**MLP, "num_hidden_layers": 1}, "plain", True),
    "vit, not square": ("ViTForImageClassification", {**MLP, "image_size": [24, 40]}, "plain", True),
    "vit, one channel": ("ViTForImageClassification", {**MLP, "num_channels": 1}, "plain", True),
    "vit, no bias in qkv": ("ViTForImageClassification", {**MLP, "qkv_bias": False}, "plain", True),
    "vit, tanh": ("ViTForImageClassification", {**MLP, "hidden_act": "gelu_pytorch_tanh"}, "plain", True),
    "vit, another eps": ("ViTForImageClassification", {**MLP, "layer_norm_eps": 1e-3}, "plain", True),
    "vit, Ti/16": ("ViTForImageClassification", TINY, "plain", True),
    "deit, two heads": (TEACHER, MLP, "distilled", True),
    "deit, one head": (STUDENT, MLP, "plain", False),
    "msn": ("ViTMSNForImageClassification", MLP, "plain", False),  # written as the equivalent ViT
    "i-jepa": ("IJepaForImageClassification", MLP, "plain", True),
    "i-jepa, not square": ("IJepaForImageClassification", {**MLP, "image_size": [24, 40]}, "plain", True),
    "dinov2": (DINO, {}, "class-and-mean", True),
    "dinov2, registers": (DINO_REG, {"num_register_tokens": 3}, "class-and-mean", True),
    "dinov2, SwiGLU": (DINO, {"use_swiglu_ffn": True}, "class-and-mean", True),
    "dinov2, SwiGLU, registers": (DINO_REG, {"use_swiglu_ffn": True, "mlp_ratio": 5}, "class-and-mean", True),
    "dinov2, one block": (DINO, {"num_hidden_layers": 1}, "class-and-mean", True),  # its own code needs square images
}


def make_model(kind: str, changes: dict[str, Any]) -> Any:
    for ending in ("ForImageClassificationWithTeacher", "ForImageClassification", "Model"):
        if kind.endswith(ending):
            config = getattr(transformers, f"{kind.removesuffix(ending)}Config")(**SMALL | changes)
            return randomize_weights(getattr(transformers, kind)(config))
    raise AssertionError(kind)


def without_mask_token(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "mask_token" not in name}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * kind.endswith("Ti/16")) for kind in KINDS]
)
def test_round_trip_preserves_logits_and_tensors(kind: str, tmp_path: Path) -> None:
    name, changes, variant, exact = KINDS[kind]
    reference = make_model(name, changes)
    reference.save_pretrained(tmp_path / "reference")
    checkpoint = weights.read(tmp_path / "reference")
    size = changes.get("image_size", 32)
    height, width = size if isinstance(size, list) else (size, size)
    x = random_images(height, width, channels=changes.get("num_channels", 3))
    assert checkpoint.variant == variant
    assert f"heads: {(SMALL | changes)['num_attention_heads']}, from config.json" in checkpoint.notes
    assert_same_logits(checkpoint.build(), reference, x)
    weights.write(checkpoint, tmp_path / "converted", to="transformers")
    converted = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "converted").eval()
    if name == TEACHER:  # AutoModel selects the class with one head
        converted = transformers.DeiTForImageClassificationWithTeacher.from_pretrained(tmp_path / "converted").eval()
    assert_same_logits(converted, reference, x)
    if exact:
        files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("reference", "converted")]
        assert identical(*map(without_mask_token, files))
    reread = weights.read(tmp_path / "converted")
    assert identical(reread.state, checkpoint.state)
    assert (reread.config, reread.preprocessing) == (checkpoint.config, checkpoint.preprocessing)


@pytest.mark.parametrize(
    ("kind", "changes"), [("ViTModel", MLP), ("Dinov2Model", {}), ("Dinov2WithRegistersModel", {})]
)
def test_model_without_a_classifier_gives_features(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    reference = make_model(kind, changes)
    reference.save_pretrained(tmp_path / "reference")
    checkpoint = weights.read(tmp_path / "reference")
    x = random_images(32, 32)
    model: Any = checkpoint.build()
    assert checkpoint.headless
    with torch.inference_mode():
        pooled = model.features(x)
        if checkpoint.config.head == "mlp":  # ViT's pooler is the hidden layer
            pooled = model.head.hidden(pooled).tanh()
        torch.testing.assert_close(pooled, reference(x).pooler_output, atol=1e-4, rtol=0)
    weights.write(checkpoint, tmp_path / "converted", to="transformers")
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("reference", "converted")]
    assert identical(*map(without_mask_token, files))
    converted = transformers.AutoModel.from_pretrained(tmp_path / "converted").eval()
    with torch.inference_mode():
        torch.testing.assert_close(converted(x).pooler_output, reference(x).pooler_output, atol=1e-4, rtol=0)


def test_deit_without_a_classifier_gives_features(tmp_path: Path) -> None:
    reference = make_model("DeiTModel", MLP)
    reference.save_pretrained(tmp_path / "reference")
    checkpoint = weights.read(tmp_path / "reference")
    weights.write(checkpoint, tmp_path / "converted", to="transformers")
    converted = transformers.AutoModel.from_pretrained(tmp_path / "converted").eval()
    x = random_images(32, 32)
    with torch.inference_mode():
        expected = reference(x)
        torch.testing.assert_close(converted(x).pooler_output, expected.pooler_output, atol=1e-4, rtol=0)
        features = checkpoint.build().features(x)
        torch.testing.assert_close(features, expected.last_hidden_state[:, 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["ViTForImageClassification", DINO_REG])
def test_names_of_a_state_dict_in_memory_are_read(kind: str, tmp_path: Path) -> None:
    reference = make_model(kind, {})
    torch.save({"epoch": 3, "state_dict": reference.state_dict()}, tmp_path / "memory.pth")
    checkpoint = weights.read(tmp_path / "memory.pth", CheckpointOptions(heads=4))
    x = random_images(32, 32)
    assert_same_logits(checkpoint.build(), reference, x)
    notes = "\n".join(checkpoint.notes)
    assert "norm eps 1e-" in notes[notes.index("assumed: ") :]
    assert "used 'state_dict'" in notes


def test_sharded_weights_are_merged(tmp_path: Path) -> None:
    reference = make_model("ViTForImageClassification", MLP)
    reference.save_pretrained(tmp_path / "reference", max_shard_size="40KB")
    assert (tmp_path / "reference" / "model.safetensors.index.json").is_file()
    x = random_images(32, 32)
    model = weights.read(tmp_path / "reference").build()
    assert_same_logits(model, reference, x)
    next((tmp_path / "reference").glob("model-*.safetensors")).unlink()
    with pytest.raises(VitralError, match=r"model-.* is missing"):
        weights.read(tmp_path / "reference")


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"size": {"height": 32, "width": 32}, "resample": 2}, ((32, 32), 1.0, "bilinear")),
        ({"size": 32, "resample": 3}, ((32, 32), 1.0, "bicubic")),
        (
            {
                "size": {"shortest_edge": 40},
                "resample": 3,
                "do_center_crop": True,
                "crop_size": {"height": 32, "width": 32},
            },
            ((32, 32), 0.8, "bicubic"),
        ),
        ({"size": 36, "resample": 3, "do_center_crop": True, "crop_size": 32}, ((32, 32), 32 / 36, "bicubic")),
    ],
)
def test_preprocessing_is_read(stored: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path) -> None:
    make_model("ViTForImageClassification", MLP).save_pretrained(tmp_path / "reference")
    stored |= {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "reference" / "preprocessor_config.json").write_text(json.dumps(stored))
    preprocessing = weights.read(tmp_path / "reference").preprocessing
    assert (preprocessing.image_size, preprocessing.crop, preprocessing.interpolation) == expected
    assert (preprocessing.mean, preprocessing.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def test_written_preprocessing_gives_the_same_pixels_in_transformers(tmp_path: Path) -> None:
    make_model("ViTForImageClassification", MLP).save_pretrained(tmp_path / "reference")
    checkpoint = weights.read(tmp_path / "reference")
    noise = torch.randint(0, 256, (50, 70, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image = Image.fromarray(noise.numpy()).resize((140, 100), Image.Resampling.BICUBIC)
    weights.write(checkpoint, tmp_path / "converted", to="transformers")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "converted", use_fast=False)
    reference = processor(images=image, return_tensors="pt")["pixel_values"]
    pixels = checkpoint.preprocessing.normalise(checkpoint.preprocessing.resize_and_crop(image)[None])
    assert (reference - pixels).abs().mean() < 0.01


def test_square_resizing_of_transformers_is_stretching(tmp_path: Path) -> None:
    make_model("ViTForImageClassification", MLP).save_pretrained(tmp_path / "reference")
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    processor.save_pretrained(tmp_path / "reference")
    checkpoint = weights.read(tmp_path / "reference")
    assert checkpoint.preprocessing.resize == "stretch"
    noise = torch.randint(0, 256, (50, 70, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image = Image.fromarray(noise.numpy()).resize((140, 100), Image.Resampling.BICUBIC)
    expected = processor(images=image, return_tensors="pt")["pixel_values"]
    pixels = checkpoint.preprocessing.normalise(checkpoint.preprocessing.resize_and_crop(image)[None])
    assert (expected - pixels).abs().max() < 0.02
    weights.write(checkpoint, tmp_path / "converted", to="transformers")
    assert weights.read(tmp_path / "converted").preprocessing == checkpoint.preprocessing


def test_class_names_are_preserved(tmp_path: Path) -> None:
    names = {k: f"name {k}" for k in range(7)}
    reference = make_model(
        "ViTForImageClassification", {**MLP, "id2label": names, "label2id": {v: k for k, v in names.items()}}
    )
    reference.save_pretrained(tmp_path / "reference")
    checkpoint = weights.read(tmp_path / "reference")
    assert checkpoint.classes == tuple(names.values())
    weights.write(checkpoint, tmp_path / "converted", to="transformers")
    assert weights.read(tmp_path / "converted").classes == checkpoint.classes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "swinv2"}, "windowed attention, relative positions and post-norm"),
        ({"model_type": "beit"}, "relative positions"),
        ({"hidden_act": "selu"}, "activation selu"),
        ({"num_attention_heads": 5}, "width must be a multiple of 5"),
        ({"image_size": "large"}, "cannot interpret"),
    ],
)
def test_unsupported_config_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    make_model("ViTForImageClassification", MLP).save_pretrained(tmp_path / "reference")
    config = json.loads((tmp_path / "reference" / "config.json").read_text())
    (tmp_path / "reference" / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(VitralError, match=reason):
        weights.read(tmp_path / "reference")


def test_dinov2_giant_saved_from_memory_is_read(tmp_path: Path) -> None:
    reference = make_model("Dinov2Model", {"use_swiglu_ffn": True})
    torch.save(reference.state_dict(), tmp_path / "giant.pt")
    checkpoint = weights.read(tmp_path / "giant.pt", CheckpointOptions(heads=4))
    assert checkpoint.config.activation == "swiglu"
    x = random_images(32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(checkpoint.build().features(x), reference(x).pooler_output, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"registers": 3}, "Dinov2WithRegistersForImageClassification"),
        ({"layer_scale": 0.5}, "Dinov2ForImageClassification"),
        ({"layer_scale": 0.5, "mlp_width": 80}, "ViTForImageClassification"),
        ({"registers": 1}, "DeiTForImageClassification"),
        ({"positions": "sincos"}, "ViTForImageClassification"),
        ({"positions": "none"}, "ViTForImageClassification"),
        ({"pooling": "mean"}, "IJepaForImageClassification"),
    ],
)
def test_vitral_model_is_written_as_the_equivalent_class(changes: dict[str, Any], kind: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "image_size": (32, 32),
        "patch_size": 8,
        "width": 48,
        "depth": 3,
        "heads": 4,
        "num_classes": 7,
    }
    model = randomize_weights(ViT(ViTConfig(**sizes | {"num_classes": 7} | changes)))
    preprocessing = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    names = tuple("abcdefg")
    model_config = ModelConfig(
        architecture=model.config, preprocessing=preprocessing, classes=names, trained_on="a test", epoch=1
    )
    weights.write((model, model_config), tmp_path / "reference", to="transformers")
    reference = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "reference").eval()
    x = random_images(32, 32)
    assert type(reference).__name__ == kind
    assert [reference.config.id2label[k] for k in range(7)] == list(names)
    assert_same_logits(reference, model, x)
    converted = weights.read(tmp_path / "reference").build()
    assert_same_logits(converted, model, x)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pooling": "attention"}, "has no classifier"),
        ({"pooling": "mean", "registers": 1}, "1 registers"),
        ({"head": "mlp"}, "a hidden layer in the head"),
        ({"registers": 3, "mlp_width": 80}, "integer ratio"),
    ],
)
def test_unsupported_feature_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "image_size": (32, 32),
        "patch_size": 8,
        "width": 48,
        "depth": 3,
        "heads": 4,
        "num_classes": 7,
    }
    model = ViT(ViTConfig(**sizes | {"num_classes": 7} | changes))
    with pytest.raises(VitralError, match=reason):
        weights.write(as_checkpoint(model), tmp_path / "reference", to="transformers")
