"""DINOv2's linear classifier (arXiv 2304.07193) on the concatenation of class token and mean of the patches."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vitral.models.vit import ClassificationHead, ViT, ViTConfig, initialise


class ClassAndMeanViT(ViT):
    pooled_vectors = 2

    def __init__(self, config: ViTConfig) -> None:
        self.check_config(config)
        super().__init__(config)
        self.head = ClassificationHead(replace(config, width=2 * config.width))
        initialise(self)

    @staticmethod
    def check_config(config: ViTConfig) -> None:
        if config.pooling != "class":
            raise ValueError("variant 'class-and-mean' requires pooling 'class'")

    def pool(self, tokens_BTD: Tensor, attentions: list[Tensor] | None = None) -> Tensor:
        """B 2D: [class token; mean of the patches]."""
        patches = tokens_BTD[:, self.config.num_prefix_tokens :]
        return torch.cat([tokens_BTD[:, 0], patches.mean(dim=1)], dim=1)
