"""Ideas built on the plain ViT, one a file. The core knows nothing of them.

This table names them, so that a saved model can say what it is.
"""

from __future__ import annotations

from vitral.variants.class_and_mean import ClassAndMeanViT
from vitral.variants.distilled import DistilledViT
from vitral.variants.hybrid import HybridConfig, HybridViT
from vitral.variants.late_norm import LateNormViT
from vitral.variants.patch_norm import PatchNormViT
from vitral.vit import ViT, ViTConfig

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


def variant_of(model: ViT) -> str:
    """The name in the table of this model's class."""
    return next(name for name, kind in VARIANTS.items() if type(model) is kind)
