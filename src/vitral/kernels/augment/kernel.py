"""Augmentation as one kernel: each pixel of the result is looked up, in this image or in the one before it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _source(image, y, x, shifts, flips, H, W, MOVE: tl.constexpr, FLIP: tl.constexpr, BLACK: tl.constexpr):
    """Where in an image the pixel at y, x of the moved one lies, and whether anything lies there."""
    there = y >= 0
    if MOVE:
        B = tl.num_programs(0)
        y -= tl.load(shifts + image).to(tl.int32)
        x -= tl.load(shifts + B + image).to(tl.int32)
        if BLACK:
            there = (y >= 0) & (y < H) & (x >= 0) & (x < W)
        if FLIP:  # noqa: SIM102  (known when compiled, the other is not)
            if tl.load(flips + image) < 0.5:
                x = W - 1 - x
        y = tl.minimum(tl.maximum(y, 0), H - 1)
        x = tl.minimum(tl.maximum(x, 0), W - 1)
    return y * W + x, there


@triton.jit
def vary(
    pixels, labels, table, shifts, flips, coins, pairs, corners, mixing, images, targets, H, W, mixed,
    C: tl.constexpr, K: tl.constexpr, MOVE: tl.constexpr, FLIP: tl.constexpr, MIX: tl.constexpr, ASK: tl.constexpr,
    BLACK: tl.constexpr, PIXELS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Of one image some pixels: where each comes from, and what its byte stands for. Then the image's target."""
    image, B = tl.program_id(0), tl.num_programs(0)
    places = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    known = places < H * W
    y, x = places // W, places % W
    at, there = _source(image, y, x, shifts, flips, H, W, MOVE, FLIP, BLACK)
    source = tl.zeros((PIXELS,), tl.int64) + image
    other, kept = image, 1.0
    if MIX:
        first, second = tl.load(pairs + image), tl.load(pairs + B + image)
        side = tl.sqrt_rn(1 - (first / (first + second)).to(tl.float32))
        chosen = tl.load(coins + B + image) < mixed
        if ASK:
            chosen = chosen & (tl.load(mixing) != 0)
        side = tl.where(chosen, side, 0.0)
        height, width = tl.floor(side * H + 0.5), tl.floor(side * W + 0.5)
        top = tl.floor((H - height + 1) * tl.load(corners + image))
        left = tl.floor((W - width + 1) * tl.load(corners + B + image))
        box = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
        other = (image + B - 1) % B
        kept = 1.0 - height * width / (H * W)
        at_other, there_other = _source(other, y, x, shifts, flips, H, W, MOVE, FLIP, BLACK)
        at, there = tl.where(box, at_other, at), tl.where(box, there_other, there)
        source = tl.where(box, other, source)
    for c in tl.static_range(C):
        level = tl.load(pixels + (source * C + c) * H * W + at, known & there, 0).to(tl.int32)
        tl.store(images + (image.to(tl.int64) * C + c) * H * W + places, tl.load(table + c * 256 + level), known)
    if tl.program_id(1) == 0:
        classes = tl.arange(0, CLASSES)
        share = tl.where(classes == tl.load(labels + image), kept, 0.0)
        share += tl.where(classes == tl.load(labels + other), 1.0 - kept, 0.0)
        tl.store(targets + image * K + classes, share, classes < K)
