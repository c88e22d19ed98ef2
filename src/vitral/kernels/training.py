"""The forward pass for training with fused kernels: `make_training_forward`.

Import this module only where Triton is installed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vitral.device.select import Hardware
from vitral.distributed.gradients import GradientReducer
from vitral.kernels.conv_stem.op import FusedConvStem
from vitral.kernels.embed.op import make_training_embedding
from vitral.kernels.encoder import FusedEncoder
from vitral.kernels.encoder_checks import (
    fused_block_min_tokens,
    pools_class_token,
    use_fp8_wgrad,
)
from vitral.kernels.self_check import max_relative_error, self_check_failure
from vitral.kernels.sharded_model import ShardedModel
from vitral.kernels.sharded_weights import ShardedEncoderWeights
from vitral.kernels.short_attention import op as short_attention_op
from vitral.models.variants.hybrid import ConvStem, HybridEmbedding
from vitral.models.vit import Grid, PatchEmbedding, ViT
from vitral.utils.progress import LogFn, no_log

POSITION_TABLE, PATCH_BIAS = "model.position_embedding.table", "model.patch_embedding.project.bias"
STEM_TOLERANCE = 0.3  # relative error of outputs and gradients: bf16 rounding flips some ReLUs


def make_training_forward(
    model: ViT,
    hardware: Hardware,
    log: LogFn = no_log,
    batch_size: int = 16,
    reducer: GradientReducer | None = None,
    sharded: ShardedModel | None = None,
) -> Callable[[Tensor], Tensor]:
    """Images (B, C, H, W) to logits (B, K), for a model that `encoder_checks.unsupported_reason` accepts.

    The encoder, the patch embedding and a small convolutional stem use fused kernels where their self-checks pass;
    everything else is PyTorch in bf16. `log` receives the reason for each kernel that is not used. `reducer` receives
    the gradients of each block as soon as they are final. With FSDP, `sharded` provides the weights of `model`, which
    is its `vit`.
    """
    encoder = make_encoder(model, hardware, log, batch_size, reducer, sharded)
    stem = make_fused_stem(model, hardware, log)
    embed = make_reference_embedding(model, hardware, stem)
    fused_embed = make_training_embedding(model, hardware, log) if stem is None else None

    def forward(images_BCHW: Tensor) -> Tensor:
        grid = model.patch_grid(images_BCHW)
        if sharded is not None:
            sharded.gather()
        if torch.is_grad_enabled() and encoder.parameters:
            encoder.weights.cast_on_side_stream()
        with torch.autocast(images_BCHW.device.type, torch.bfloat16, enabled=False):
            if fused_embed is not None and grid == model.config.grid:
                tokens = model.dropout(fused_embed(images_BCHW))
            else:
                tokens = embed(images_BCHW, grid)
            tokens, kept_BT = model.drop_patches(tokens, grid)
            tokens = encoder(tokens, grid, kept_BT)
        with torch.autocast(images_BCHW.device.type, torch.bfloat16):
            return model.head(model.pool(tokens))

    return forward


def make_encoder(
    model: ViT,
    hardware: Hardware,
    log: LogFn,
    batch_size: int,
    reducer: GradientReducer | None,
    sharded: ShardedModel | None,
) -> FusedEncoder:
    checked_model = model if sharded is None else sharded.check_model
    settings: dict[str, Any] = {
        "fp8": hardware.fp8,
        "cls_only": pools_class_token(model),
        "fp8_wgrad": use_fp8_wgrad(checked_model, hardware, batch_size, log),
    }
    weights = None
    if sharded is not None:
        is_short = model.config.num_tokens <= short_attention_op.MAX_SHORT_TOKENS
        weights = ShardedEncoderWeights(
            model.encoder, sharded.shards, sharded.world, dtype=torch.bfloat16, keep_qkv=is_short, **settings
        )
    return FusedEncoder(
        model.encoder,
        fused_block_min_tokens=fused_block_min_tokens(checked_model, hardware, True, batch_size, log),
        reducer=reducer,
        weights=weights,
        **settings,
    )


def make_reference_embedding(
    model: ViT, hardware: Hardware, stem: FusedConvStem | None
) -> Callable[[Tensor, Grid], Tensor]:
    """The model's own embedding with its parameters in bf16, after `stem` if there is one."""
    embedding = Embedding(model, has_stem=stem is None)
    parameters = {name: p for name, p in embedding.named_parameters() if not name.startswith("model.encoder.")}
    folds_bias = can_fold_patch_bias(model)

    def embed(images_BCHW: Tensor, grid: Grid) -> Tensor:
        current: dict[str, Tensor] = dict(parameters)
        if folds_bias and grid == model.config.grid:  # one addition, and one sum over the batch in the backward pass
            current[POSITION_TABLE] = parameters[POSITION_TABLE] + parameters[PATCH_BIAS]
            current[PATCH_BIAS] = torch.zeros_like(parameters[PATCH_BIAS])
        bf16 = {name: parameter.bfloat16() for name, parameter in current.items()}
        inputs = images_BCHW.bfloat16() if stem is None else stem(images_BCHW)
        return functional_call(embedding, bf16, (inputs, grid))

    # A stem of another kind has enough elementwise operations for the compiler to fuse.
    compiles = stem is None and model.patch_embedding.__class__ is not PatchEmbedding
    return hardware.maybe_compile(embed) if compiles else embed


