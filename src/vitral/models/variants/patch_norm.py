"""Layer norms before and after the patch embedding (Dual PatchNorm, arXiv 2302.01327), as in vit-pytorch."""

from __future__ import annotations

from torch import Tensor, nn

from vitral.models.vit import PatchEmbedding, ViT, ViTConfig, patchify


class NormedPatchEmbedding(PatchEmbedding):
    """LN(LN(x_p)·E): one norm over the pixels of a patch, one over its embedding."""

    def __init__(self, config: ViTConfig, project: nn.Linear) -> None:
        super().__init__(config)
        self.norm_pixels = nn.LayerNorm(project.in_features, config.norm_eps)
        self.project = project
        self.norm = nn.LayerNorm(config.width, config.norm_eps)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.norm(self.project(self.norm_pixels(patchify(images_BCHW, self.patch_size))))


class PatchNormViT(ViT):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.patch_embedding = NormedPatchEmbedding(config, self.patch_embedding.project)
