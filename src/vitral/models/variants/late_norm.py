"""Final layer norm after pooling instead of before it (MAE fine-tuning, timm's `fc_norm` models).

For the class token both orders are equal; the variant keeps the name of the tensor.
"""

from __future__ import annotations

from torch import Tensor, nn

from vitral.models.vit import ViT, ViTConfig


class LateNormViT(ViT):
    def __init__(self, config: ViTConfig) -> None:
        self.check_config(config)
        super().__init__(config)
        self.pooled_norm, self.encoder.norm = self.encoder.norm, nn.Identity()

    @staticmethod
    def check_config(config: ViTConfig) -> None:
        if config.pooling == "attention" or not config.final_norm:
            raise ValueError("variant 'late-norm' requires final_norm and pooling 'mean' or 'class'")

    def pool(self, tokens_BTD: Tensor, attentions: list[Tensor] | None = None) -> Tensor:
        return self.pooled_norm(super().pool(tokens_BTD, attentions))
