"""The other ViT libraries, imported here only, and random weights and images to compare vitral with them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from peers import register_torchvision_ops
from vitral.data.preprocess import Preprocessing
from vitral.models.variants import variant_name
from vitral.models.vit import ViT
from vitral.weights import Checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    register_torchvision_ops()
    import timm
    import torchvision.models
    import transformers
    import vit_pytorch
    import vit_pytorch.simple_vit
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

__all__ = [
    "Eva",
    "VisionTransformer",
    "VisionTransformerDistilled",
    "as_checkpoint",
    "assert_same_logits",
    "compute_logits",
    "random_images",
    "randomize_weights",
    "save_for_hub",
    "timm",
    "torchvision",
    "transformers",
    "vit_pytorch",
]


@torch.no_grad()
def randomize_weights(model: Any, seed: int = 0) -> Any:
    """Weights for which every tensor affects the logits: no zero biases, no unit norms, no uniform attention."""
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=rng)
        if parameter.ndim == 1 and not name.endswith("bias"):
            parameter.copy_(1 + 0.2 * noise)  # norms, layer scale
        elif parameter.ndim >= 2 and not any(part in name for part in ("token", "pos", "latent", "probe")):
            fan_in = parameter[0].numel()
            parameter.copy_(1.5 * fan_in**-0.5 * noise)
        else:
            parameter.copy_(0.3 * noise)
    return model.eval()


def random_images(height: int, width: int, channels: int = 3, count: int = 2) -> Tensor:
    return torch.randn(count, channels, height, width, generator=torch.Generator().manual_seed(1))


def as_checkpoint(model: ViT, classes: tuple[str, ...] | None = None) -> Checkpoint:
    """One of vitral's models as a checkpoint to write."""
    config = model.config
    half = (0.5,) * config.channels
    return Checkpoint(
        format="vitral",
        source="a test",
        config=config,
        variant=variant_name(model),
        state=dict(model.state_dict()),
        preprocessing=Preprocessing(image_size=config.image_size, channels=config.channels, mean=half, std=half),
        classes=classes,
    )


@torch.inference_mode()
def compute_logits(model: nn.Module, images: Tensor) -> Tensor:
    output: Any = model(images)
    return output if isinstance(output, Tensor) else output.logits


def assert_same_logits(model: nn.Module, reference: nn.Module, images: Tensor) -> None:
    torch.testing.assert_close(compute_logits(model, images), compute_logits(reference, images), atol=1e-4, rtol=0)


def save_for_hub(folder: Path, model: Any, arguments: dict[str, Any], name: str = "vit_base_patch16_224") -> Path:
    """Write a folder like timm's save_for_hf."""
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    config = {
        "architecture": name,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [model.in_chans, *model.patch_embed.img_size],
            "mean": [0.1] * model.in_chans,
            "std": [0.3] * model.in_chans,
            "crop_pct": 0.95,
            "interpolation": "bilinear",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
