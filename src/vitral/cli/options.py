"""Value types and configuration flags that several commands share.

The types repeat those of modules that import torch; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from vitral.cli.config_fields import ConfigField, read_config_fields

EngineFlag = Literal["auto", "reference", "fp32", "bf16", "int8", "bf16-cascade", "int8-cascade", "fp8"]
DeviceFlag = Literal["auto", "cpu", "gpu", "cuda"]
SplitFlag = Literal["test", "validation", "train"]


def vit_fields() -> Iterable[ConfigField]:
    """Fields of a model configuration, as flags without a prefix."""
    return read_config_fields("vitral.models.vit", "ViTConfig")
