"""What stands between the convolutions of a small stem: Triton kernels for a GPU.

A map lies pixel by pixel, B P C. Group norm takes a few channels of all pixels together, so a program has some channels
of one image and goes over its pixels twice: for the sums, then for the result, when they are still near.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def patches(
    images, out, M, H, W, h, w, stride, before,
    C: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """For each place of a filter the pixels that it sees, side by side, zeros beyond the image: M COLUMNS.

    Read by threads that stand side by side in the image, written by such that do in the result."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    channel, place = columns // (SIDE * SIDE), columns % (SIDE * SIDE)
    y = (place // SIDE)[:, None] + ((rows // w) % h * stride - before)[None, :]
    x = (place % SIDE)[:, None] + (rows % w * stride - before)[None, :]
    seen = (rows < M)[None, :] & (channel < C)[:, None] & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    at = ((rows // (h * w)).to(tl.int64)[None, :] * C + channel[:, None]) * H * W + y * W + x
    pixels = tl.trans(tl.load(images + at, seen, 0.0).to(out.dtype.element_ty))
    tl.store(out + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :], pixels, (rows < M)[:, None])


@triton.jit
def _of_groups(x_C, CHANNELS: tl.constexpr, GROUP: tl.constexpr):
    """The sum over each group of channels, for each of its channels."""
    sums = tl.sum(tl.reshape(x_C, (CHANNELS // GROUP, GROUP)), axis=1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (CHANNELS // GROUP, GROUP)), (CHANNELS,))


@triton.jit
def norm_relu(
    x, weight, bias, out, stats, H, W, H1, W1, eps,
    C: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ReLU(GN(x)), into a map that may be larger: H1 by W1 pixels, zeros behind."""
    image = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = (channels < C)[None, :]
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    square = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(0, H * W, ROWS):
        rows = start + tl.arange(0, ROWS)
        at = (image * H * W + rows)[:, None] * C + channels[None, :]
        y = tl.load(x + at, (rows < H * W)[:, None] & known, 0.0).to(tl.float32)
        total += y
        square += y * y
    count = H * W * GROUP
    mean = _of_groups(tl.sum(total, axis=0), CHANNELS, GROUP) / count
    spread = _of_groups(tl.sum(square, axis=0), CHANNELS, GROUP) / count - mean * mean
    spread = tl.rsqrt(tl.maximum(spread, 0.0) + eps)
    tl.store(stats + image * 2 * C + channels, mean, channels < C)
    tl.store(stats + image * 2 * C + C + channels, spread, channels < C)
    gain = tl.load(weight + channels, channels < C, 0.0) * spread
    shift = tl.load(bias + channels, channels < C, 0.0) - mean * gain
    for start in range(0, H1 * W1, ROWS):
        places = start + tl.arange(0, ROWS)
        there = (places // W1 < H) & (places % W1 < W)
        rows = places // W1 * W + places % W1
        at = (image * H * W + rows)[:, None] * C + channels[None, :]
        y = tl.load(x + at, there[:, None] & known, 0.0).to(tl.float32)
        y = tl.where(there[:, None], tl.maximum(y * gain[None, :] + shift[None, :], 0.0), 0.0)
        to = (image * H1 * W1 + places)[:, None] * C + channels[None, :]
        tl.store(out + to, y.to(out.dtype.element_ty), (places < H1 * W1)[:, None] & known)


@triton.jit
def norm_relu_back(
    x, stats, weight, bias, dy, dx, sums, H, W, H1, W1,
    C: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and each image's sums for the norm's weight and bias."""
    image = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = (channels < C)[None, :]
    mean = tl.load(stats + image * 2 * C + channels, channels < C, 0.0)[None, :]
    spread = tl.load(stats + image * 2 * C + C + channels, channels < C, 0.0)[None, :]
    gain = tl.load(weight + channels, channels < C, 0.0)
    shift = tl.load(bias + channels, channels < C, 0.0)[None, :]
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    along = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(0, H * W, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < H * W)[:, None] & known
        unit = (tl.load(x + (image * H * W + rows)[:, None] * C + channels[None, :], inside, 0.0) - mean) * spread
        at = (image * H1 * W1 + rows // W * W1 + rows % W)[:, None] * C + channels[None, :]
        d = tl.load(dy + at, inside, 0.0).to(tl.float32)
        d = tl.where(inside & (unit * gain[None, :] + shift > 0), d, 0.0)
        total += d
        along += d * unit
    dshift, dgain = tl.sum(total, axis=0), tl.sum(along, axis=0)
    tl.store(sums + image * 2 * C + channels, dgain, channels < C)
    tl.store(sums + image * 2 * C + C + channels, dshift, channels < C)
    count = H * W * GROUP
    middle = (_of_groups(dshift * gain, CHANNELS, GROUP) / count)[None, :]
    slope = (_of_groups(dgain * gain, CHANNELS, GROUP) / count)[None, :]
    for start in range(0, H * W, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < H * W)[:, None] & known
        own = (image * H * W + rows)[:, None] * C + channels[None, :]
        unit = (tl.load(x + own, inside, 0.0) - mean) * spread
        at = (image * H1 * W1 + rows // W * W1 + rows % W)[:, None] * C + channels[None, :]
        d = tl.load(dy + at, inside, 0.0).to(tl.float32)
        d = tl.where(unit * gain[None, :] + shift > 0, d * gain[None, :], 0.0)
        tl.store(dx + own, (spread * (d - middle - unit * slope)).to(dx.dtype.element_ty), inside)
