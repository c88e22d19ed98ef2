"""Vision towers of CLIP, SigLIP and SigLIP 2: features of the reference, named leftovers, identical tensors."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from support.common import identical
from support.references import assert_same_logits, random_images, randomize_weights, transformers
from vitral import weights
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor
from vitral.models.vit import patchify
from vitral.recipes.checkpoint_options import CheckpointOptions

VISION: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 20,
}
NAFLEX = {name: value for name, value in VISION.items() if name != "image_size"} | {"num_patches": 16}
SIZES = ((32, 32), (48, 48), (24, 56))


def make_tower(family: str) -> Any:
    if family == "siglip2":
        return randomize_weights(transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**NAFLEX)))
    prefix = {"clip": "CLIP", "siglip": "Siglip"}[family]
    config = getattr(transformers, f"{prefix}VisionConfig")(**VISION)
    return randomize_weights(getattr(transformers, f"{prefix}VisionModel")(config))


@torch.inference_mode()
def reference_features(model: Any, images: Tensor) -> Tensor:
    if "Siglip2" not in type(model).__name__:
        return model(images, interpolate_pos_encoding=True).pooler_output
    B, _, H, W = images.shape
    patches = patchify(images, 8).unflatten(-1, (3, 8, 8)).permute(0, 1, 3, 4, 2).flatten(2)  # channels last
    shapes = torch.tensor([[H // 8, W // 8]] * B)
    mask = torch.ones(B, patches.shape[1], dtype=torch.long)
    return model(patches, pixel_attention_mask=mask, spatial_shapes=shapes).pooler_output


def assert_same_features(checkpoint: weights.Checkpoint, reference: Any) -> None:
    model = checkpoint.build()
    for height, width in SIZES:
        x = random_images(height, width)
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # positions are resampled
            torch.testing.assert_close(model.features(x), reference_features(reference, x), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["clip", "siglip", "siglip2"])
def test_features_agree_and_tensors_survive_a_round_trip(family: str, tmp_path: Path) -> None:
    reference = make_tower(family)
    reference.save_pretrained(tmp_path / "reference")
    checkpoint = weights.read(tmp_path / "reference")
    assert checkpoint.headless
    assert checkpoint.config.activation == ("quick_gelu" if family == "clip" else "gelu_tanh")
    assert_same_features(checkpoint, reference)
    weights.write(checkpoint, tmp_path / "converted", to="transformers")
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("reference", "converted")]
    assert identical(*files)
    converted = type(reference).from_pretrained(tmp_path / "converted").eval()
    assert identical(converted.state_dict(), reference.state_dict())
    reread = weights.read(tmp_path / "converted")
    assert (reread.config, reread.preprocessing) == (checkpoint.config, checkpoint.preprocessing)
    weights.write(checkpoint, tmp_path / "vitral", to="vitral")
    assert identical(weights.read(tmp_path / "vitral").state, checkpoint.state)


def test_tower_inside_a_model_with_text_is_read_and_the_rest_is_named(tmp_path: Path) -> None:
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=24)
    reference = randomize_weights(transformers.CLIPModel(config))
    reference.save_pretrained(tmp_path / "clip")
    checkpoint = weights.read(tmp_path / "clip")
    assert_same_features(checkpoint, reference.vision_model)
    notes = "\n".join(checkpoint.notes)
    assert "the text tower is not needed: ignored text_model.embeddings" in notes
    assert "the projection to the space of images and texts is not needed: ignored visual_projection.weight" in notes
    assert "ignored logit_scale" in notes
    siglip = randomize_weights(
        transformers.SiglipModel(transformers.SiglipConfig(text_config=TEXT, vision_config=VISION))
    )
    siglip.save_pretrained(tmp_path / "siglip")
    assert_same_features(weights.read(tmp_path / "siglip"), siglip.vision_model)


def test_values_missing_in_an_old_vision_config_are_those_of_transformers(tmp_path: Path) -> None:
    reference = make_tower("clip")
    reference.save_pretrained(tmp_path / "old")
    stored = json.loads((tmp_path / "old" / "config.json").read_text())
    vision = {"num_attention_heads": 4, "model_type": "clip_vision_model", "image_size": stored["image_size"]}
    (tmp_path / "old" / "config.json").write_text(json.dumps({"model_type": "clip", "vision_config": vision}))
    checkpoint = weights.read(tmp_path / "old")
    assert (checkpoint.config.activation, checkpoint.config.norm_eps) == ("quick_gelu", 1e-5)
    assert_same_features(checkpoint, reference)


def test_state_dict_without_a_config_is_recognised(tmp_path: Path) -> None:
    for family in ("clip", "siglip"):
        reference = make_tower(family)
        torch.save(reference.state_dict(), tmp_path / f"{family}.pt")
        checkpoint = weights.read(tmp_path / f"{family}.pt", CheckpointOptions(heads=4))
        assert_same_features(checkpoint, reference)
        expected = 0.48145466 if family == "clip" else 0.5
        assert checkpoint.preprocessing.mean[0] == expected
        assert checkpoint.preprocessing.interpolation == "bicubic"


@pytest.mark.parametrize("family", ["CLIP", "Siglip"])
def test_classifiers_of_transformers_pool_the_mean(family: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{family}Config")(text_config=TEXT, vision_config=VISION, num_labels=5)
    reference = randomize_weights(getattr(transformers, f"{family}ForImageClassification")(config))
    reference.save_pretrained(tmp_path / "reference")
    checkpoint = weights.read(tmp_path / "reference")
    assert not checkpoint.headless
    assert checkpoint.config.pooling == "mean"
    assert any("the classifier does not use" in note for note in checkpoint.notes)
    assert_same_logits(checkpoint.build(), reference, random_images(32, 32))


def test_preprocessing_is_read(tmp_path: Path) -> None:
    make_tower("clip").save_pretrained(tmp_path / "clip")
    processor = {
        "crop_size": {"height": 32, "width": 32},
        "do_center_crop": True,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
        "resample": 3,
        "size": {"shortest_edge": 36},
    }
    (tmp_path / "clip" / "preprocessor_config.json").write_text(json.dumps(processor))
    preprocessing = weights.read(tmp_path / "clip").preprocessing
    assert (preprocessing.mean, preprocessing.interpolation) == ((0.1, 0.2, 0.3), "bicubic")
    assert preprocessing.crop == pytest.approx(32 / 36)


def test_naflex_keeps_the_aspect_ratio_of_each_image(tmp_path: Path) -> None:
    reference = make_tower("siglip2")
    reference.save_pretrained(tmp_path / "naflex")
    noise = torch.randint(0, 256, (3, 16, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(noise.permute(1, 2, 0).numpy()).save(tmp_path / "wide.png")  # 2 by 8 patches, the most allowed
    predictor = Predictor.load(tmp_path / "naflex", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # positions are resampled
        _, features, _ = predictor.embed_files([tmp_path / "wide.png"])
    pixels = weights.read(tmp_path / "naflex").preprocessing.normalise(noise[None])
    torch.testing.assert_close(features, reference_features(reference, pixels), atol=1e-4, rtol=0)


def test_other_members_of_the_family_are_refused(tmp_path: Path) -> None:
    make_tower("clip").save_pretrained(tmp_path / "clip")
    path = tmp_path / "clip" / "config.json"
    stored = json.loads(path.read_text())
    for change, reason in (
        ({"model_type": "owlvit"}, "model_type owlvit"),
        ({"hidden_act": "silu"}, "activation silu"),
    ):
        path.write_text(json.dumps(stored | change))
        with pytest.raises(VitralError, match=reason):
            weights.read(tmp_path / "clip")
