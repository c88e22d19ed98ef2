"""The other libraries, as references: imported here and nowhere else, and given weights that hide nothing."""

from __future__ import annotations

import warnings
from typing import Any

import torch
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
    from timm.models.vision_transformer import VisionTransformer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

__all__ = [
    "VisionTransformer",
    "VisionTransformerDistilled",
    "answers",
    "lively",
    "ours",
    "pictures",
    "timm",
    "torchvision",
    "transformers",
    "vit_pytorch",
]


@torch.no_grad()
def lively(model: Any, seed: int = 0) -> Any:
    """Weights with which every part matters: no zero biases, no norms of ones, attention that looks somewhere."""
    draws = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=draws)
        if parameter.ndim == 1 and not name.endswith("bias"):
            parameter.copy_(1 + 0.2 * noise)  # norms, layer scale
        elif parameter.ndim >= 2 and not any(part in name for part in ("token", "pos", "latent", "probe")):
            fan_in = parameter[0].numel()
            parameter.copy_(1.5 * fan_in**-0.5 * noise)
        else:
            parameter.copy_(0.3 * noise)
    return model.eval()


def pictures(height: int, width: int, channels: int = 3, count: int = 2) -> Tensor:
    return torch.randn(count, channels, height, width, generator=torch.Generator().manual_seed(1))


def ours(model: ViT, classes: tuple[str, ...] | None = None) -> Checkpoint:
    """A model of vitral's own, as something to write."""
    config = model.config
    half = (0.5,) * config.channels
    return Checkpoint(
        family="vitral",
        source="a test",
        config=config,
        variant=variant_name(model),
        state=dict(model.state_dict()),
        preprocessing=Preprocessing(image_size=config.image_size, channels=config.channels, mean=half, std=half),
        classes=classes,
    )


@torch.inference_mode()
def answers(model: nn.Module, images: Tensor) -> Tensor:
    out: Any = model(images)
    return out if isinstance(out, Tensor) else out.logits
