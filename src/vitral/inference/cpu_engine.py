"""A ViT prepared for CPU inference: no gradients, no dropout, weights packed in advance, uint8 pixels as input.

Folded in when the engine is built:
- mean and standard deviation into the patch embedding, which then reads the uint8 pixels directly;
- scales into the weights of the encoder blocks (see folded_weights.py);
- if pooling reads only the first tokens (the class token), the last block computes only those.

Shapes as in vit.py. M = B·T: all tokens of a batch form one matrix.
"""

from __future__ import annotations

import copy
import statistics
from typing import Literal, cast

import torch
from torch import Tensor, nn

from vitral.data.preprocess import Preprocessing
from vitral.device.cpu import cpu_has_bf16, cpu_has_int8, cpu_has_packed_linear
from vitral.errors import VitralError
from vitral.inference.cpu_blocks import CpuBlock, FloatBlock, Int8Block
from vitral.inference.folded_weights import fold_patch_embedding
from vitral.inference.int8_calibration import ActivationRanges
from vitral.inference.linear import Int8Linear, make_linear
from vitral.models.vit import (
    Encoder,
    EncoderBlock,
    FeedForward,
    Grid,
    MultiHeadAttention,
    PatchEmbedding,
    ViT,
    patchify,
)

CpuPrecision = Literal["fp32", "bf16", "int8"]
CPU_PRECISIONS: tuple[CpuPrecision, ...] = ("fp32", "bf16", "int8")
COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16}  # of q, k and v
BYTES_PER_WEIGHT = {"fp32": 4, "bf16": 2, "int8": 1}


def unsupported_reason(model: ViT) -> str | None:
    """Why a model has no CPU engine, or None if it has one."""
    if type(model).features is not ViT.features or type(model).forward is not ViT.forward:
        return f"{type(model).__name__} overrides the forward pass"
    if type(model.encoder) is not Encoder:
        return f"{type(model.encoder).__name__} is not the standard encoder"
    for block in model.encoder.blocks:
        for part, kind in ((block, EncoderBlock), (block.attention, MultiHeadAttention), (block.mlp, FeedForward)):
            if type(part) is not kind:
                return f"{type(part).__name__} is not part of the standard encoder block"
    return None if cpu_has_packed_linear() else "this build of PyTorch has no oneDNN"


def cpu_unsupported_reason(precision: CpuPrecision) -> str | None:
    """Why this CPU does not support a precision, or None if it does."""
    if precision == "bf16" and not cpu_has_bf16():
        return "the CPU has no bf16 instructions"
    if precision == "int8" and not cpu_has_int8():
        return "the CPU has no 8-bit dot products (AVX-512-VNNI or AMX)"
    return None


class CpuEngine:
    """`CpuEngine(model, preprocessing, "bf16")(images)`: uint8 images (B, C, H, W) to logits (B, K).

    The model itself is not modified. `ranges` is required for int8.
    """

    def __init__(
        self,
        model: ViT,
        preprocessing: Preprocessing,
        precision: CpuPrecision,
        ranges: ActivationRanges | None = None,
    ) -> None:
        if reason := unsupported_reason(model) or cpu_unsupported_reason(precision):
            raise VitralError(f"{precision} engine unavailable: {reason}", "Use --engine reference")
        if precision == "int8" and ranges is None:
            raise VitralError("int8 engine unavailable: no activation ranges", "Measure them with: vitral bench RUN")
        self.precision, self.dtype = precision, COMPUTE_DTYPES[precision]
        self.model = copy.copy(model)  # shares all submodules except the patch embedding
        self.model._modules = dict(model._modules)
        self.model.patch_embedding = _patch_embedding(model.patch_embedding, preprocessing, precision)
        blocks = [block for block in model.encoder.blocks if isinstance(block, EncoderBlock)]
        self.blocks: list[CpuBlock] = [
            Int8Block(block, f"blocks.{index}.", ranges)
            if ranges is not None and precision == "int8"
            else FloatBlock(block, self.dtype)
            for index, block in enumerate(blocks)
        ]
        self.num_pooled_tokens = num_pooled_tokens(model)

    @torch.inference_mode()
    def __call__(self, images_BCHW: Tensor) -> Tensor:
        return self.head(self.features(images_BCHW))

    @torch.inference_mode()
    def features(self, images_BCHW: Tensor) -> Tensor:
        grid = self.model.patch_grid(images_BCHW)
        return self.model.pool(self._encode(self.model.embed(images_BCHW, grid), grid))

    @torch.inference_mode()
    def head(self, features_BD: Tensor) -> Tensor:
        return cast(Tensor, self.model.head(features_BD))

    @property
    def nbytes(self) -> int:
        """Size of the encoder's weights in bytes."""
        return encoder_nbytes(self.model, self.precision)

    def _encode(self, tokens_BTD: Tensor, grid: Grid) -> Tensor:
        encoder, (B, T, D) = self.model.encoder, tokens_BTD.shape
        rope = None if encoder.rotary_position is None else encoder.rotary_position(grid)
        z_MD = tokens_BTD.reshape(B * T, D)
        for block in self.blocks[:-1]:
            z_MD = block(z_MD, B, T, rope)
        z_MD = self.blocks[-1](z_MD, B, self.num_pooled_tokens or T, rope)
        return cast(Tensor, encoder.norm(z_MD.view(B, -1, D)))


