"""The patch embedding as one kernel: from uint8 images in inference, from augmented images in training.

Patches are read from the images in place. Bias and positions are added in the same kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor

from vitral.data.preprocess import Preprocessing
from vitral.device.select import Hardware
from vitral.kernels.embed import kernel as kernels
from vitral.kernels.linear import weight_gradient
from vitral.kernels.precompile import launch, precompile
from vitral.kernels.self_check import max_relative_error, self_check_failure
from vitral.models.vit import PatchEmbedding, ViT
from vitral.utils.progress import LogFn

BLOCK_M, BLOCK_K = 128, 64  # patches per program, and values of a patch per step
SMALL_BLOCK_M, SMALL_BLOCK_N, MIN_PROGRAMS = 32, 64, 132  # smaller blocks if there were fewer programs than SMs
BOTH_TILES = (0, math.inf)  # values of `min_programs` that select large and small blocks for any number of images
MIN_PADDED_VALUES = 4 * BLOCK_K  # larger patches may have any size, such as 3·14²; the last step is padded with zeros
EMBEDDING_PARAMETERS = ("patch_embedding.", "class_token.", "position_embedding.", "registers")  # name prefixes
EMBEDDING_TOLERANCE = 0.02  # relative error of tokens and gradients: bf16 rounding

EmbedFn = Callable[[Tensor], Tensor]  # images (B, C, H, W) -> tokens (B, T, D)


def is_supported(model: ViT) -> bool:
    config, cls = model.config, type(model)
    is_standard = cls.embed is ViT.embed and type(model.patch_embedding) is PatchEmbedding and not config.pre_norm
    num_values = config.channels * config.patch_size**2
    wastes_little = num_values % BLOCK_K == 0 or num_values > MIN_PADDED_VALUES
    return is_standard and wastes_little and config.width % 16 == 0


def make_inference_embedding(
    model: ViT, preprocessing: Preprocessing, hardware: Hardware, normalise: Callable[[Tensor], Tensor]
) -> EmbedFn | None:
    """The fused embedding of uint8 images of the model's size; None if it is unsupported or fails its self-check.

    `normalise` maps uint8 images to the model's input; the reference for the self-check uses it.
    """
    if not is_supported(model) or preprocessing.image_size != model.config.image_size or preprocessing.dtype != "uint8":
        return None
    embed = InferenceEmbedding(model, preprocessing)
    images = torch.zeros(check_shape(model), dtype=torch.uint8, device=hardware.device)

    @torch.no_grad()
    def error() -> float:
        images.random_(256)
        expected = model.embed(normalise(images), model.config.grid)
        return max(max_relative_error([embed(images, minimum)], [expected]) for minimum in BOTH_TILES)

    precompile(lambda: [embed(images, minimum) for minimum in BOTH_TILES])
    return None if check_embedding(hardware, error) else embed


def make_training_embedding(model: ViT, hardware: Hardware, log: LogFn) -> EmbedFn | None:
    """The fused, differentiable embedding of normalised images, before dropout.

    None if it is unsupported or if the self-check fails.
    """
    if not is_supported(model):
        return None
    embedding = [p for name, p in model.named_parameters() if name.startswith(EMBEDDING_PARAMETERS)]
    parameters = [parameter for parameter in embedding if parameter.requires_grad]
    dtype = torch.bfloat16 if hardware.precision == "bf16" else torch.float32
    embed = partial(embed_images, model, dtype)

    @torch.no_grad()
    def dry_run() -> None:
        ctx, images = SimpleNamespace(), torch.empty(check_shape(model), device=hardware.device)
        args = images.to(dtype), model.patch_embedding.project.weight, *token_offsets(model), model.config.patch_size
        for minimum in BOTH_TILES:
            tokens = EmbedFunction.forward(ctx, *args, minimum)
        EmbedFunction.backward(ctx, tokens)

    def tokens_and_grads(embed_fn: EmbedFn, images: Tensor) -> list[Tensor]:
        tokens = embed_fn(images).float()
        # Positive weights: gradients are then sums that do not cancel.
        grad = torch.linspace(1, 2, tokens.numel(), device=tokens.device).view_as(tokens)
        grads = torch.autograd.grad((tokens * grad).sum(), parameters) if parameters else ()
        return [tokens.detach(), *grads]

    def error() -> float:
        images = torch.randn(check_shape(model), device=hardware.device)
        expected = tokens_and_grads(partial(model.embed, grid=model.config.grid), images)
        outputs = [tokens_and_grads(partial(embed, min_programs=minimum), images) for minimum in BOTH_TILES]
        return max(max_relative_error(output, expected) for output in outputs)

    precompile(dry_run)
    was_training = model.dropout.training
    model.dropout.eval()
    reason = hardware.world.first_reason(check_embedding(hardware, error))
    model.dropout.train(was_training)
    if reason:
        log(f"patch embedding without fused kernel: {reason}")
        return None
    return embed


def check_embedding(hardware: Hardware, error: Callable[[], float]) -> str | None:
    """Why the kernel must not be used, or None. Restores the random state."""
    rng_state = hardware.rng_state()
    try:
        return self_check_failure(error, EMBEDDING_TOLERANCE)
    finally:
        hardware.set_rng_state(rng_state)


def check_shape(model: ViT) -> tuple[int, ...]:
    """Shape of the images for the self-check."""
    return (3, model.config.channels, *model.config.image_size)


def token_offsets(model: ViT) -> tuple[Tensor, Tensor]:
    """The prefix tokens with their positions, (F, D), and bias plus position of each patch, (N, D)."""
    N = math.prod(model.config.grid)
    patch_offsets, prefix = model.patch_embedding.project.bias.expand(N, -1), []
    positions = None if model.position_embedding is None else model.position_embedding.table_for(model.config.grid)[0]
    if positions is not None:
        patch_offsets = patch_offsets + positions[-N:]
    if model.class_token is not None:
        prefix.append(model.class_token.token[0] + (0 if positions is None else positions[:1]))
    if model.registers is not None:
        rows = positions[-N - model.config.registers : -N] if positions is not None else None
        prefix.append(model.registers[0] + (rows if model.config.register_positions and rows is not None else 0))
    return torch.cat(prefix) if prefix else patch_offsets[:0], patch_offsets


class InferenceEmbedding:
    """uint8 images to tokens, for a model whose weights do not change any more."""

    def __init__(self, model: ViT, preprocessing: Preprocessing) -> None:
        weight, patch_area = model.patch_embedding.project.weight.detach(), model.config.patch_size**2
        mean, std = (torch.tensor(v, device=weight.device) * 255 for v in (preprocessing.mean, preprocessing.std))
        self.weight, self.patch_size = weight, model.config.patch_size
        self.scale, self.shift = (v.repeat_interleave(patch_area).contiguous() for v in (1 / std, -mean / std))
        with torch.no_grad():
            self.prefix, patch_offsets = token_offsets(model)
            self.patch_offsets = patch_offsets.float().contiguous()

    def __call__(self, images_BCHW: Tensor, min_programs: float = MIN_PROGRAMS) -> Tensor:
        scale_shift = self.scale, self.shift
        return embed_patches(
            images_BCHW, self.weight, self.prefix, self.patch_offsets, self.patch_size, scale_shift, min_programs
        )


def embed_images(model: ViT, dtype: torch.dtype, images_BCHW: Tensor, *, min_programs: float = MIN_PROGRAMS) -> Tensor:
    """Normalised images to tokens, with gradients for all parameters of the embedding."""
    args = images_BCHW.to(dtype), model.patch_embedding.project.weight, *token_offsets(model), model.config.patch_size
    tokens: Tensor = EmbedFunction.apply(*args, min_programs)  # type: ignore[no-untyped-call]
    return tokens


class EmbedFunction(torch.autograd.Function):
    """[prefix; patches·Wᵀ + patch_offsets]"""

    @staticmethod
    def forward(
        ctx: Any, images_BCHW: Tensor, weight: Tensor, prefix: Tensor, patch_offsets: Tensor, patch_size: int,
        min_programs: float,
    ) -> Tensor:  # fmt: skip
        ctx.images, ctx.num_prefix, ctx.patch_size = images_BCHW, len(prefix), patch_size
        ctx.trains_weight, ctx.num_values = weight.requires_grad, weight.shape[1]
        dtype, offsets = images_BCHW.dtype, patch_offsets.float().contiguous()
        return embed_patches(
            images_BCHW, weight.to(dtype), prefix.to(dtype), offsets, patch_size, min_programs=min_programs
        )

    @staticmethod
    def backward(ctx: Any, grad_out_BTD: Tensor) -> tuple[Tensor | None, ...]:
        grad_out = grad_out_BTD.to(ctx.images.dtype).contiguous()
        grad_offsets = grad_out.sum(0, dtype=torch.float32)
        grad_weight = None
        if ctx.trains_weight:
            patches = unfold_patches(ctx.images, ctx.patch_size, ctx.num_prefix)
            grad_weight = weight_gradient(grad_out.flatten(0, 1), patches)[:, : ctx.num_values].contiguous()
        return None, grad_weight, grad_offsets[: ctx.num_prefix], grad_offsets[ctx.num_prefix :], None, None


def embed_patches(
    images_BCHW: Tensor, weight_DK: Tensor, prefix_FD: Tensor, patch_offsets_ND: Tensor, patch_size: int,
    scale_shift: tuple[Tensor, Tensor] | None = None, min_programs: float = MIN_PROGRAMS,
) -> Tensor:  # fmt: skip
    """Tokens (B, F + N, D). `scale_shift`: pixels·scale + shift normalises the K values of a patch.

    Blocks are smaller if there were fewer than `min_programs` large ones.
    """
    (B, C, H, W), (N, D), num_prefix = images_BCHW.shape, patch_offsets_ND.shape, len(prefix_FD)
    tokens = weight_DK.new_empty(B, num_prefix + N, D)
    if num_prefix:
        tokens[:, :num_prefix] = prefix_FD
    block_m, block_n = BLOCK_M, min(D & -D, 128)  # a power of two that divides D
    if triton.cdiv(B * N, block_m) * (D // block_n) < min_programs:
        block_m, block_n = SMALL_BLOCK_M, min(block_n, SMALL_BLOCK_N)
    launch(kernels.embed_patches_kernel, (D // block_n, triton.cdiv(B * N, block_m)))(
        images_BCHW.contiguous(), *(scale_shift or (None, None)), weight_DK, patch_offsets_ND, tokens, B * N,
        CHANNELS=C, HEIGHT=H, WIDTH=W, PATCH=patch_size, DIM=D, NUM_PREFIX=num_prefix,
        NORMALISE=scale_shift is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=BLOCK_K, NUM_STAGES=3, num_warps=4,
    )  # fmt: skip
    return tokens


def unfold_patches(images_BCHW: Tensor, patch_size: int, num_prefix: int) -> Tensor:
    """The patches as rows (B·(F + N), K), with zeros for the prefix tokens and up to a multiple of BLOCK_K columns."""
    B, C, H, W = images_BCHW.shape
    num_tokens, block_m = B * (num_prefix + H * W // patch_size**2), 32
    K = triton.cdiv(C * patch_size**2, BLOCK_K) * BLOCK_K
    out = images_BCHW.new_empty(num_tokens, K)
    launch(kernels.unfold_patches_kernel, (triton.cdiv(num_tokens, block_m), K // BLOCK_K))(
        images_BCHW.contiguous(), out, num_tokens,
        CHANNELS=C, HEIGHT=H, WIDTH=W, PATCH=patch_size, NUM_PREFIX=num_prefix, BLOCK_M=block_m, BLOCK_K=BLOCK_K,
    )  # fmt: skip
    return out
