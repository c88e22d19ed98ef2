"""Values of recipe fields that other packages implement, and checks of these values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from vitral.data.targets import TaskName

if TYPE_CHECKING:
    from vitral.models.vit import ViTConfig

AUTO = "auto"  # value of init_from: a checkpoint from the hub that suits the images (vitral.doctor.backbones)
InitScheme = Literal["identity", "local_heads", "qk_similar", "whitened_patches"]  # vitral.training.init_schemes
LossName = Literal["softmax", "sigmoid", "asymmetric", "focal", "mse", "huber"]  # vitral.tasks.losses
LossOption = Literal["auto", "softmax", "sigmoid", "asymmetric", "focal", "mse", "huber"]
TaskOption = Literal["auto", "classification", "multilabel", "regression"]
HeadInit = Literal["zeros", "least_squares"]  # vitral.training.head_init
LAST_BLOCKS = "last-"  # prefix of a `tune` value that states a number of blocks
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


def check_tune(tune: str, depth: int | None = None) -> None:
    """Raise ValueError for a `tune` that does not exist, or that needs more blocks than a model of this depth has."""
    blocks = tune.removeprefix(LAST_BLOCKS)
    if tune.startswith(LAST_BLOCKS) and re.fullmatch("[0-9]{1,6}", blocks):
        if depth is not None and int(blocks) > depth:
            raise ValueError(f"tune must be at most last-{depth}, the model has {depth} blocks; got {tune!r}")
    elif tune not in ("full", "head", "lora", "bias"):
        raise ValueError(f"tune must be full, head, lora, bias or last-N (the last N blocks), got {tune!r}")


def tune_from_freeze(freeze: str, depth: int) -> str:
    """The `tune` that is equivalent to the field `freeze` of older recipes."""
    if freeze in ("", "backbone"):
        return "head" if freeze else "full"
    return f"{LAST_BLOCKS}{depth - int(freeze)}" if freeze.isdecimal() and int(freeze) <= depth else freeze
