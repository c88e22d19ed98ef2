"""Which models the engine in JavaScript can run."""

from __future__ import annotations

from vitral.errors import VitralError
from vitral.models.variants import variant_name
from vitral.models.variants.hybrid import HybridConfig
from vitral.models.vit import ViT
from vitral.runs.model_io import ModelConfig

MAX_PARAMETERS = 30_000_000  # S/16 has 22 million; a larger model takes seconds per image in a browser
HINT = (
    "The explorer runs classification models of the size of S/16 or smaller, plain or with a small convolutional stem"
)


def check_supported(model: object, config: ModelConfig, name: str) -> None:
    """Refuse a model that the browser cannot run."""
    if (reason := unsupported_reason(model, config)) is not None:
        raise VitralError(f"the explorer cannot run {name}: {reason}", HINT)


def unsupported_reason(model: object, config: ModelConfig) -> str | None:
    """What the engine does not implement of this model; None if it can run it."""
    if not isinstance(model, ViT):
        return "it only has logits"
    architecture, preprocessing = config.architecture, config.preprocessing
    if (variant := variant_name(model)) not in ("plain", "hybrid"):
        return f"its variant {variant!r} is not implemented in JavaScript"
    if isinstance(architecture, HybridConfig):
        if architecture.conv is None:
            return "a ResNet stem is not implemented in JavaScript"
        if architecture.patch_size != architecture.conv.stride:
            return "patches of several positions of a feature map are not implemented in JavaScript"
    if architecture.pooling == "attention":
        return "attention pooling is not implemented in JavaScript"
    if config.task != "classification":
        return f"its task is {config.task}, expected classification"
    if preprocessing.channels not in (1, 3) or preprocessing.dtype != "uint8":
        return f"its images have {preprocessing.pixel_format}, expected 8-bit greyscale or RGB"
    if preprocessing.resize == "native" or preprocessing.image_size != architecture.image_size:
        return "its input has a variable size"
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"it has {count / 1e6:.0f} million parameters" if count > MAX_PARAMETERS else None
