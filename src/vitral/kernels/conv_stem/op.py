"""A small convolutional stem for training on a GPU: filters by PyTorch, what stands between them by our kernels.

The map lies pixel by pixel, B H W E. The first filters see so few numbers that their product with the patches of the
image is quicker than a convolution; a norm writes its result with the row and column of zeros that the next one needs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from vitral.kernels import ops as launch
from vitral.kernels.conv_stem import kernel as kernels
from vitral.models.variants.hybrid import FEW, GROUP_WIDTH, ConvStem

CHANNELS = 32  # that a program takes: 64 bytes of each pixel
ROWS = 128  # places of filters
LARGE = 512  # pixels of a map, beyond which a program takes twice as many at once


class FusedStem:
    """`fused(images)` is `stem(images)`, in bf16 or another number: B E h w, whose pixels lie one after the other."""

    def __init__(self, stem: ConvStem, number: torch.dtype = torch.bfloat16) -> None:
        self.layers: list[Any] = list(stem.layers)
        self.number = number

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        x, first = images_BCHW, self.layers[0].conv
        if first.weight[0].numel() > FEW and first.odd:
            x = F.pad(x, (0, 1, 0, 1))
        for layer, after in zip(self.layers, [*self.layers[1:], None], strict=True):
            conv, norm = layer.conv, layer.norm
            filters = F.layer_norm(conv.weight, conv.weight.shape[1:], eps=1e-8)
            if conv is first and filters[0].numel() <= FEW:
                x = by_patches(x, filters.to(self.number), conv.stride[0], conv.padding[0], conv.odd)
            else:  # filters lie as the map does, or they would be laid so for each product
                filters = filters.to(self.number, memory_format=torch.channels_last)
                x = F.conv2d(x.to(self.number), filters, None, conv.stride, conv.padding).permute(0, 2, 3, 1)
            room = 0 if after is None else after.conv.odd
            x = NormRelu.apply(x.contiguous(), norm.weight, norm.bias, norm.eps, room)  # type: ignore[no-untyped-call]
            x = x.permute(0, 3, 1, 2)
        return x


def by_patches(images_BCHW: Tensor, filters_ECkk: Tensor, stride: int, before: int, odd: int) -> Tensor:
    """The convolution as one product of filters and patches: B h w E."""
    (B, C, H, W), (E, _, k, _) = images_BCHW.shape, filters_ECkk.shape
    h, w = ((side + 2 * before + odd - k) // stride + 1 for side in (H, W))
    rows = torch.empty(B * h * w, FEW, device=images_BCHW.device, dtype=filters_ECkk.dtype)
    kernels.patches[(triton.cdiv(len(rows), ROWS),)](
        images_BCHW.contiguous(), rows, len(rows), H, W, h, w, stride, before, C=C, SIDE=k, ROWS=ROWS, COLUMNS=FEW
    )
    return (rows @ F.pad(filters_ECkk.flatten(1), (0, FEW - C * k * k)).t()).view(B, h, w, E)


class NormRelu(torch.autograd.Function):
    """ReLU(GN(x)) with `room` rows and columns of zeros behind: B H W C → B H+room W+room C."""

    @staticmethod
    def forward(ctx: Any, x_BHWC: Tensor, weight: Tensor, bias: Tensor, eps: float, room: int) -> Tensor:
        B, H, W, C = x_BHWC.shape
        out, stats = x_BHWC.new_empty(B, H + room, W + room, C), x_BHWC.new_empty(B, 2, C, dtype=torch.float32)
        kernels.norm_relu[(B, triton.cdiv(C, CHANNELS))](
            x_BHWC, weight, bias, out, stats, H, W, H + room, W + room, eps, **cut(C, H * W)
        )
        ctx.save_for_backward(x_BHWC, stats, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_BHWC, stats, weight, bias = ctx.saved_tensors
        (B, H, W, C), (H1, W1) = x_BHWC.shape, dy.shape[1:3]
        dx, sums = torch.empty_like(x_BHWC), torch.empty_like(stats)
        kernels.norm_relu_back[(B, triton.cdiv(C, CHANNELS))](
            x_BHWC, stats, weight, bias, dy.contiguous(), dx, sums, H, W, H1, W1, **cut(C, H * W)
        )
        dgain, dshift = launch.total(sums)
        return dx, dgain, dshift, None, None


def cut(C: int, pixels: int) -> dict[str, int]:
    rows, warps = (128, 8) if pixels > LARGE else (64, 4)
    return {"C": C, "GROUP": GROUP_WIDTH, "CHANNELS": CHANNELS, "ROWS": rows, "num_warps": warps}
