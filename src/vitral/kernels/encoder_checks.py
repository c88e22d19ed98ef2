"""Selection of the fused kernels for a model on this machine: each is compared with the reference first.

Each check compiles its kernels in parallel, runs them on random inputs and leaves the model and the random state as
they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitral.device.select import Hardware
from vitral.kernels import encoder as fused_encoder
from vitral.kernels.block import op as block_op
from vitral.kernels.dropout.reference import same_dropout
from vitral.kernels.encoder import FusedEncoder, unsupported_architecture
from vitral.kernels.encoder_forward import norm_params
from vitral.kernels.layernorm_gelu.op import add_layernorm, bias_gelu
from vitral.kernels.linear import FP8_WGRAD_MIN_WIDTH, linear_layers
from vitral.kernels.precompile import precompile
from vitral.kernels.self_check import max_relative_error, self_check_failure
from vitral.models.vit import ViT
from vitral.utils.progress import LogFn, no_log

# Tolerated relative errors (of Euclidean norms)
ENCODER_TOLERANCE = {False: 0.1, True: 0.5}  # bf16, FP8: above the rounding errors that tens of blocks accumulate
FP8_WGRAD_TOLERANCE = 0.2  # per weight matrix: FP8 rounds each operand once more, by 2 to 4%
EXPAND_GELU_TOLERANCE = 0.05  # two FP8 results, each rounded by 2.7%

LARGE_IMAGE_PIXELS = 224 * 224  # checks use 16 images up to this size, 2 beyond


def unsupported_reason(model: ViT, hardware: Hardware, training: bool = True, batch_size: int = 16) -> str | None:
    """Why this model cannot use the fused encoder on this machine, or None.

    Includes a comparison with the reference encoder. `batch_size`: images per training step.
    """
    if reason := unsupported_architecture(model, hardware.fp8, training):
        return reason
    error = partial(encoder_error, model, hardware, training, batch_size)
    dry_run = partial(run_dry, model, hardware, training, batch_size)
    return run_self_check(model, hardware, dry_run, error, ENCODER_TOLERANCE[hardware.fp8])


def run_self_check(
    model: ViT, hardware: Hardware, dry_run: Callable[[], None], error: Callable[[], float], tolerance: float
) -> str | None:
    """Precompile what `dry_run` launches, then return why `error` fails or exceeds the tolerance, or None."""
    with preserved_state(model, hardware):
        precompile(dry_run)
        model.eval()
        return self_check_failure(error, tolerance)


@contextmanager
def preserved_state(model: nn.Module, hardware: Hardware) -> Iterator[None]:
    """Restore the mode of the model and the random state when the context ends."""
    rng_state, was_training = hardware.rng_state(), model.training
    try:
        yield
    finally:
        model.train(was_training)
        hardware.set_rng_state(rng_state)


def use_fp8_wgrad(model: ViT, hardware: Hardware, batch_size: int, log: LogFn) -> bool:
    """Whether weight-gradient GEMMs run in FP8: in wide models, if they agree with bf16."""
    if not (hardware.fp8 and model.config.width >= FP8_WGRAD_MIN_WIDTH):
        return False
    if not any(map(trains_all_weights, model.encoder.blocks)):
        return False
    dry_run = partial(run_dry, model, hardware, True, batch_size, fp8_wgrad=True)
    error = partial(fp8_wgrad_error, model, hardware, batch_size)
    reason = run_self_check(model, hardware, dry_run, error, FP8_WGRAD_TOLERANCE)
    if reason := hardware.world.first_reason(reason):
        log(f"weight-gradient GEMMs in bf16: {reason}")
    return not reason


def trains_all_weights(block: Any) -> bool:
    return all(layer.weight.requires_grad for layer in linear_layers(block))


def fused_block_min_tokens(
    model: ViT, hardware: Hardware, training: bool = False, batch_size: int = 16, log: LogFn = no_log
) -> int | None:
    """Minimum number of tokens for which `FusedEncoder` uses the kernels of `block`; None: never.

    bf16: the post-attention kernel, for narrow models, unless training saves norms and GELU, drops branches or
    activations, or checkpoints activations.
    FP8: the expansion with GELU, in inference only.
    """
    config = model.config
    if config.activation == "swiglu":
        return None
    widths = config.width, config.hidden_width
    if hardware.fp8:
        has_only_class_tokens = config.depth == 1 and pools_class_token(model)
        if training or has_only_class_tokens or not block_op.expand_gelu_supports(*widths):
            return None
        error, tolerance = partial(expand_gelu_error, model, hardware), EXPAND_GELU_TOLERANCE
        minimum = block_op.MIN_EXPAND_TOKENS
    else:
        hidden_size = batch_size * config.num_tokens * config.hidden_width
        is_plain = not (config.drop_path or config.dropout or model.encoder.activation_checkpointing)
        if training and (not is_plain or hidden_size <= fused_encoder.RECOMPUTE_THRESHOLD):
            return None
        if not block_op.post_attention_supports(*widths, training):
            return None
        error = partial(encoder_error, model, hardware, training, batch_size, fused_block_min_tokens=0)
        tolerance, minimum = ENCODER_TOLERANCE[False], block_op.MIN_BLOCK_TOKENS
    dry_run = partial(run_dry, model, hardware, training, batch_size, fused_block_min_tokens=0)
    reason = run_self_check(model, hardware, dry_run, error, tolerance)
    if reason := hardware.world.first_reason(reason) if training else reason:
        log(f"blocks without their fused kernel: {reason}")
        return None
    return minimum


def encoder_error(
    model: ViT, hardware: Hardware, training: bool, batch_size: int = 16, fused_block_min_tokens: int | None = None
) -> float:
    """Relative error of the fused encoder against the reference, on random tokens.

    The maximum over the output and, in training, the gradients of the tokens, of all matrices and of all vectors.
    """
    C, (H, W), grid = model.config.channels, model.config.image_size, model.config.grid
    num_images = check_batch_size(model)
    with torch.no_grad():
        embedded = model.embed(torch.zeros(num_images, C, H, W).to(next(model.parameters())), grid)
    tokens, grad_out = torch.randn_like(embedded), torch.randn_like(embedded)[:, : num_output_tokens(model)]
    fused = make_check_encoder(model, hardware, num_images, batch_size, fused_block_min_tokens=fused_block_min_tokens)
    results = []
    trained = [parameter for parameter in model.encoder.parameters() if training and parameter.requires_grad]
    with same_dropout(fused) if training else nullcontext():
        for encoder in (fused, model.encoder):
            inputs = tokens.clone().requires_grad_(training and trains_embedding(model))
            with torch.set_grad_enabled(training), hardware.autocast():
                out = encoder(inputs, grid)[:, : grad_out.shape[1]].to(grad_out)
            results.append([out.detach()])
            if out.requires_grad:
                grads = torch.autograd.grad(out, [*([inputs] if inputs.requires_grad else []), *trained], grad_out)
                ranks = {grad.ndim for grad in grads}  # 3: tokens, 2: matrices, 1: vectors
                results[-1] += [torch.cat([grad.flatten() for grad in grads if grad.ndim == rank]) for rank in ranks]
    return max_relative_error(*results)


def fp8_wgrad_error(model: ViT, hardware: Hardware, batch_size: int) -> float:
    """Largest relative error, over all weight matrices, of FP8 weight gradients against bf16 ones."""
    num_images = check_batch_size(model)
    tokens = torch.randn(num_images, model.config.num_tokens, model.config.width, device=hardware.device)
    grad_out = torch.randn_like(tokens)[:, : num_output_tokens(model)]
    weight_grads: list[list[Tensor]] = []
    for fp8_wgrad in (True, False):
        encoder = make_check_encoder(model, hardware, num_images, batch_size, fp8_wgrad)
        out = encoder(tokens, model.config.grid)
        param_grads = torch.autograd.grad(out, encoder.parameters, grad_out.to(encoder.dtype))
        weight_grads.append([grad for grad in param_grads if grad.ndim == 2])
    return max_relative_error(*weight_grads)


@torch.no_grad()
def expand_gelu_error(model: ViT, hardware: Hardware) -> float:
    """Relative error of the first block's fused expansion with GELU against a GEMM followed by GELU, both in FP8."""
    num_images = check_batch_size(model)
    encoder = make_check_encoder(model, hardware, num_images, num_images)
    block, activation = encoder.blocks[0], model.config.activation
    layer = block.mlp.expand
    x = torch.randn(num_images * model.config.num_tokens, model.config.width, device=hardware.device).to(encoder.dtype)
    x_fp8 = add_layernorm(x, None, None, None, norm_params(block.norm2), fp8=True, store_normed=False).normed_fp8
    assert x_fp8 is not None
    hidden, bound = encoder.weights.linear(None, x_fp8, layer.weight)
    fused = block_op.expand_gelu_fp8(x_fp8, encoder.weights.quantized[layer.weight], layer.bias, activation)
    _, reference = bias_gelu(hidden, layer.bias, activation, bound)
    assert reference is not None
    return max_relative_error([fused.data.float() * fused.scales], [reference.data.float() * reference.scales])


