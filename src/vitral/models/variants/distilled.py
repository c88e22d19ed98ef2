"""DeiT's distilled ViT (arXiv 2012.12877): a distillation token with a head of its own.

During distillation the class token's logits are trained on the labels and the distillation token's on the teacher
(section 3.2). The prediction is the mean of both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitral.models.vit import ClassificationHead, Grid, ViT, ViTConfig, initialise

REQUIRED = {"pooling": "class", "positions": "learned", "registers": 0, "pre_norm": False}


class DistilledHead(nn.Module):
    """B 2D, both tokens concatenated -> B K, the mean of the two heads' logits.

    For distillation, `separate_in_training` returns both heads' logits in training mode: B 2K, labels first.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.label_head, self.teacher_head = ClassificationHead(config), ClassificationHead(config)
        self.separate_in_training = False

    def forward(self, pooled_BE: Tensor) -> Tensor:
        label, teacher = pooled_BE.chunk(2, dim=1)
        if self.separate_in_training and self.training:
            return torch.cat([self.label_head(label), self.teacher_head(teacher)], dim=1)
        return (self.label_head(label) + self.teacher_head(teacher)) / 2


class DistilledViT(ViT):
    pooled_vectors = 2

    def __init__(self, config: ViTConfig) -> None:
        self.check_config(config)
        super().__init__(config)
        self.distillation_token = nn.Parameter(torch.empty(1, 1, config.width))
        self.distillation_position_table = nn.Parameter(torch.empty(1, 1, config.width))
        self.head = DistilledHead(config)
        initialise(self)

    @staticmethod
    def check_config(config: ViTConfig) -> None:
        for name, required in REQUIRED.items():
            if (value := getattr(config, name)) != required:
                raise ValueError(f"variant 'distilled' requires model.{name} {required!r}, got {value!r}")

    def embed(self, images_BCHW: Tensor, grid: Grid) -> Tensor:
        """[x_class; x_distillation; x1·E; …; xN·E] + E_pos."""
        tokens = super().embed(images_BCHW, grid)
        extra = (self.distillation_token + self.distillation_position_table).expand(tokens.shape[0], -1, -1)
        return torch.cat([tokens[:, :1], self.dropout(extra), tokens[:, 1:]], dim=1)

    def pool(self, tokens_BTD: Tensor, attentions: list[Tensor] | None = None) -> Tensor:
        return tokens_BTD[:, :2].flatten(1)
