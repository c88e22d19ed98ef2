"""One tiny model of every kind of ViT, with attention and logits that differ between images."""

from __future__ import annotations

from typing import Any

import torch

from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.inference.predictor import Predictor
from vitral.models.variants import VARIANTS, variant_name
from vitral.models.variants.hybrid import ConvStemConfig, HybridConfig
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig

TINY: dict[str, Any] = {"image_size": (8, 12), "patch_size": 4, "num_classes": 5, "width": 16, "depth": 2, "heads": 2}
DINOV3: dict[str, Any] = {
    "positions": "rotary", "rope": "centered", "registers": 2, "activation": "swiglu", "mlp_width": 24,
    "key_bias": False, "layer_scale": 0.5, "pooling": "mean", "class_token": True,
}  # fmt: skip
KINDS: dict[str, tuple[str, ViTConfig]] = {  # name -> variant and configuration
    "class": ("plain", ViTConfig(**TINY)),
    "mean, rotary": ("plain", ViTConfig(**TINY, pooling="mean", positions="rotary")),
    "attention pooling, sincos": ("plain", ViTConfig(**TINY, pooling="attention", positions="sincos")),
    "registers, one channel": ("plain", ViTConfig(**TINY, registers=3, channels=1, qk_norm=True, layer_scale=0.5)),
    "registers, mean": ("plain", ViTConfig(**TINY, registers=2, pooling="mean", positions="learned+rotary")),
    "CLIP": ("plain", ViTConfig(**TINY, pre_norm=True, activation="quick_gelu", final_norm=False)),
    "DINOv3": ("plain", ViTConfig(**TINY | DINOV3)),
    "distilled": ("distilled", ViTConfig(**TINY)),
    "late norm": ("late-norm", ViTConfig(**TINY, pooling="mean")),
    "patch norm": ("patch-norm", ViTConfig(**TINY, positions="none")),
    "class and mean": ("class-and-mean", ViTConfig(**TINY, registers=1)),
    "hybrid": ("hybrid", HybridConfig(**TINY, conv=ConvStemConfig(widths=(8,), strides=(2,)))),
}


def random_model(variant: str, config: ViTConfig) -> ViT:
    """A model whose attention and logits are far from uniform, unlike those of a newly initialised one."""
    torch.manual_seed(0)
    model = VARIANTS[variant](config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "head" in name or name.endswith("table"):
                parameter.normal_()
            elif "qkv" in name or ".kv" in name or "pooling.q" in name:
                parameter.mul_(4)
    return model


def model_config_of(model: ViT, classes: tuple[str, ...] = tuple("abcde")) -> ModelConfig:
    C = model.config.channels
    preprocessing = Preprocessing(image_size=model.config.image_size, channels=C, mean=(0.5,) * C, std=(0.5,) * C)
    return ModelConfig(
        architecture=model.config,
        preprocessing=preprocessing,
        classes=classes,
        trained_on="x",
        epoch=1,
        variant=variant_name(model),
    )


def predictor_for(model: ViT, hardware: Hardware) -> Predictor:
    return Predictor(model, model_config_of(model), hardware)
