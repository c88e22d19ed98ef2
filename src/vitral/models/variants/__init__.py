"""Variants of the plain ViT, one per file, by the names that recipes and saved models use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from vitral.errors import unknown_name_error
from vitral.models.presets import PRESETS, preset
from vitral.models.variants.class_and_mean import ClassAndMeanViT
from vitral.models.variants.distilled import DistilledViT
from vitral.models.variants.ensemble import EnsembleConfig, EnsembleViT
from vitral.models.variants.hybrid import HYBRIDS, HybridConfig, HybridViT, hybrid_preset
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
SAVED_VARIANTS: dict[str, type[ViT]] = {**VARIANTS, "ensemble": EnsembleViT}  # of model folders; not all can be trained
# Checks of the variants that support only some options of ViTConfig; they raise ValueError.
CONFIG_CHECKS: dict[str, Callable[[ViTConfig], None]] = {
    "distilled": DistilledViT.check_config,
    "late-norm": LateNormViT.check_config,
    "class-and-mean": ClassAndMeanViT.check_config,
}
# Configuration classes of the variants with fields of their own; the others use ViTConfig.
VARIANT_CONFIGS: dict[str, type[ViTConfig]] = {"hybrid": HybridConfig, "ensemble": EnsembleConfig}


def config_class(variant: Any) -> type[ViTConfig]:
    """The configuration class of this variant; ViTConfig for unknown names."""
    return VARIANT_CONFIGS.get(variant, ViTConfig) if isinstance(variant, str) else ViTConfig


def upgrade_architecture(fields: Any) -> Any:
    """Fields of an architecture from a file. Replaces `gelu`, which older versions wrote, by `activation`."""
    if not isinstance(fields, Mapping) or "gelu" not in fields or "activation" in fields:
        return fields
    activation = {"exact": "gelu", "tanh": "gelu_tanh"}.get(str(fields["gelu"]), fields["gelu"])
    return {**{name: value for name, value in fields.items() if name != "gelu"}, "activation": activation}


def check_variant(variant: str, config: ViTConfig, allowed: Collection[str] = tuple(VARIANTS)) -> None:
    """Raise ValueError if the variant is not one of the `allowed` ones or does not support `config`."""
    if variant not in allowed:
        raise ValueError(f"variant must be one of {', '.join(allowed)}, got {variant!r}")
    expected, actual = config_class(variant).__name__, type(config).__name__
    if expected != actual:
        presets = f"; use a hybrid preset: {', '.join(HYBRIDS)}" if variant == "hybrid" else ""
        raise ValueError(f"the architecture of variant {variant!r} must be a {expected}, got a {actual}{presets}")
    if variant in CONFIG_CHECKS:
        CONFIG_CHECKS[variant](config)


def resolve_preset(name: str, **overrides: Any) -> tuple[str, ViTConfig]:
    """Variant and configuration of a plain or hybrid preset: `resolve_preset("R50+B/16", num_classes=10)`."""
    if name.lower() in (hybrid.lower() for hybrid in HYBRIDS):
        return "hybrid", hybrid_preset(name, **overrides)
    if name.lower() in (plain.lower() for plain in PRESETS):
        return "plain", preset(name, **overrides)
    raise unknown_name_error("preset", name, [*PRESETS, *HYBRIDS])


def variant_name(model: ViT) -> str:
    """The name of this model's class in `SAVED_VARIANTS`."""
    return next(name for name, kind in SAVED_VARIANTS.items() if type(model) is kind)
