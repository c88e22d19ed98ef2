"""Token merging (ToMe): each block merges its r most similar pairs of tokens, so that later blocks compute fewer.

"Token Merging: Your ViT But Faster", Bolya et al., ICLR 2023 (arXiv 2210.09461). No training is needed. Published for
r = 13 on ViT-S/16 (AugReg, ImageNet): 81.41 to 79.30% at 1.64x the speed on a V100.

Between attention and MLP of a block (section 3):
1. Patches are split alternately into sets A and B. Class token and registers are never merged.
2. Each token of A is matched with the token of B whose key, averaged over the heads, has the largest cosine similarity.
3. The r best matches are merged: averaged, weighted by the number of patches that each token stands for (its size).
Attention adds log(size) to the logits of a key (equation 1): a merged token counts as often as the patches in it.

Shapes as in vit.py; T shrinks by r per block.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.models.vit import Encoder, EncoderBlock, Grid, MultiHeadAttention, ViT


class Matching(NamedTuple):
    """Which tokens are merged: indices among the patches of an image."""

    kept: Tensor  # (B, |A| - r): tokens of A that are not merged
    merged: Tensor  # (B, r): tokens of A that are merged
    target: Tensor  # (B, r): the position in B of the token that each is merged into
    b: Tensor  # (|B|,): tokens of B, the same for all images


def merge_limit(num_patches: int, r: int) -> int:
    """The number of tokens that a block merges: r, but at most half of the patches."""
    return min(r, num_patches // 2)


def match_tokens(keys_BTd: Tensor, r: int, num_prefix_tokens: int) -> Matching:
    """Bipartite soft matching of the patches by the cosine similarity of their keys."""
    p = num_prefix_tokens
    tokens = torch.arange(keys_BTd.shape[1] - p, device=keys_BTd.device)
    a, b = tokens[p % 2 :: 2], tokens[1 - p % 2 :: 2]  # by the parity of the index among all tokens, as published
    patches = F.normalize(keys_BTd[:, p:], dim=-1)
    similarity, target = (patches[:, a] @ patches[:, b].mT).max(dim=-1)
    order = similarity.argsort(dim=-1, descending=True)
    merged, kept = order[:, :r], order[:, r:].sort(dim=-1).values
    return Matching(a[kept], a[merged], target.gather(1, merged), b)


def merge_tokens(z_BTD: Tensor, size_BT: Tensor, matching: Matching, num_prefix_tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens (B, T - r, D) and their sizes: prefix tokens, tokens of A that are not merged, tokens of B.

    Each token is copied once. Only the targets change: each becomes the average of itself and what is merged into it.
    For inference: a gradient through a target is counted as often as tokens are merged into it.
    """
    (B, _, _), p, device = z_BTD.shape, num_prefix_tokens, z_BTD.device
    images, prefix = torch.arange(B, device=device)[:, None], torch.arange(p, device=device)
    remaining = torch.cat([prefix.expand(B, -1), p + matching.kept, (p + matching.b).expand(B, -1)], dim=1)
    target = p + matching.kept.shape[1] + matching.target  # positions among the remaining tokens
    merged, merged_size = z_BTD[images, p + matching.merged].float(), size_BT.gather(1, p + matching.merged)
    tokens, size = z_BTD[images, remaining], size_BT.gather(1, remaining)
    has_same_target = target[:, :, None] == target[:, None, :]  # each target is computed as often as it occurs
    summed = tokens[images, target].float() * size.gather(1, target)[..., None]
    summed += (has_same_target * merged_size[:, None, :]) @ merged
    size = size.scatter_add(1, target, merged_size)
    tokens[images, target] = (summed / size.gather(1, target)[..., None]).to(z_BTD.dtype)
    return tokens, size


