"""Triton kernels for a small convolutional stem: patch extraction and GroupNorm + ReLU.

Feature maps are channels-last, (B, H, W, C). A GroupNorm program handles a block of channels of one image and reads
the pixels twice, for the statistics and for the result; the second pass reads from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def im2col_kernel(
    images_ptr, patches_ptr, num_rows, H, W, out_h, out_w, stride, padding,
    C: tl.constexpr, KERNEL_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, NUM_COLS: tl.constexpr,
):  # fmt: skip
    """patches[row, (c, ky, kx)] = images[b, c, y·stride - padding + ky, x·stride - padding + kx], 0 outside the image.

    Grid: (blocks of rows,). A row is an output position (b, y, x).

    images: (B, C, H, W) fp32 or bf16. patches: (num_rows = B·out_h·out_w, NUM_COLS); columns from
    C·KERNEL_SIZE² on are 0. Reads are coalesced along the image row; the tile is transposed so that writes are
    coalesced along the patch.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, NUM_COLS)
    channel, tap = cols // (KERNEL_SIZE * KERNEL_SIZE), cols % (KERNEL_SIZE * KERNEL_SIZE)
    y = (tap // KERNEL_SIZE)[:, None] + ((rows // out_w) % out_h * stride - padding)[None, :]
    x = (tap % KERNEL_SIZE)[:, None] + (rows % out_w * stride - padding)[None, :]
    mask = (rows < num_rows)[None, :] & (channel < C)[:, None] & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    offsets = ((rows // (out_h * out_w)).to(tl.int64)[None, :] * C + channel[:, None]) * H * W + y * W + x
    pixels = tl.trans(tl.load(images_ptr + offsets, mask, 0.0).to(patches_ptr.dtype.element_ty))
    tl.store(patches_ptr + rows.to(tl.int64)[:, None] * NUM_COLS + cols[None, :], pixels, (rows < num_rows)[:, None])


@triton.jit
def _group_sums(x_C, BLOCK_CHANNELS: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """For each channel, the sum over its group: (BLOCK_CHANNELS,) → (BLOCK_CHANNELS,)."""
    sums = tl.sum(tl.reshape(x_C, (BLOCK_CHANNELS // GROUP_SIZE, GROUP_SIZE)), axis=1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (BLOCK_CHANNELS // GROUP_SIZE, GROUP_SIZE)), (BLOCK_CHANNELS,))


@triton.jit
def groupnorm_relu_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, stats_ptr, H, W, out_h, out_w, eps,
    C: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, BLOCK_PIXELS: tl.constexpr,
):  # fmt: skip
    """out = ReLU(GroupNorm(x)·weight + bias), padded with zeros at the bottom and right to (out_h, out_w).

    Grid: (B, blocks of channels).

    x: (B, H, W, C) bf16 or fp32. weight, bias: (C,) fp32. out: (B, out_h, out_w, C) as x.
    stats: (B, 2, C) fp32, mean and 1/std of each channel's group, saved for the backward pass.
    Reads x twice and writes out once; Var(x) = E[x²] - E[x]², accumulated in fp32.
    """
    image = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel_mask = (channels < C)[None, :]
    x_sum = tl.zeros((BLOCK_PIXELS, BLOCK_CHANNELS), tl.float32)
    x_sq_sum = tl.zeros((BLOCK_PIXELS, BLOCK_CHANNELS), tl.float32)
    for start in range(0, H * W, BLOCK_PIXELS):
        pixels = start + tl.arange(0, BLOCK_PIXELS)
        offsets = (image * H * W + pixels)[:, None] * C + channels[None, :]
        x = tl.load(x_ptr + offsets, (pixels < H * W)[:, None] & channel_mask, 0.0).to(tl.float32)
        x_sum += x
        x_sq_sum += x * x
    count = H * W * GROUP_SIZE
    mean = _group_sums(tl.sum(x_sum, axis=0), BLOCK_CHANNELS, GROUP_SIZE) / count
    var = _group_sums(tl.sum(x_sq_sum, axis=0), BLOCK_CHANNELS, GROUP_SIZE) / count - mean * mean
    rstd = tl.rsqrt(tl.maximum(var, 0.0) + eps)
    tl.store(stats_ptr + image * 2 * C + channels, mean, channels < C)
    tl.store(stats_ptr + image * 2 * C + C + channels, rstd, channels < C)
    scale = tl.load(weight_ptr + channels, channels < C, 0.0) * rstd
    shift = tl.load(bias_ptr + channels, channels < C, 0.0) - mean * scale
    for start in range(0, out_h * out_w, BLOCK_PIXELS):
        out_pixels = start + tl.arange(0, BLOCK_PIXELS)
        inside = (out_pixels // out_w < H) & (out_pixels % out_w < W)
        pixels = out_pixels // out_w * W + out_pixels % out_w
        offsets = (image * H * W + pixels)[:, None] * C + channels[None, :]
        x = tl.load(x_ptr + offsets, inside[:, None] & channel_mask, 0.0).to(tl.float32)
        out = tl.where(inside[:, None], tl.maximum(x * scale[None, :] + shift[None, :], 0.0), 0.0)
        out_offsets = (image * out_h * out_w + out_pixels)[:, None] * C + channels[None, :]
        tl.store(
            out_ptr + out_offsets,
            out.to(out_ptr.dtype.element_ty),
            (out_pixels < out_h * out_w)[:, None] & channel_mask,
        )


@triton.jit
def groupnorm_relu_backward_kernel(
    x_ptr, stats_ptr, weight_ptr, bias_ptr, grad_out_ptr, grad_x_ptr, param_grads_ptr, H, W, out_h, out_w,
    C: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, BLOCK_PIXELS: tl.constexpr,
):  # fmt: skip
    """Backward pass of groupnorm_relu_kernel. With x̂ = (x - mean)·rstd and g = grad_out where ReLU is active:

        grad_weight = Σ g·x̂      grad_bias = Σ g      (sums over the pixels of one image)
        grad_x = rstd·(g·weight - mean_group(g·weight) - x̂·mean_group(g·weight·x̂))

    Grid: (B, blocks of channels).

    x, grad_x: (B, H, W, C). grad_out: (B, out_h, out_w, C). stats: (B, 2, C) fp32.
    param_grads: (B, 2, C) fp32, grad_weight and grad_bias per image; the caller adds them up over the batch.
    Reads x and grad_out twice and writes grad_x once.
    """
    image = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    channel_mask = (channels < C)[None, :]
    mean = tl.load(stats_ptr + image * 2 * C + channels, channels < C, 0.0)[None, :]
    rstd = tl.load(stats_ptr + image * 2 * C + C + channels, channels < C, 0.0)[None, :]
    weight = tl.load(weight_ptr + channels, channels < C, 0.0)
    bias = tl.load(bias_ptr + channels, channels < C, 0.0)[None, :]
    grad_bias_sum = tl.zeros((BLOCK_PIXELS, BLOCK_CHANNELS), tl.float32)
    grad_weight_sum = tl.zeros((BLOCK_PIXELS, BLOCK_CHANNELS), tl.float32)
    for start in range(0, H * W, BLOCK_PIXELS):
        pixels = start + tl.arange(0, BLOCK_PIXELS)
        mask = (pixels < H * W)[:, None] & channel_mask
        x = tl.load(x_ptr + (image * H * W + pixels)[:, None] * C + channels[None, :], mask, 0.0)
        x_hat = (x - mean) * rstd
        out_offsets = (image * out_h * out_w + pixels // W * out_w + pixels % W)[:, None] * C + channels[None, :]
        grad = tl.load(grad_out_ptr + out_offsets, mask, 0.0).to(tl.float32)
        grad = tl.where(mask & (x_hat * weight[None, :] + bias > 0), grad, 0.0)
        grad_bias_sum += grad
        grad_weight_sum += grad * x_hat
    grad_bias, grad_weight = tl.sum(grad_bias_sum, axis=0), tl.sum(grad_weight_sum, axis=0)
    tl.store(param_grads_ptr + image * 2 * C + channels, grad_weight, channels < C)
    tl.store(param_grads_ptr + image * 2 * C + C + channels, grad_bias, channels < C)
    count = H * W * GROUP_SIZE
    grad_mean = (_group_sums(grad_bias * weight, BLOCK_CHANNELS, GROUP_SIZE) / count)[None, :]
    grad_x_hat_mean = (_group_sums(grad_weight * weight, BLOCK_CHANNELS, GROUP_SIZE) / count)[None, :]
    for start in range(0, H * W, BLOCK_PIXELS):
        pixels = start + tl.arange(0, BLOCK_PIXELS)
        mask = (pixels < H * W)[:, None] & channel_mask
        x_offsets = (image * H * W + pixels)[:, None] * C + channels[None, :]
        x_hat = (tl.load(x_ptr + x_offsets, mask, 0.0) - mean) * rstd
        out_offsets = (image * out_h * out_w + pixels // W * out_w + pixels % W)[:, None] * C + channels[None, :]
        grad = tl.load(grad_out_ptr + out_offsets, mask, 0.0).to(tl.float32)
        grad = tl.where(x_hat * weight[None, :] + bias > 0, grad * weight[None, :], 0.0)
        tl.store(
            grad_x_ptr + x_offsets,
            (rstd * (grad - grad_mean - x_hat * grad_x_hat_mean)).to(grad_x_ptr.dtype.element_ty),
            mask,
        )
