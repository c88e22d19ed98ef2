"""The convolutional stem for training on a GPU: convolutions by cuDNN, everything between them by Triton kernels.

Feature maps are channels-last, (B, H, W, E). The filters of the first convolution are so small that a GEMM on
extracted patches is faster than cuDNN. GroupNorm writes its output already padded for the next convolution.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from vitral.kernels.conv_stem.kernel import (
    groupnorm_relu_backward_kernel,
    groupnorm_relu_kernel,
    im2col_kernel,
)
from vitral.kernels.precompile import launch
from vitral.kernels.reduce.op import column_sums
from vitral.models.variants.hybrid import GROUP_WIDTH, MATMUL_MAX_FILTER_SIZE, ConvStem

BLOCK_CHANNELS = 32  # 64 bytes per pixel in bf16
IM2COL_BLOCK_ROWS = 128
LARGE_MAP_PIXELS = 512  # larger feature maps use twice as many pixels per block


class FusedConvStem:
    """`fused(images)` equals `stem(images)` in `dtype`: (B, C, H, W) → (B, E, h, w), channels-last in memory."""

    def __init__(self, stem: ConvStem, dtype: torch.dtype = torch.bfloat16) -> None:
        self.layers: list[Any] = list(stem.layers)
        self.dtype = dtype

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        x, first = images_BCHW, self.layers[0].conv
        if first.weight[0].numel() > MATMUL_MAX_FILTER_SIZE and first.extra_padding:
            x = F.pad(x, (0, 1, 0, 1))
        for layer, next_layer in zip(self.layers, [*self.layers[1:], None], strict=True):
            conv, norm = layer.conv, layer.norm
            filters = F.layer_norm(conv.weight, conv.weight.shape[1:], eps=1e-8)  # weight standardisation
            if conv is first and filters[0].numel() <= MATMUL_MAX_FILTER_SIZE:
                x = patch_conv(x, filters.to(self.dtype), conv.stride[0], conv.padding[0], conv.extra_padding)
            else:  # channels-last filters, or cuDNN would convert them for every convolution
                filters = filters.to(self.dtype, memory_format=torch.channels_last)
                x = F.conv2d(x.to(self.dtype), filters, None, conv.stride, conv.padding).permute(0, 2, 3, 1)
            extra_padding = 0 if next_layer is None else next_layer.conv.extra_padding
            x = GroupNormReLU.apply(x.contiguous(), norm.weight, norm.bias, norm.eps, extra_padding)  # type: ignore[no-untyped-call]
            x = x.permute(0, 3, 1, 2)
        return x


def patch_conv(images_BCHW: Tensor, filters_ECkk: Tensor, stride: int, padding: int, extra_padding: int) -> Tensor:
    """Convolution as im2col and one GEMM: (B, C, H, W) → (B, h, w, E).

    `padding` applies to all sides, `extra_padding` to the bottom and right in addition.
    """
    (B, C, H, W), (E, _, k, _) = images_BCHW.shape, filters_ECkk.shape
    h, w = ((side + 2 * padding + extra_padding - k) // stride + 1 for side in (H, W))
    patches = torch.empty(B * h * w, MATMUL_MAX_FILTER_SIZE, device=images_BCHW.device, dtype=filters_ECkk.dtype)
    launch(im2col_kernel, (triton.cdiv(len(patches), IM2COL_BLOCK_ROWS),))(
        images_BCHW.contiguous(), patches, len(patches), H, W, h, w, stride, padding,
        C=C, KERNEL_SIZE=k, BLOCK_ROWS=IM2COL_BLOCK_ROWS, NUM_COLS=MATMUL_MAX_FILTER_SIZE,
    )  # fmt: skip
    return (patches @ F.pad(filters_ECkk.flatten(1), (0, MATMUL_MAX_FILTER_SIZE - C * k * k)).t()).view(B, h, w, E)


class GroupNormReLU(torch.autograd.Function):
    """ReLU(GroupNorm(x)), zero-padded at the bottom and right: (B, H, W, C) → (B, H + pad, W + pad, C)."""

    @staticmethod
    def forward(ctx: Any, x_BHWC: Tensor, weight: Tensor, bias: Tensor, eps: float, extra_padding: int) -> Tensor:
        B, H, W, C = x_BHWC.shape
        out = x_BHWC.new_empty(B, H + extra_padding, W + extra_padding, C)
        stats = x_BHWC.new_empty(B, 2, C, dtype=torch.float32)
        launch(groupnorm_relu_kernel, (B, triton.cdiv(C, BLOCK_CHANNELS)))(
            x_BHWC, weight, bias, out, stats, H, W, H + extra_padding, W + extra_padding, eps, **_blocks(C, H * W)
        )
        ctx.save_for_backward(x_BHWC, stats, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x_BHWC, stats, weight, bias = ctx.saved_tensors
        (B, H, W, C), (out_h, out_w) = x_BHWC.shape, grad_out.shape[1:3]
        grad_x, param_grads = torch.empty_like(x_BHWC), torch.empty_like(stats)
        launch(groupnorm_relu_backward_kernel, (B, triton.cdiv(C, BLOCK_CHANNELS)))(
            x_BHWC, stats, weight, bias, grad_out.contiguous(), grad_x, param_grads, H, W, out_h, out_w,
            **_blocks(C, H * W),
        )  # fmt: skip
        grad_weight, grad_bias = column_sums(param_grads)
        return grad_x, grad_weight, grad_bias, None, None


def _blocks(C: int, pixels: int) -> dict[str, int]:
    block_pixels, num_warps = (128, 8) if pixels > LARGE_MAP_PIXELS else (64, 4)
    return {
        "C": C,
        "GROUP_SIZE": GROUP_WIDTH,
        "BLOCK_CHANNELS": BLOCK_CHANNELS,
        "BLOCK_PIXELS": block_pixels,
        "num_warps": num_warps,
    }