def attend_by_size(q: Tensor, k: Tensor, v: Tensor, size_BT: Tensor | None) -> Tensor:
    """softmax(q·kᵀ/√d + log size)·v for q, k, v (B, h, T, d); a token of size s counts as s equal tokens."""
    bias = None if size_BT is None else size_BT.log().to(q.dtype)[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def unsupported_reason(model: ViT) -> str | None:
    """Why a model's tokens cannot be merged, or None."""
    if type(model).features is not ViT.features or type(model.encoder) is not Encoder:
        return f"{type(model).__name__} overrides the forward pass"
    for block in model.encoder.blocks:
        if type(block) is not EncoderBlock or type(block.attention) is not MultiHeadAttention:
            return f"{type(block).__name__} is not the standard encoder block"
    if model.encoder.rotary_position is not None:
        return "a merged token has no position of its own, which rotary positions need"
    if model.config.pooling == "attention":
        return "attention pooling does not weight tokens by their size"
    return None


class TokenMergingViT(ViT):
    """A trained ViT that merges `r` tokens in each block. Shares the weights of the model that it is made from."""

    r: int

    @classmethod
    def from_model(cls, model: ViT, r: int) -> Self:
        """Raises ValueError for a model whose tokens cannot be merged (`unsupported_reason`)."""
        if reason := unsupported_reason(model):
            raise ValueError(reason)
        if r < 0:
            raise ValueError(f"r must not be negative, got {r}")
        merging = cls.__new__(cls)
        merging.__dict__.update(model.__dict__)
        merging._modules = dict(model._modules)
        merging.r = r
        return merging

    def features(self, images_BCHW: Tensor) -> Tensor:
        """Pooled features, B D: the input of the head."""
        grid = self.patch_grid(images_BCHW)
        tokens_BTD, size_BT = self.encode(self.embed(images_BCHW, grid))
        return self.pool_by_size(tokens_BTD, size_BT)

    def encode(self, z_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens after the final norm, and the number of patches that each stands for; None: one each."""
        size_BT: Tensor | None = None
        for block in self.encoder.blocks:
            z_BTD, size_BT = self.run_block(block, z_BTD, size_BT)
        return self.encoder.norm(z_BTD), size_BT

    def run_block(self, block: Any, z_BTD: Tensor, size_BT: Tensor | None) -> tuple[Tensor, Tensor | None]:
        attention, p = block.attention, self.config.num_prefix_tokens
        q, k, v = attention.qkv(block.norm1(z_BTD)).unflatten(-1, (3, attention.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = attention.norm_q(q), attention.norm_k(k)
        attended = attend_by_size(q, k, v, size_BT).transpose(1, 2).flatten(2)
        z_BTD = block.residual1(z_BTD, attention.dropout(attention.project(attended)))
        if r := merge_limit(z_BTD.shape[1] - p, self.r):
            size_BT = z_BTD.new_ones(z_BTD.shape[:2], dtype=torch.float32) if size_BT is None else size_BT
            z_BTD, size_BT = merge_tokens(z_BTD, size_BT, match_tokens(k.mean(dim=1), r, p), p)
        return block.residual2(z_BTD, block.mlp(block.norm2(z_BTD))), size_BT

    def pool_by_size(self, tokens_BTD: Tensor, size_BT: Tensor | None) -> Tensor:
        """The class token, or the mean of all patches: that of the tokens, weighted by size."""
        if size_BT is None or self.config.pooling == "class":
            return self.pool(tokens_BTD)
        p = self.config.num_prefix_tokens
        weights = size_BT[:, p:] / size_BT[:, p:].sum(dim=1, keepdim=True)
        return (tokens_BTD[:, p:] * weights[..., None].to(tokens_BTD.dtype)).sum(dim=1)


def tokens_per_block(grid: Grid, num_prefix_tokens: int, depth: int, r: int) -> list[int]:
    """Number of tokens that enter the attention of each block."""
    counts, patches = [], math.prod(grid)
    for _ in range(depth):
        counts.append(num_prefix_tokens + patches)
        patches -= merge_limit(patches, r)
    return counts
