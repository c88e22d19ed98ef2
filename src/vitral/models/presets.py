"""Model sizes of the papers by name: "B/16" → ViTConfig.

Ti and S are from DeiT (arXiv 2012.12877), B, L and H from the ViT paper (arXiv 2010.11929, table 1), g and G from
"Scaling Vision Transformers" (arXiv 2106.04560, table 2). DINOv2 is arXiv 2304.07193, DINOv3 arXiv 2508.10104. The
number after the slash is the patch size.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from vitral.errors import unknown_name_error
from vitral.models.vit import ViTConfig

ConfigT = TypeVar("ConfigT", bound=ViTConfig)

DINOV2: dict[str, Any] = {"patch_size": 14, "image_size": (518, 518), "layer_scale": 1e-5}
DINOV3: dict[str, Any] = {
    "patch_size": 16, "image_size": (256, 256), "layer_scale": 1e-5, "positions": "rotary", "rope": "centered",
    "registers": 4, "key_bias": False, "norm_eps": 1e-5,
}  # fmt: skip

PRESETS: dict[str, ViTConfig] = {
    "Ti/16": ViTConfig(patch_size=16, width=192, depth=12, heads=3),
    "S/32": ViTConfig(patch_size=32, width=384, depth=12, heads=6),
    "S/16": ViTConfig(patch_size=16, width=384, depth=12, heads=6),
    "B/32": ViTConfig(patch_size=32, width=768, depth=12, heads=12),
    "B/16": ViTConfig(patch_size=16, width=768, depth=12, heads=12),
    "B/8": ViTConfig(patch_size=8, width=768, depth=12, heads=12),
    "L/32": ViTConfig(patch_size=32, width=1024, depth=24, heads=16),
    "L/16": ViTConfig(patch_size=16, width=1024, depth=24, heads=16),
    "H/14": ViTConfig(patch_size=14, width=1280, depth=32, heads=16),
    "g/14": ViTConfig(patch_size=14, width=1408, depth=40, heads=16, mlp_width=6144),
    "G/14": ViTConfig(patch_size=14, width=1664, depth=48, heads=16, mlp_width=8192),
    # "Better plain ViT baselines for ImageNet-1k" (arXiv 2205.01580)
    "plain-S/16": ViTConfig(
        patch_size=16, width=384, depth=12, heads=6, pooling="mean", positions="sincos", head="mlp"
    ),
    "dinov2-S/14": ViTConfig(**DINOV2, width=384, depth=12, heads=6),
    "dinov2-B/14": ViTConfig(**DINOV2, width=768, depth=12, heads=12),
    "dinov2-L/14": ViTConfig(**DINOV2, width=1024, depth=24, heads=16),
    "dinov2-g/14": ViTConfig(**DINOV2, width=1536, depth=40, heads=24, activation="swiglu", mlp_width=4096),
    "dinov3-S/16": ViTConfig(**DINOV3, width=384, depth=12, heads=6),
    "dinov3-S+/16": ViTConfig(**DINOV3, width=384, depth=12, heads=6, activation="swiglu"),
    "dinov3-B/16": ViTConfig(**DINOV3, width=768, depth=12, heads=12),
    "dinov3-L/16": ViTConfig(**DINOV3, width=1024, depth=24, heads=16),
    "dinov3-H+/16": ViTConfig(**DINOV3, width=1280, depth=32, heads=20, activation="swiglu"),
    "dinov3-7B/16": ViTConfig(**DINOV3, width=4096, depth=40, heads=32, activation="swiglu", mlp_width=8192),
}

# Top-1 accuracy on the ImageNet validation set, as published, for comparison.
PUBLISHED_ACCURACY: dict[str, str] = {
    "Ti/16": "DeiT: 72.2% from scratch on ImageNet, 74.5% distilled",
    "S/16": "DeiT: 79.9% from scratch on ImageNet, 81.2% distilled",
    "B/32": "ViT: 73.38% from ImageNet, 81.28% from ImageNet-21k, at 384 px",
    "B/16": "ViT: 77.91% from ImageNet, 83.97% from ImageNet-21k, at 384 px; DeiT: 81.8%, distilled 83.4%",
    "L/32": "ViT: 71.16% from ImageNet, 80.99% from ImageNet-21k, at 384 px",
    "L/16": "ViT: 76.53% from ImageNet, 85.15% from ImageNet-21k, at 384 px",
    "H/14": "ViT: 85.13% from ImageNet-21k; 88.55% from JFT-300M",
    "plain-S/16": "76.5 / 78.5 / 80.0% after 90 / 150 / 300 epochs on ImageNet",
}


def preset(name: str, **overrides: Any) -> ViTConfig:
    """A preset with overrides: `preset("B/16", image_size=(384, 384), num_classes=10)`."""
    if name not in PRESETS:  # case only matters between g/14 and G/14
        name = next((candidate for candidate in PRESETS if candidate.lower() == name.lower()), name)
    if name not in PRESETS:
        raise unknown_name_error("preset", name, PRESETS)
    return with_overrides(PRESETS[name], overrides)


def with_overrides(config: ConfigT, overrides: dict[str, Any]) -> ConfigT:
    """A copy of a preset's configuration with fields replaced. Raises VitralError for unknown fields."""
    field_names = [field.name for field in fields(config)]
    for override in overrides:
        if override not in field_names:
            raise unknown_name_error(f"field of {type(config).__name__}", override, field_names)
    return replace(config, **overrides)