@torch.no_grad()
def run_dry(
    model: ViT, hardware: Hardware, training: bool, batch_size: int, fp8_wgrad: bool = False,
    fused_block_min_tokens: int | None = None,
) -> None:  # fmt: skip
    """Launch every kernel variant of the self-check and of the batches after it.

    Triton compiles separate variants for sizes that are 1 or multiples of 16. A large batch is therefore replaced by a
    small one with the same remainder.
    """
    config = model.config
    small_batch = batch_size if batch_size < 32 else 16 + batch_size % 16
    batches = ((small_batch, model.training),) if training else ((1, False), (2, False))
    for num_images, is_training in ((check_batch_size(model), False), *batches):
        encoder = make_check_encoder(
            model.train(is_training), hardware, num_images, batch_size, fp8_wgrad, fused_block_min_tokens
        )
        tokens = torch.empty(num_images, model.config.num_tokens, config.width, device=hardware.device)
        tokens.requires_grad_(training and trains_embedding(model))
        encoder.forward_backward(tokens, config.grid) if training else encoder(tokens, config.grid)


def make_check_encoder(
    model: ViT, hardware: Hardware, num_images: int, batch_size: int, fp8_wgrad: bool = False,
    fused_block_min_tokens: int | None = None,
) -> FusedEncoder:  # fmt: skip
    """A fused encoder that saves the same activations for `num_images` as for a whole batch."""
    return FusedEncoder(
        model.encoder,
        fp8=hardware.fp8,
        dtype=torch.bfloat16 if hardware.precision == "bf16" else torch.float32,
        recompute_threshold=fused_encoder.RECOMPUTE_THRESHOLD * num_images // batch_size,
        cls_only=pools_class_token(model),
        fp8_wgrad=fp8_wgrad,
        fused_block_min_tokens=fused_block_min_tokens,
    )


def check_batch_size(model: ViT) -> int:
    """Images per self-check. 16: the number of tokens is then a multiple of 16, as in training."""
    H, W = model.config.image_size
    return 16 if H * W <= LARGE_IMAGE_PIXELS else 2


def trains_embedding(model: ViT) -> bool:
    """Whether gradients flow into the encoder's input."""
    later = ("encoder.", "attention_pooling.", "pooled_norm.", "head.")
    return any(p.requires_grad for name, p in model.named_parameters() if not name.startswith(later))


def pools_class_token(model: ViT) -> bool:
    """Whether the head reads only the class token."""
    return model.config.pooling == "class"


def num_output_tokens(model: ViT) -> int | None:
    """Tokens per image that the fused encoder returns; None: all."""
    return 1 if pools_class_token(model) else None