class Embedding(nn.Module):
    """The embedding of a ViT as a module: images, or without its stem the stem's output, to tokens."""

    def __init__(self, model: ViT, has_stem: bool = True) -> None:
        super().__init__()
        self.model = model if has_stem else without_stem(model)

    def forward(self, images_BCHW: Tensor, grid: Grid) -> Tensor:
        return self.model.embed(images_BCHW, grid)


def without_stem(model: ViT) -> ViT:
    """A shallow copy of the model, with the same parameters, whose stem is the identity."""
    patch_embedding = with_modules(model.patch_embedding, stem=nn.Identity())
    vit: ViT = with_modules(model, patch_embedding=patch_embedding)
    return vit


def with_modules(module: Any, **replacements: nn.Module) -> Any:
    """A shallow copy with some submodules replaced."""
    shallow_copy = copy.copy(module)
    shallow_copy._modules = module._modules | replacements
    return shallow_copy


def can_fold_patch_bias(model: ViT) -> bool:
    """Whether exactly the tokens with a learned position have the patch bias, so that both can be added at once."""
    is_learned = model.position_embedding is not None and not model.position_embedding.fixed
    is_standard = type(model.patch_embedding) in (PatchEmbedding, HybridEmbedding)
    return is_learned and is_standard and model.class_token is None and not model.config.pre_norm


def make_fused_stem(model: ViT, hardware: Hardware, log: LogFn = no_log) -> FusedConvStem | None:
    """The convolutional stem with fused kernels; None if there is none, it is frozen or the self-check fails."""
    stem = getattr(model.patch_embedding, "stem", None)
    if not isinstance(stem, ConvStem) or not all(parameter.requires_grad for parameter in stem.parameters()):
        return None
    rng_state = hardware.rng_state()
    error = partial(stem_error, stem, model.config.channels, model.config.image_size)
    reason = hardware.world.first_reason(self_check_failure(error, STEM_TOLERANCE))
    hardware.set_rng_state(rng_state)
    if reason:
        log(f"convolutional stem without fused kernels: {reason}")
        return None
    return FusedConvStem(stem)


def stem_error(stem: ConvStem, channels: int, image_size: tuple[int, int]) -> float:
    """Largest relative error of the fused stem's output and gradients against the reference."""
    results, images = [], torch.randn(16, channels, *image_size, device=next(stem.parameters()).device)
    for stem_fn in (FusedConvStem(stem), stem):
        out = stem_fn(images).float()
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), list(stem.parameters()))])
    return max_relative_error(*results)
