"""Fused kernels for the encoders of a pretraining method.

Import this module only where Triton is installed.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from vitral.device.select import Hardware
from vitral.kernels.conv_stem.op import FusedConvStem
from vitral.kernels.encoder import FusedEncoder
from vitral.kernels.encoder_checks import (
    ENCODER_TOLERANCE,
    fused_block_min_tokens,
    pools_class_token,
    preserved_state,
    unsupported_reason,
)
from vitral.kernels.self_check import max_relative_error, self_check_failure
from vitral.kernels.training import make_fused_stem, make_reference_embedding
from vitral.ssl.mae import MAE
from vitral.ssl.method import Branch, EncodeFn, PretrainMethod
from vitral.utils.progress import LogFn, no_log

CHECK_IMAGES = 16


def fuse_encoders(method: PretrainMethod, hardware: Hardware, batch_size: int, log: LogFn = no_log) -> bool:
    """Compute the tokens of student and teacher with fused kernels; false if that is not possible.

    The kernels are compared with the reference for views of both sizes. `log` receives the reason against them.
    """
    if not hardware.use_triton:
        return False
    if isinstance(method, MAE):  # each image has its own set of positions, also in RoPE
        log("encoder in PyTorch instead of fused kernels: masked autoencoding drops different patches of each image")
        return False
    vit, num_images = method.student.vit, batch_size * method.views.global_views
    reason = hardware.world.first_reason(unsupported_reason(vit, hardware, batch_size=num_images))
    if reason is None:
        stem = make_fused_stem(vit, hardware, log)
        cls_only = pools_class_token(vit) and not method.needs_patches
        min_tokens = fused_block_min_tokens(vit, hardware, True, num_images, log)
        for branch in filter(None, (method.student, method.teacher)):
            branch.encode_fn = make_encode(branch, hardware, stem is not None, cls_only, min_tokens)
        if method.views.local_views:
            with preserved_state(method, hardware):
                method.eval()
                error = partial(local_view_error, method, hardware)
                reason = hardware.world.first_reason(self_check_failure(error, ENCODER_TOLERANCE[False]))
    if reason is not None:
        for branch in filter(None, (method.student, method.teacher)):
            branch.encode_fn = None
        log(f"encoder in PyTorch instead of fused kernels: {reason}")
    return reason is None


def make_encode(
    branch: Branch, hardware: Hardware, has_fused_stem: bool, cls_only: bool, min_tokens: int | None
) -> EncodeFn:
    """`Branch.encode` with fused kernels. A teacher's weights change without gradients, so all are cast each time."""
    vit = branch.vit
    encoder = FusedEncoder(vit.encoder, cls_only=cls_only, fused_block_min_tokens=min_tokens)
    embed = make_reference_embedding(vit, hardware, FusedConvStem(vit.patch_embedding.stem) if has_fused_stem else None)  # type: ignore[arg-type]

    def encode(images_BCHW: Tensor, mask_BN: Tensor | None) -> Tensor:
        grid = vit.patch_grid(images_BCHW)
        if torch.is_grad_enabled() and encoder.parameters:
            encoder.weights.cast_on_side_stream()
        else:
            encoder.weights.cast(training=False, include_frozen=True)
        with torch.autocast(images_BCHW.device.type, torch.bfloat16, enabled=False):
            return encoder(branch.mask_patches(embed(images_BCHW, grid), grid, mask_BN), grid)

    return encode


def local_view_error(method: PretrainMethod, hardware: Hardware) -> float:
    """Largest relative error, of tokens and of the encoder's gradients, for random images of the local views' size."""
    student, vit = method.student, method.student.vit
    size = method.views.local_image_size(vit.config.image_size, vit.config.patch_size)
    images = torch.randn(CHECK_IMAGES, vit.config.channels, *size, device=hardware.device)
    grad_out = torch.randn(CHECK_IMAGES, vit.config.width, device=hardware.device)
    assert student.encode_fn is not None
    parameters, results = list(vit.encoder.parameters()), []
    for encode in (student.encode_fn, student.encode):
        with hardware.autocast():
            pooled = vit.pool(encode(images, None)).float()
        grads = torch.autograd.grad(pooled, parameters, grad_out, allow_unused=True)
        flat = torch.cat([grad.flatten().float() for grad in grads if grad is not None])
        results.append([pooled.detach(), flat])
    return max_relative_error(*results)
