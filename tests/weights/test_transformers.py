"""transformers' ViT, DeiT and DINOv2, to vitral and back: the same logits, the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from support.common import identical
from support.references import answers, lively, ours, pictures, transformers
from vitral import weights
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.run import ModelCard

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
# name → class, changes, vitral's variant, whether the tensors come back bit for bit
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
    "dinov2": (DINO, {}, "class-and-mean", True),
    "dinov2, registers": (DINO_REG, {"num_register_tokens": 3}, "class-and-mean", True),
    "dinov2, one block": (DINO, {"num_hidden_layers": 1}, "class-and-mean", True),  # its own code wants squares
}


def made(kind: str, changes: dict[str, Any]) -> Any:
    for ending in ("ForImageClassificationWithTeacher", "ForImageClassification", "Model"):
        if kind.endswith(ending):
            config = getattr(transformers, f"{kind.removesuffix(ending)}Config")(**SMALL | changes)
            return lively(getattr(transformers, kind)(config))
    raise AssertionError(kind)


def unmasked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "mask_token" not in name}


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_and_vitral_give_the_same_logits_both_ways(kind: str, tmp_path: Path) -> None:
    name, changes, variant, exact = KINDS[kind]
    theirs = made(name, changes)
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint = weights.read(tmp_path / "theirs")
    size = changes.get("image_size", 32)
    x = pictures(*(size if isinstance(size, list) else (size, size)), channels=changes.get("num_channels", 3))
    assert checkpoint.variant == variant
    assert f"heads: {(SMALL | changes)['num_attention_heads']}, from config.json" in checkpoint.notes
    torch.testing.assert_close(answers(checkpoint.build(), x), answers(theirs, x), atol=1e-4, rtol=0)
    weights.write(checkpoint, tmp_path / "back", to="transformers")
    back = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "back").eval()
    if name == TEACHER:  # Auto… takes the class with one head
        back = transformers.DeiTForImageClassificationWithTeacher.from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(answers(back, x), answers(theirs, x), atol=1e-4, rtol=0)
    if exact:
        files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back")]
        assert identical(*map(unmasked, files))
    again = weights.read(tmp_path / "back")
    assert identical(again.state, checkpoint.state)
    assert (again.config, again.preprocessing) == (checkpoint.config, checkpoint.preprocessing)


@pytest.mark.parametrize(
    ("kind", "changes"), [("ViTModel", MLP), ("Dinov2Model", {}), ("Dinov2WithRegistersModel", {})]
)
def test_a_model_without_a_classifier_gives_its_features(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = made(kind, changes)
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint = weights.read(tmp_path / "theirs")
    x = pictures(32, 32)
    model: Any = checkpoint.build()
    assert checkpoint.headless
    with torch.inference_mode():
        pooled = model.features(x)
        if checkpoint.config.head == "mlp":  # ViT's pooler is the hidden layer
            pooled = model.head.hidden(pooled).tanh()
        torch.testing.assert_close(pooled, theirs(x).pooler_output, atol=1e-4, rtol=0)
    weights.write(checkpoint, tmp_path / "back", to="transformers")
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back")]
    assert identical(*map(unmasked, files))
    back = transformers.AutoModel.from_pretrained(tmp_path / "back").eval()
    with torch.inference_mode():
        torch.testing.assert_close(back(x).pooler_output, theirs(x).pooler_output, atol=1e-4, rtol=0)


def test_a_deit_without_a_classifier_gives_its_features(tmp_path: Path) -> None:
    theirs = made("DeiTModel", MLP)
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint = weights.read(tmp_path / "theirs")
    weights.write(checkpoint, tmp_path / "back", to="transformers")
    back = transformers.AutoModel.from_pretrained(tmp_path / "back").eval()
    x = pictures(32, 32)
    with torch.inference_mode():
        expected = theirs(x)
        torch.testing.assert_close(back(x).pooler_output, expected.pooler_output, atol=1e-4, rtol=0)
        features = checkpoint.build().features(x)
        torch.testing.assert_close(features, expected.last_hidden_state[:, 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["ViTForImageClassification", DINO_REG])
def test_the_names_that_a_model_has_in_memory_are_read_too(kind: str, tmp_path: Path) -> None:
    theirs = made(kind, {})
    torch.save({"epoch": 3, "state_dict": theirs.state_dict()}, tmp_path / "memory.pth")
    checkpoint = weights.read(tmp_path / "memory.pth", heads=4)
    x = pictures(32, 32)
    torch.testing.assert_close(answers(checkpoint.build(), x), answers(theirs, x), atol=1e-4, rtol=0)
    said = "\n".join(checkpoint.notes)
    assert "no config.json" in said
    assert "taken from 'state_dict'" in said


def test_sharded_weights_are_put_together(tmp_path: Path) -> None:
    theirs = made("ViTForImageClassification", MLP)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    x = pictures(32, 32)
    model = weights.read(tmp_path / "theirs").build()
    torch.testing.assert_close(answers(model, x), answers(theirs, x), atol=1e-4, rtol=0)
    next((tmp_path / "theirs").glob("model-*.safetensors")).unlink()
    with pytest.raises(VitralError, match=r"model-.* is missing"):
        weights.read(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("said", "expected"),
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
def test_preprocessing_is_read_as_transformers_writes_it(
    said: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path
) -> None:
    made("ViTForImageClassification", MLP).save_pretrained(tmp_path / "theirs")
    said |= {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "theirs" / "preprocessor_config.json").write_text(json.dumps(said))
    read = weights.read(tmp_path / "theirs").preprocessing
    assert (read.image_size, read.crop, read.interpolation) == expected
    assert (read.mean, read.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def test_the_written_preprocessing_gives_the_same_pixels_in_transformers(tmp_path: Path) -> None:
    made("ViTForImageClassification", MLP).save_pretrained(tmp_path / "theirs")
    checkpoint = weights.read(tmp_path / "theirs")
    noise = torch.randint(0, 256, (50, 70, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    picture = Image.fromarray(noise.numpy()).resize((140, 100), Image.Resampling.BICUBIC)
    weights.write(checkpoint, tmp_path / "back", to="transformers")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "back", use_fast=False)
    theirs = processor(images=picture, return_tensors="pt")["pixel_values"]
    pixels = checkpoint.preprocessing.normalise(checkpoint.preprocessing.pixels(picture)[None])
    assert (theirs - pixels).abs().mean() < 0.01


def test_class_names_travel(tmp_path: Path) -> None:
    names = {k: f"kind {k}" for k in range(7)}
    theirs = made("ViTForImageClassification", {**MLP, "id2label": names, "label2id": {v: k for k, v in names.items()}})
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint = weights.read(tmp_path / "theirs")
    assert checkpoint.classes == tuple(names.values())
    weights.write(checkpoint, tmp_path / "back", to="transformers")
    assert weights.read(tmp_path / "back").classes == checkpoint.classes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "swinv2"}, "windowed attention, relative positions and post-norm"),
        ({"model_type": "beit"}, "relative positions"),
        ({"hidden_act": "quick_gelu"}, "activation is quick_gelu"),
        ({"use_swiglu_ffn": True}, "SwiGLU"),
        ({"num_attention_heads": 5}, "width must be a multiple of 5"),
        ({"image_size": "large"}, "cannot be understood"),
    ],
)
def test_what_config_json_says_and_vitral_has_not_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    made("ViTForImageClassification", MLP).save_pretrained(tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(VitralError, match=reason):
        weights.read(tmp_path / "theirs")


def test_dinov2s_swiglu_giant_is_refused(tmp_path: Path) -> None:
    made("Dinov2Model", {"use_swiglu_ffn": True}).save_pretrained(tmp_path / "theirs")
    with pytest.raises(VitralError, match="SwiGLU"):
        weights.read(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"registers": 3}, "Dinov2WithRegistersForImageClassification"),
        ({"layer_scale": 0.5}, "Dinov2ForImageClassification"),
        ({"layer_scale": 0.5, "mlp_width": 80}, "ViTForImageClassification"),
        ({"registers": 1}, "DeiTForImageClassification"),
        ({"positions": "sincos"}, "ViTForImageClassification"),
        ({"positions": "none"}, "ViTForImageClassification"),
    ],
)
def test_a_model_of_vitrals_own_becomes_the_one_that_computes_the_same(
    changes: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    small = {"image_size": (32, 32), "patch_size": 8, "width": 48, "depth": 3, "heads": 4, "classes": 7}
    model = lively(ViT(ViTConfig(**small | changes)))
    pixels = Preprocessing(image_size=(32, 32), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    names = tuple("abcdefg")
    card = ModelCard(architecture=model.config, preprocessing=pixels, classes=names, trained_on="a test", epoch=1)
    weights.write((model, card), tmp_path / "theirs", to="transformers")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "theirs").eval()
    x = pictures(32, 32)
    assert type(theirs).__name__ == kind
    assert [theirs.config.id2label[k] for k in range(7)] == list(names)
    torch.testing.assert_close(answers(theirs, x), answers(model, x), atol=1e-4, rtol=0)
    back = weights.read(tmp_path / "theirs").build()
    torch.testing.assert_close(answers(back, x), answers(model, x), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pooling": "mean"}, "no pooling 'mean'"),
        ({"head": "mlp"}, "no hidden layer in the head"),
        ({"registers": 3, "mlp_width": 80}, "a whole multiple of the width"),
    ],
)
def test_what_transformers_has_not_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    small = {"image_size": (32, 32), "patch_size": 8, "width": 48, "depth": 3, "heads": 4, "classes": 7}
    model = ViT(ViTConfig(**small | changes))
    with pytest.raises(VitralError, match=reason):
        weights.write(ours(model), tmp_path / "theirs", to="transformers")
