"""DINOv2's classifier (arXiv 2304.07193): it sees the class token and the mean of the patches, side by side."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vitral.models.vit import ClassificationHead, ViT, ViTConfig, initialise


class ClassAndMeanViT(ViT):
    def __init__(self, config: ViTConfig) -> None:
        if config.pooling != "class":
            raise ValueError("a ViT that pools class token and mean has pooling 'class'")
        super().__init__(config)
        self.head = ClassificationHead(replace(config, width=2 * config.width))
        initialise(self)

    def pool(self, tokens_BTD: Tensor, record: list[Tensor] | None = None) -> Tensor:
        """B 2D: [class token; mean of the patches]."""
        patches = tokens_BTD[:, self.config.prefix :]
        return torch.cat([tokens_BTD[:, 0], patches.mean(dim=1)], dim=1)
