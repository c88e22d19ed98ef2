"""OpenCLIP's vision towers: features of a reference written after its source, named leftovers, identical tensors."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from support.references import VisionTransformer, random_images, randomize_weights
from vitral import weights
from vitral.errors import VitralError
from vitral.recipes.checkpoint_options import CheckpointOptions

WIDTH, HEADS = 48, 4


class ResBlock(nn.Module):
    def __init__(self, quick: bool) -> None:
        super().__init__()
        self.quick = quick
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 80), "c_proj": nn.Linear(80, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        h = self.mlp["c_fc"](self.ln_2(x))
        return x + self.mlp["c_proj"](h * torch.sigmoid(1.702 * h) if self.quick else F.gelu(h))


class Tower(nn.Module):
    """OpenCLIP's VisionTransformer; `forward` returns what it projects."""

    def __init__(self, quick: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, 8, 8, bias=False)
        self.class_embedding = nn.Parameter(torch.zeros(WIDTH))
        self.positional_embedding = nn.Parameter(torch.zeros(17, WIDTH))
        self.ln_pre, self.ln_post = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        blocks = nn.ModuleList(ResBlock(quick) for _ in range(2))
        self.transformer = nn.ModuleDict({"resblocks": blocks})
        self.proj = nn.Parameter(torch.zeros(WIDTH, 24))

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv1(images)
        grid = x.shape[2:]
        x = x.flatten(2).mT
        x = torch.cat([self.class_embedding.expand(x.shape[0], 1, -1), x], dim=1) + self.positions(grid)
        x = self.ln_pre(x)
        for block in self.transformer["resblocks"].children():
            x = block(x)
        return self.ln_post(x)[:, 0]

    def positions(self, grid: torch.Size) -> Tensor:
        """Resized as OpenCLIP does when it loads weights for another image size."""
        if grid == (4, 4):
            return self.positional_embedding
        image = self.positional_embedding[1:].view(1, 4, 4, -1).permute(0, 3, 1, 2)
        resized = F.interpolate(image, size=grid, mode="bicubic", antialias=True).flatten(2)[0].T
        return torch.cat([self.positional_embedding[:1], resized])


TEXT = {
    "positional_embedding": torch.zeros(8, 32),
    "text_projection": torch.zeros(32, 24),
    "logit_scale": torch.zeros(()),
    "token_embedding.weight": torch.zeros(20, 32),
    "transformer.resblocks.0.ln_1.weight": torch.zeros(32),
    "transformer.resblocks.0.attn.in_proj_weight": torch.zeros(96, 32),
    "ln_final.weight": torch.zeros(32),
}


def full_checkpoint(tower: Tower) -> dict[str, Tensor]:
    return {f"visual.{name}": tensor.clone() for name, tensor in tower.state_dict().items()} | TEXT


def assert_same_features(checkpoint: weights.Checkpoint, tower: nn.Module) -> None:
    model = checkpoint.build()
    for height, width in ((32, 32), (48, 48), (24, 56)):
        x = random_images(height, width)
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # positions are resampled
            torch.testing.assert_close(model.features(x), tower(x), atol=1e-4, rtol=0)


@pytest.mark.parametrize("quick", [False, True])
def test_full_checkpoint_gives_the_tower_and_names_the_rest(quick: bool, tmp_path: Path) -> None:
    tower = randomize_weights(Tower(quick))
    torch.save({"epoch": 1, "state_dict": full_checkpoint(tower)}, tmp_path / "clip.pt")
    options = CheckpointOptions(heads=HEADS, activation="quick_gelu" if quick else None)
    checkpoint = weights.read(tmp_path / "clip.pt", options)
    assert checkpoint.headless
    assert checkpoint.preprocessing.mean == (0.48145466, 0.4578275, 0.40821073)
    assert_same_features(checkpoint, tower)
    notes = "\n".join(checkpoint.notes)
    assert (
        "the text tower is not needed: ignored positional_embedding, text_projection, token_embedding.weight" in notes
    )
    assert "the projection to the space of images and texts is not needed: ignored visual.proj" in notes
    assert ("OpenAI's weights need quick_gelu (--activation)" in notes) is not quick
    weights.write(checkpoint, tmp_path / "tower.safetensors", to="open-clip")
    written, expected = load_file(tmp_path / "tower.safetensors"), full_checkpoint(tower)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())
    assert {name for name in expected if name.startswith("visual.")} - written.keys() == {"visual.proj"}
    again = weights.read(tmp_path / "tower.safetensors", options)
    assert again.config == checkpoint.config


