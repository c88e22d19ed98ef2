"""Values of recipe fields that other packages implement, and which of them a model supports."""

from __future__ import annotations

import re
from typing import Literal

from vitral.data.targets import TaskName
from vitral.models.vit import ViTConfig

AUTO = "auto"  # value of init_from: a checkpoint from the hub that suits the images (vitral.doctor.backbones)
InitScheme = Literal["identity", "local_heads", "qk_similar", "whitened_patches"]  # vitral.training.init_schemes
LossName = Literal["softmax", "sigmoid", "asymmetric", "focal", "mse", "huber"]  # vitral.tasks.losses
LossOption = Literal["auto", "softmax", "sigmoid", "asymmetric", "focal", "mse", "huber"]
TaskOption = Literal["auto", "classification", "multilabel", "regression"]
TTA = Literal["none", "flip", "three", "six", "ten"]  # vitral.evaluation.tta


SIGMOID_LOSSES: tuple[LossName, ...] = ("sigmoid", "asymmetric", "focal")
TASK_LOSSES: dict[TaskName, tuple[LossName, ...]] = {  # the first one is the default
    "classification": ("softmax", "sigmoid"),
    "multilabel": SIGMOID_LOSSES,
    "regression": ("mse", "huber"),
}


def init_scheme_unsupported_reason(schemes: tuple[InitScheme, ...], variant: str, config: ViTConfig) -> str | None:
    """Why these schemes cannot be used with this model; None if they can."""
    has_bias = config.qkv_bias and config.key_bias
    if "local_heads" in schemes and not ("rotary" in config.positions and config.qk_norm and has_bias):
        return "init scheme 'local_heads' needs a model with rotary positions, qk_norm, qkv_bias and key_bias"
    if "whitened_patches" in schemes and variant != "plain":
        return f"init scheme 'whitened_patches' needs pixel patches, which the variant {variant!r} does not have"
    return None


def parse_duration(text: str) -> float:
    """Seconds of a duration such as `90`, `90s`, `30m`, `1h30m` or `1.5h`."""
    match = re.fullmatch(r"(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s?)?", text.strip())
    try:
        hours, minutes, seconds = (float(part or 0) for part in match.groups()) if match else (0.0, 0.0, 0.0)
    except ValueError:
        hours = minutes = seconds = 0.0
    if not (total := 3600 * hours + 60 * minutes + seconds) > 0:
        raise ValueError(f"expected a duration such as 30m, 1h30m or 90s, got {text!r}")
    return total
