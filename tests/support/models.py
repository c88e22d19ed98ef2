"""Small models with random weights, and images for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitral.data.decode import decode_image
from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware, select_hardware
from vitral.evaluation.comparison_images import ComparisonImages
from vitral.inference.predictor import Predictor
from vitral.models.calibration import Calibration
from vitral.models.conformal import ConformalSets
from vitral.models.lora import LoRALinear
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT, ViTConfig
from vitral.runs.model_io import ModelConfig, save_model

ANIMALS = ("ant", "bee", "cat", "dog", "eel", "fox")
SMALL_CONFIG: dict[str, Any] = {
    "image_size": (16, 24), "patch_size": 8, "num_classes": 5, "width": 32, "depth": 2, "heads": 2,
}  # fmt: skip
# Name -> variant and changes of SMALL_CONFIG. Together they use every option of the architecture.
MODEL_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "class": ("plain", {}),
    "mean, no positions": ("plain", {"pooling": "mean", "positions": "none"}),
    "attention pooling": ("plain", {"pooling": "attention", "positions": "sincos"}),
    "rotary, registers": ("plain", {"positions": "learned+rotary", "registers": 2}),
    "rotary, qk norm": ("plain", {"pooling": "mean", "positions": "rotary", "qk_norm": True}),
    "layer scale, tanh": ("plain", {"layer_scale": 0.3, "activation": "gelu_tanh", "head": "mlp", "qkv_bias": False}),
    "greyscale": ("plain", {"channels": 1}),
    "CLIP": ("plain", {"pre_norm": True, "activation": "quick_gelu", "registers": 1, "register_positions": True}),
    "DINOv3": (
        "plain",
        {"positions": "rotary", "rope": "centered", "registers": 2, "activation": "swiglu", "mlp_width": 48}
        | {"key_bias": False, "layer_scale": 0.3, "pooling": "mean", "class_token": True, "final_norm": False},
    ),
    "distilled": ("distilled", {}),
    "late norm": ("late-norm", {"pooling": "mean"}),
    "patch norm": ("patch-norm", {}),
    "class and mean": ("class-and-mean", {}),
}


def cpu_fp32() -> Hardware:
    return select_hardware(device="cpu", precision="fp32", compile="no")


@torch.no_grad()
def randomize_weights(model: ViT, seed: int = 0) -> ViT:
    """Random weights of a size at which every part of the model affects the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = parameter.shape[1] ** -0.5 if parameter.ndim == 2 else 0.3
        parameter.copy_(noise * scale + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    return model.eval()


def build_model(kind: str = "class", **overrides: Any) -> tuple[ViT, Preprocessing]:
    """A small model of MODEL_KINDS with random weights, and its preprocessing."""
    variant, changes = MODEL_KINDS[kind]
    config = ViTConfig(**SMALL_CONFIG | changes | overrides)
    C = config.channels
    mean, std = (0.4, 0.5, 0.6)[:C], (0.2, 0.3, 0.25)[:C]
    preprocessing = Preprocessing(image_size=(16, 24), channels=C, mean=mean, std=std)
    return randomize_weights(VARIANTS[variant](config)), preprocessing


def build_calibrated_model(kind: str = "class", **overrides: Any) -> tuple[ViT, ModelConfig]:
    """`build_model` with a ModelConfig: five animals, a bicubic crop and a calibration."""
    model, preprocessing = build_model(kind, **overrides)
    model_config = ModelConfig(
        architecture=model.config,
        preprocessing=replace(preprocessing, crop=0.9, interpolation="bicubic"),
        classes=ANIMALS[:5],
        trained_on="nothing",
        epoch=1,
        variant=MODEL_KINDS[kind][0],
        calibration=Calibration(
            temperature=1.7,
            ood_threshold=0.5,
            prediction_sets=ConformalSets(coverage=0.9, threshold=0.2, images=99),
        ),
    )
    return model, model_config


def reference_predictor(model: ViT, model_config: ModelConfig) -> Predictor:
    return Predictor(model, model_config, cpu_fp32())


def save_random_model(folder: Path, channels: int = 3, image_size: tuple[int, int] = (16, 24), width: int = 16) -> Path:
    """Save a model of six animals whose predictions differ between images."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=image_size, patch_size=8, channels=channels, num_classes=len(ANIMALS), width=width, depth=2, heads=2
    )
    model = ViT(config)
    torch.nn.init.normal_(model.get_parameter("head.out.weight"))
    preprocessing = Preprocessing(
        image_size=image_size, channels=channels, mean=(0.5,) * channels, std=(0.25,) * channels
    )
    model_config = ModelConfig(
        architecture=config, preprocessing=preprocessing, classes=ANIMALS, trained_on="nothing", epoch=1
    )
    save_model(folder, model, model_config)
    return folder


def smooth_images(count: int, channels: int = 3, seed: int = 0) -> Tensor:
    """uint8 (count, channels, 16, 24)."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, 4, 6, generator=generator) * 255
    return torch.nn.functional.interpolate(coarse, size=(16, 24), mode="bilinear").round().to(torch.uint8)


def smooth_photo(seed: int, height: int = 30, width: int = 40) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def images_of_many_sizes(count: int, channels: int = 3) -> list[Tensor]:
    """Smooth uint8 images (C, H, W)."""
    images = []
    for seed in range(count):
        coarse = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8))
        picture = coarse.resize((20 + 7 * (seed % 9), 18 + 5 * (seed % 7)), Image.Resampling.BICUBIC)
        array = np.array(picture.convert({1: "L", 3: "RGB"}[channels])).reshape(picture.height, picture.width, channels)
        images.append(torch.from_numpy(array).permute(2, 0, 1).contiguous())
    return images


def comparison_images(predictor: Predictor, images: list[Tensor], num_calibration: int = 0) -> ComparisonImages:
    """Unlabelled images, the first `num_calibration` of them to calibrate with."""
    decoded = torch.stack([predictor.model_config.preprocessing.resize_and_crop(decode_image(i)) for i in images])
    calibration, compared = decoded[:num_calibration], decoded[num_calibration:]
    return ComparisonImages(images=compared, sources=images[num_calibration:], labels=None, calibration=calibration)


def reference_logits(model: ViT, preprocessing: Preprocessing, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(preprocessing.normalise(images))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """RMS error relative to the spread of the expected values over the batch."""
    spread = (expected - expected.mean(dim=0)).square().mean().sqrt()
    return float((actual - expected).square().mean().sqrt() / spread)


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers with a low-rank update, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
