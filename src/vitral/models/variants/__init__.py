"""Ideas built on the plain ViT, one a file. The core knows nothing of them.

This table names them, so that a saved model can say what it is.
"""

from __future__ import annotations

from typing import Any

from vitral.errors import unknown
from vitral.models.presets import PRESETS, preset
from vitral.models.variants.class_and_mean import ClassAndMeanViT
from vitral.models.variants.distilled import DistilledViT
from vitral.models.variants.hybrid import HYBRIDS, HybridConfig, HybridViT, hybrid
from vitral.models.variants.late_norm import LateNormViT
from vitral.models.variants.patch_norm import PatchNormViT
from vitral.models.vit import ViT, ViTConfig

VARIANTS: dict[str, type[ViT]] = {
    "plain": ViT,
    "distilled": DistilledViT,
    "late-norm": LateNormViT,
    "patch-norm": PatchNormViT,
    "class-and-mean": ClassAndMeanViT,
    "hybrid": HybridViT,
}
# What describes those with settings of their own; the others, a ViTConfig.
CONFIGS: dict[str, type[ViTConfig]] = {"hybrid": HybridConfig}


def config_class(variant: Any) -> type[ViTConfig]:
    """What describes a model of this variant; of one that is not in the table, a ViTConfig."""
    return CONFIGS.get(variant, ViTConfig) if isinstance(variant, str) else ViTConfig


def check(variant: str, config: ViTConfig) -> None:
    """A ValueError where there is no such variant, or this describes another."""
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, not {variant!r}")
    wanted, given = config_class(variant).__name__, type(config).__name__
    if wanted != given:
        names = f": a preset has one, {', '.join(HYBRIDS)}" if variant == "hybrid" else ""
        raise ValueError(f"the architecture of variant {variant!r} must be a {wanted}, not a {given}{names}")


def architecture(name: str, **changes: Any) -> tuple[str, ViTConfig]:
    """Variant and configuration of a preset, plain or hybrid: `architecture("R50+B/16", classes=10)`."""
    if name.lower() in (known.lower() for known in HYBRIDS):
        return "hybrid", hybrid(name, **changes)
    if name.lower() in (known.lower() for known in PRESETS):
        return "plain", preset(name, **changes)
    raise unknown("preset", name, [*PRESETS, *HYBRIDS])


def variant_of(model: ViT) -> str:
    """The name in the table of this model's class."""
    return next(name for name, kind in VARIANTS.items() if type(model) is kind)
