"""The last layer norm after the mean of the patches instead of before it (MAE's fine-tuning, timm's `gap` models)."""

from __future__ import annotations

from torch import Tensor, nn

from vitral.models.vit import ViT, ViTConfig


class LateNormViT(ViT):
    def __init__(self, config: ViTConfig) -> None:
        if config.pooling != "mean":
            raise ValueError("the norm can stand after the pooling where pooling is 'mean': elsewhere it is the same")
        super().__init__(config)
        self.pooled_norm, self.encoder.norm = self.encoder.norm, nn.Identity()

    def pool(self, tokens_BTD: Tensor, record: list[Tensor] | None = None) -> Tensor:
        return self.pooled_norm(super().pool(tokens_BTD, record))
