"""The forward pass for inference with fused kernels: `make_inference_forward`.

Import this module only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.device.memory import defragment
from vitral.device.select import Hardware
from vitral.kernels.embed.op import make_inference_embedding
from vitral.kernels.encoder import FusedEncoder
from vitral.kernels.encoder_checks import fused_block_min_tokens, pools_class_token
from vitral.kernels.token_merging import FusedTokenMerging
from vitral.models.token_merging import TokenMergingViT
from vitral.models.vit import ViT


def make_inference_forward(
    model: ViT, preprocessing: Preprocessing, hardware: Hardware, normalise: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """uint8 images (B, C, H, W) to logits (B, K), for a model that `encoder_checks.unsupported_reason` accepts.

    The model must not be used otherwise: with FP8, the unquantized weights are freed. `normalise` maps uint8 images to
    the model's input and is used where the fused embedding is not.
    """
    encoder = FusedEncoder(
        model.encoder,
        fp8=hardware.fp8,
        dtype=next(model.parameters()).dtype,
        cls_only=pools_class_token(model),
        fused_block_min_tokens=fused_block_min_tokens(model, hardware),
    )
    encoder.weights.free_unquantized(lambda fp8_data: defragment([*model.parameters(), *fp8_data], hardware.device))
    fused_embed = make_inference_embedding(model, preprocessing, hardware, normalise)
    merging = None
    if isinstance(model, TokenMergingViT):
        merging = FusedTokenMerging(encoder, model.r, model.config.num_prefix_tokens)

    def forward(images_BCHW: Tensor) -> Tensor:
        grid = model.patch_grid(images_BCHW)
        if fused_embed is not None and grid == model.config.grid:
            tokens = fused_embed(images_BCHW)
        else:
            tokens = model.embed(normalise(images_BCHW), grid)
        if merging is not None and isinstance(model, TokenMergingViT):
            return model.head(model.pool_by_size(*merging(tokens)))
        return model.head(model.pool(encoder(tokens, grid)))

    return forward
