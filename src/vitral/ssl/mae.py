"""Masked autoencoding (MAE; He et al., 2022, arXiv 2111.06377): reconstruct the pixels of patches that are not seen.

The encoder sees a random quarter of the patches (section 3). A small decoder receives their tokens, and a mask token
for every other patch, and predicts the pixels of each patch, normalised by the patch's own mean and standard deviation.
The loss is the mean squared error on masked patches. Published results on ImageNet-1k, ViT-B/16: 83.6% fine-tuned,
68.0% linear probe (table 3 and the appendix). MAE features are better fine-tuned than frozen.

Shapes:  B images   N patches   S seen patches   D width   E pixels of a patch times channels
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from vitral.data.preprocess import Preprocessing
from vitral.distributed.world import World
from vitral.errors import VitralError
from vitral.models.variants.hybrid import HybridViT
from vitral.models.variants.late_norm import LateNormViT
from vitral.models.vit import Encoder, Grid, PositionEmbedding, ViT, ViTConfig, patchify
from vitral.ssl.masking import num_masked_patches, split_patches
from vitral.ssl.method import Branch, PretrainMethod
from vitral.ssl.views import ViewConfig

COLOR_FIELDS = (  # of ViewConfig; MAE augments by crops and flips alone (section 4)
    "jitter_prob", "grayscale", "blur_first", "blur_second", "blur_local", "solarize_first", "solarize_second",
    "solarize_local",
)  # fmt: skip
TARGET_EPSILON = 1e-6  # added to the variance of a patch


@dataclass(frozen=True, kw_only=True)
class MAEConfig:
    """Masked autoencoding: reconstruct the pixels of masked patches."""

    mask_ratio: float = 0.75  # fraction of the patches that the encoder does not see
    decoder_width: int = 192  # width of the decoder, a multiple of 32 (channels per head)
    decoder_depth: int = 2  # blocks of the decoder

    def __post_init__(self) -> None:
        if not 0 < self.mask_ratio < 1:
            raise ValueError(f"mae.mask_ratio must be above 0 and below 1, got {self.mask_ratio}")
        if self.decoder_width < 32 or self.decoder_width % 32:
            raise ValueError(f"mae.decoder_width must be a multiple of 32, got {self.decoder_width}")
        if self.decoder_depth < 1:
            raise ValueError(f"mae.decoder_depth must be at least 1, got {self.decoder_depth}")


class Decoder(nn.Module):
    """Tokens of seen patches -> pixels of all patches: B S D -> B N E. The class token and registers take no part."""

    def __init__(self, config: MAEConfig, model: ViTConfig) -> None:
        super().__init__()
        self.config = ViTConfig(
            image_size=(model.grid[0] * model.patch_size, model.grid[1] * model.patch_size),
            patch_size=model.patch_size,
            width=config.decoder_width,
            depth=config.decoder_depth,
            heads=config.decoder_width // 32,
            pooling="mean",
            positions="sincos",
        )
        self.embed = nn.Linear(model.width, config.decoder_width)
        self.mask_token = nn.Parameter(torch.empty(config.decoder_width))
        self.positions = PositionEmbedding(self.config)
        self.encoder = Encoder(self.config)
        self.pixels = nn.Linear(config.decoder_width, model.channels * model.patch_size**2)
        nn.init.normal_(self.mask_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):  # as in the paper (appendix A.1)
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, seen_BSD: Tensor, restore_indices_BN: Tensor, grid: Grid) -> Tensor:
        seen = self.embed(seen_BSD)
        B, N = restore_indices_BN.shape
        masked = self.mask_token.to(seen.dtype).expand(B, N - seen.shape[1], -1)
        shuffled = torch.cat([seen, masked], dim=1)
        tokens = shuffled.gather(1, restore_indices_BN[:, :, None].expand(-1, -1, shuffled.shape[2]))
        return self.pixels(self.encoder(self.positions(tokens, grid), grid))


class MAE(PretrainMethod):
    score_name: ClassVar[str] = "explained_variance"
    needs_patches = True

    def __init__(
        self, config: MAEConfig, vit: ViT, preprocessing: Preprocessing, views: ViewConfig, world: World
    ) -> None:
        if isinstance(vit, HybridViT):
            raise VitralError(
                "MAE needs a model that embeds each patch alone: a convolutional stem would see masked patches",
                "Use --variant plain, a preset without a stem such as Ti/16, or another --method",
            )
        if vit.attention_pooling is not None:
            raise VitralError(
                "MAE does not train attention pooling: its decoder reads the patches, so that the pooling stays random",
                "Use --model.pooling mean or class, or another --method",
            )
        if isinstance(vit, LateNormViT):
            vit.pooled_norm.requires_grad_(False)  # the loss does not use it
        crops = replace(views, global_views=1, local_views=0, **dict.fromkeys(COLOR_FIELDS, 0.0))
        super().__init__(Branch(vit), preprocessing, crops, world)
        self.decoder = Decoder(config, vit.config)
        self.mask_ratio, self.initial_loss = config.mask_ratio, 1.0

    def make_batch(self, images_BCHW: Tensor, generator: Generator) -> tuple[Tensor, ...]:
        """Normalised crops, indices of the seen patches, the order that restores all patches, and the mask."""
        crops = self.draw_views(images_BCHW, generator).global_views[:, 0]
        grid = self.student.vit.config.grid_for(*crops.shape[2:])
        num_patches = grid[0] * grid[1]
        num_masked = num_masked_patches(num_patches, self.mask_ratio)
        return crops, *split_patches(len(crops), num_patches, num_masked, generator, crops.device)

    def forward(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        images, seen_indices_BS, restore_indices_BN, mask_BN = batch
        grid = self.student.vit.patch_grid(images)
        tokens = encode_seen(self.student.vit, images, grid, seen_indices_BS)
        predicted = self.decoder(tokens[:, -seen_indices_BS.shape[1] :], restore_indices_BN, grid).float()
        loss_B = masked_mse(predicted, patch_targets(self.student.vit, images), mask_BN)
        return loss_B.sum(), (1 - loss_B.detach()).sum()


def encode_seen(vit: ViT, images_BCHW: Tensor, grid: Grid, seen_indices_BS: Tensor) -> Tensor:
    """Tokens of the prefix and of the seen patches, which alone pass through the encoder."""
    tokens = vit.embed(images_BCHW, grid)
    num_prefix = tokens.shape[1] - grid[0] * grid[1]
    prefix = torch.arange(num_prefix, device=tokens.device).expand(len(tokens), -1)
    kept_BT = torch.cat([prefix, num_prefix + seen_indices_BS], dim=1)
    tokens = tokens.gather(1, kept_BT[:, :, None].expand(-1, -1, tokens.shape[2]))
    rotary = vit.encoder.rotary_position
    rope = None if rotary is None else rotary(grid)[:, kept_BT][:, :, None]  # 2 B 1 T d/2
    for block in vit.encoder.blocks:
        tokens = block(tokens, rope)
    return vit.encoder.norm(tokens)


def patch_targets(vit: ViT, images_BCHW: Tensor) -> Tensor:
    """Pixels of each patch with mean 0 and standard deviation 1: B N E."""
    patches = patchify(images_BCHW, vit.config.patch_size)
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) * torch.rsqrt(variance + TARGET_EPSILON)


def masked_mse(predicted_BNE: Tensor, targets_BNE: Tensor, mask_BN: Tensor) -> Tensor:
    """Mean squared error of each image over its masked patches, (B,)."""
    error_BN = (predicted_BNE - targets_BNE).square().mean(dim=-1)
    return (error_BN * mask_BN).sum(dim=1) / mask_BN.sum(dim=1)
