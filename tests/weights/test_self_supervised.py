"""MAE, I-JEPA and MSN encoders: the features of the reference at any size, and identical tensors after a round trip."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from support.common import identical
from support.references import VisionTransformer, assert_same_logits, random_images, randomize_weights, transformers
from vitral import weights
from vitral.recipes.checkpoint_options import CheckpointOptions

SMALL: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
}


def mae_features(model: Any, images: Tensor) -> Tensor:
    """The class token of all patches in their order: nothing is masked."""
    num_patches = images.shape[2] * images.shape[3] // 64
    noise = torch.arange(num_patches).expand(images.shape[0], -1).float()
    return model(images, noise=noise, interpolate_pos_encoding=True).last_hidden_state[:, 0]


def class_token(model: Any, images: Tensor) -> Tensor:
    return model(images, interpolate_pos_encoding=True).last_hidden_state[:, 0]


def mean_of_patches(model: Any, images: Tensor) -> Tensor:
    return model(images, interpolate_pos_encoding=True).last_hidden_state.mean(dim=1)


FAMILIES: dict[str, tuple[str, dict[str, Any], Callable[[Any, Tensor], Tensor]]] = {
    "mae": ("ViTMAE", {"mask_ratio": 0.0}, mae_features),
    "i-jepa": ("IJepa", {}, mean_of_patches),
    "msn": ("ViTMSN", {}, class_token),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_features_agree_and_tensors_survive_a_round_trip(family: str, tmp_path: Path) -> None:
    prefix, changes, features = FAMILIES[family]
    model_class, config_class = getattr(transformers, f"{prefix}Model"), getattr(transformers, f"{prefix}Config")
    reference = randomize_weights(model_class(config_class(**SMALL | changes)))
    reference.save_pretrained(tmp_path / "reference")
    checkpoint = weights.read(tmp_path / "reference")
    model = checkpoint.build()
    assert checkpoint.headless
    assert checkpoint.preprocessing.mean == (0.485, 0.456, 0.406)
    for height, width in ((32, 32), (48, 48), (24, 56)):
        x = random_images(height, width)
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # positions are resampled
            torch.testing.assert_close(model.features(x), features(reference, x), atol=1e-4, rtol=0)
    weights.write(checkpoint, tmp_path / "converted", to="transformers")
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("reference", "converted")]
    assert identical(*files)
    weights.write(checkpoint, tmp_path / "vitral", to="vitral")
    assert identical(weights.read(tmp_path / "vitral").state, checkpoint.state)


def test_decoder_of_mae_is_named_as_ignored(tmp_path: Path) -> None:
    decoder = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_intermediate_size": 32}
    config = transformers.ViTMAEConfig(**SMALL, **decoder, decoder_num_attention_heads=2, mask_ratio=0.0)
    reference = randomize_weights(transformers.ViTMAEForPreTraining(config))
    reference.save_pretrained(tmp_path / "reference")
    checkpoint = weights.read(tmp_path / "reference")
    note = next(note for note in checkpoint.notes if "decoder of MAE is not needed: ignored decoder." in note)
    assert " more" in note
    x = random_images(32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(checkpoint.build().features(x), mae_features(reference.vit, x), atol=1e-4, rtol=0)


def test_i_jepa_without_a_config_pools_the_mean(tmp_path: Path) -> None:
    reference = randomize_weights(transformers.IJepaModel(transformers.IJepaConfig(**SMALL)))
    torch.save(reference.state_dict(), tmp_path / "memory.pt")
    checkpoint = weights.read(tmp_path / "memory.pt", CheckpointOptions(heads=4))
    x = random_images(32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(checkpoint.build().features(x), mean_of_patches(reference, x), atol=1e-4, rtol=0)


def test_official_files_are_read(tmp_path: Path) -> None:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 0}
    jepa = randomize_weights(VisionTransformer(**sizes, class_token=False, global_pool="avg", fc_norm=False))
    names = {f"module.{name}": tensor for name, tensor in jepa.state_dict().items()}
    other = {name: torch.zeros_like(tensor) for name, tensor in names.items()}
    torch.save({"encoder": other, "predictor": other, "target_encoder": names}, tmp_path / "ijepa.pth.tar")
    checkpoint = weights.read(tmp_path / "ijepa.pth.tar", CheckpointOptions(heads=4))
    x = random_images(32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(checkpoint.build().features(x), jepa(x), atol=1e-4, rtol=0)
    mae = randomize_weights(VisionTransformer(**sizes))
    extra = {
        "mask_token": torch.zeros(1, 1, 32),
        "decoder_embed.weight": torch.zeros(32, 48),
        "decoder_pos_embed": torch.zeros(1, 17, 32),
        "decoder_blocks.0.norm1.weight": torch.zeros(32),
        "decoder_pred.weight": torch.zeros(192, 32),
    }
    torch.save({"model": mae.state_dict() | extra}, tmp_path / "mae_visualize.pth")
    checkpoint = weights.read(tmp_path / "mae_visualize.pth", CheckpointOptions(heads=4))
    assert any("the decoder of MAE is not needed: ignored decoder_embed.weight" in note for note in checkpoint.notes)
    model = checkpoint.build()
    model.head = torch.nn.Identity()
    assert_same_logits(model, mae, x)
    msn = mae.state_dict() | {"fc.fc1.weight": torch.zeros(8, 48), "fc.bn1.running_mean": torch.zeros(8)}
    torch.save({"target_encoder": {f"module.{k}": v for k, v in msn.items()}}, tmp_path / "msn.pth.tar")
    checkpoint = weights.read(tmp_path / "msn.pth.tar", CheckpointOptions(heads=4))
    assert any("the projection head of MSN is not needed: ignored fc.fc1.weight" in note for note in checkpoint.notes)
