"""Models with random weights, one of every kind that the explorer's engine supports."""

from __future__ import annotations

from dataclasses import replace

import torch

from vitral.models.variants import VARIANTS
from vitral.models.variants.hybrid import ConvStemConfig, HybridConfig
from vitral.models.vit import ViT, ViTConfig

PLAIN = ViTConfig(
    image_size=(24, 24), patch_size=8, channels=1, num_classes=5, width=24, depth=3, heads=3, mlp_width=40
)
STEM = ConvStemConfig(widths=(8, 16, 24), strides=(1, 2, 2), same_padding=False)
HYBRID = HybridConfig(
    image_size=(32, 32), patch_size=4, num_classes=5, width=24, depth=2, heads=3, pooling="mean",
    positions="learned+rotary", qk_norm=True, activation="gelu_tanh",
    conv=STEM,
)  # fmt: skip
CONFIGS: dict[str, ViTConfig] = {
    "plain": PLAIN,
    "rotary": replace(PLAIN, positions="learned+rotary", qk_norm=True, registers=2, layer_scale=0.3),
    "mean": replace(PLAIN, pooling="mean", positions="sincos", activation="swiglu", head="mlp", channels=3),
    "clip": replace(
        PLAIN, pre_norm=True, activation="quick_gelu", key_bias=False, registers=1, register_positions=True
    ),
    "unusual": replace(
        PLAIN, image_size=(16, 40), pooling="mean", class_token=True, positions="rotary", final_norm=False,
        activation="relu", qkv_bias=False,
    ),
    "hybrid": HYBRID,
    "hybrid-same": replace(HYBRID, conv=replace(STEM, same_padding=True), pooling="class"),
}  # fmt: skip


def random_model(config: ViTConfig) -> ViT:
    """Random weights of a size that makes every part of the model matter."""
    torch.manual_seed(0)
    model = VARIANTS["hybrid" if isinstance(config, HybridConfig) else "plain"](config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name and name.endswith("weight") else 0.0, std=0.3)
    return model


def random_image(config: ViTConfig) -> torch.Tensor:
    return torch.randn(config.channels, *config.image_size, generator=torch.Generator().manual_seed(1))