def encoder_nbytes(model: ViT, precision: CpuPrecision) -> int:
    weights = (weight for block in model.encoder.blocks for weight in block.parameters())
    return sum(weight.numel() for weight in weights) * BYTES_PER_WEIGHT[precision]


def num_pooled_tokens(model: ViT) -> int | None:
    """Number of leading tokens that pooling reads, or None if it reads all. Found by calling the pooling itself."""
    num_prefix = model.config.num_prefix_tokens
    tokens = torch.randn(1, num_prefix + 2, model.config.width, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        pooled = model.pool(tokens)
        for count in range(1, num_prefix + 2):
            if torch.equal(model.pool(tokens[:, :count]), pooled):
                return count
    return None


def _patch_embedding(embedding: nn.Module, preprocessing: Preprocessing, precision: CpuPrecision) -> PatchEmbedding:
    if type(embedding) is PatchEmbedding and preprocessing.dtype == "uint8":
        return cast(PatchEmbedding, Uint8PatchEmbedding(embedding, preprocessing, precision))
    return cast(PatchEmbedding, NormalisedEmbedding(embedding, preprocessing))


class NormalisedEmbedding(nn.Module):
    """Any other patch embedding or pixel type, preceded by normalisation in fp32: bf16 cannot hold 16-bit pixels."""

    def __init__(self, embedding: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.embedding, self.preprocessing = embedding, preprocessing

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return cast(Tensor, self.embedding(self.preprocessing.normalise(images_BCHW)))


class Uint8PatchEmbedding(nn.Module):
    """Patch embedding on uint8 pixels."""

    def __init__(self, embedding: PatchEmbedding, preprocessing: Preprocessing, precision: CpuPrecision) -> None:
        super().__init__()
        self.patch_size, self.precision, self.dtype = embedding.patch_size, precision, COMPUTE_DTYPES[precision]
        weight, bias = fold_patch_embedding(embedding, preprocessing)
        # The mean pixel is the zero point, so that rounded weights are not multiplied by large values of one sign.
        zero_point = round(255 * statistics.fmean(preprocessing.mean))
        self.project = (
            Int8Linear(weight, bias + zero_point * weight.sum(dim=1), 1.0, zero_point)
            if precision == "int8"
            else make_linear(weight, bias, self.dtype)
        )

    def forward(self, images_BCHW: Tensor) -> Tensor:
        patches_BNE = patchify(images_BCHW, self.patch_size)
        B, N, E = patches_BNE.shape
        pixels_ME = patches_BNE.view(B * N, E)
        if self.precision != "int8":
            pixels_ME = pixels_ME.to(self.dtype)  # 0 to 255 are exact in bf16
        return self.project(pixels_ME).view(B, N, -1).float()