def test_tower_saved_alone_is_read(tmp_path: Path) -> None:
    tower = randomize_weights(Tower())
    save_file(tower.state_dict(), tmp_path / "tower.safetensors")
    assert_same_features(weights.read(tmp_path / "tower.safetensors", CheckpointOptions(heads=HEADS)), tower)


def test_open_clip_config_states_heads_activation_and_preprocessing(tmp_path: Path) -> None:
    tower = randomize_weights(Tower(quick=True))
    save_file(full_checkpoint(tower), tmp_path / "open_clip_model.safetensors")
    vision = {"image_size": 32, "layers": 2, "width": WIDTH, "patch_size": 8, "head_width": WIDTH // HEADS}
    content: dict[str, Any] = {
        "model_cfg": {"embed_dim": 24, "quick_gelu": True, "vision_cfg": vision},
        "preprocess_cfg": {
            "mean": [0.1, 0.2, 0.3],
            "std": [0.4, 0.5, 0.6],
            "interpolation": "bilinear",
            "resize_mode": "squash",
        },
    }
    path = tmp_path / "open_clip_config.json"
    path.write_text(json.dumps(content))
    checkpoint = weights.read(tmp_path)
    assert_same_features(checkpoint, tower)
    assert (checkpoint.preprocessing.mean, checkpoint.preprocessing.interpolation) == ((0.1, 0.2, 0.3), "bilinear")
    assert checkpoint.preprocessing.resize == "stretch"
    content["model_cfg"]["vision_cfg"]["attentional_pool"] = True
    path.write_text(json.dumps(content))
    with pytest.raises(VitralError, match="sets attentional_pool to True"):
        weights.read(tmp_path)


def test_tower_from_timm_is_read_as_a_timm_model(tmp_path: Path) -> None:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": HEADS, "num_classes": 0}
    trunk = randomize_weights(VisionTransformer(**sizes, class_token=False, global_pool="map"))
    tensors = {f"visual.trunk.{name}": tensor for name, tensor in trunk.state_dict().items()}
    text = {"text.token_embedding.weight": torch.zeros(20, 32), "logit_bias": torch.zeros(())}
    save_file(tensors | text, tmp_path / "siglip.safetensors")
    checkpoint = weights.read(tmp_path / "siglip.safetensors", CheckpointOptions(heads=HEADS))
    assert checkpoint.config.pooling == "attention"
    assert checkpoint.preprocessing.mean == (0.5, 0.5, 0.5)
    assert any("ignored text.token_embedding.weight" in note for note in checkpoint.notes)
    x = random_images(32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(checkpoint.build().features(x), trunk(x), atol=1e-4, rtol=0)


@pytest.mark.parametrize("is_projection", [True, False])
def test_head_that_timm_makes_of_the_projection_is_not_a_classifier(is_projection: bool, tmp_path: Path) -> None:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "depth": 1, "num_heads": HEADS, "num_classes": 24}
    model = randomize_weights(VisionTransformer(**sizes, pre_norm=True, norm_layer=nn.LayerNorm))
    if is_projection:
        nn.init.zeros_(model.head.bias)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    config = {"architecture": "vit_base_patch32_clip_224", "model_args": {"num_heads": HEADS, "img_size": 32}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = weights.read(tmp_path)
    assert checkpoint.headless == is_projection
    note = "head is CLIP's projection to 24 values, not a classifier: ignored"
    assert (note in checkpoint.notes) == is_projection
