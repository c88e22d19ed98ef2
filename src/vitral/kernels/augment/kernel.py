"""Triton kernel for shift, flip, normalisation and CutMix: each output pixel gathers its byte from the input batch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _source_offset(
    image, y, x, shifts_ptr, flips_ptr, H, W,
    SHIFT: tl.constexpr, FLIP: tl.constexpr, BLACK_BORDER: tl.constexpr,
):  # fmt: skip
    """Offset within the image plane of the pixel that moves to (y, x), and whether it is inside the image."""
    inside = y >= 0
    if SHIFT:
        B = tl.num_programs(0)
        y -= tl.load(shifts_ptr + image).to(tl.int32)
        x -= tl.load(shifts_ptr + B + image).to(tl.int32)
        if BLACK_BORDER:
            inside = (y >= 0) & (y < H) & (x >= 0) & (x < W)
        if FLIP:  # noqa: SIM102 - FLIP is resolved at compile time, the inner condition at run time
            if tl.load(flips_ptr + image) < 0.5:
                x = W - 1 - x
        y = tl.minimum(tl.maximum(y, 0), H - 1)
        x = tl.minimum(tl.maximum(x, 0), W - 1)
    return y * W + x, inside


@triton.jit
def augment_kernel(
    images_ptr, labels_ptr, table_ptr, shifts_ptr, flips_ptr, coins_ptr, gammas_ptr, corners_ptr, mix_enabled_ptr,
    out_ptr, targets_ptr, H, W, mix_prob,
    C: tl.constexpr, NUM_CLASSES: tl.constexpr, SHIFT: tl.constexpr, FLIP: tl.constexpr, CUTMIX: tl.constexpr,
    HAS_MIX_FLAG: tl.constexpr, BLACK_BORDER: tl.constexpr, BLOCK_PIXELS: tl.constexpr, BLOCK_CLASSES: tl.constexpr,
):  # fmt: skip
    """out[b, c, y, x] = table[c, images[s, c, y', x']]; targets[b] = λ·e(labels[b]) + (1 - λ)·e(labels[b-1]).

    (y', x') is (y, x) before shift and flip. s is b, or b - 1 (cyclically) inside the CutMix box, whose side is
    √(1 - λ') of the image with λ' = γ1/(γ1 + γ2) ~ Beta(α, α); λ is 1 minus the area of the rounded box.

    Grid: (B, blocks of pixels). The random numbers are inputs, drawn as data.augment.augment_batch draws them.

    images: (B, C, H, W) uint8. labels: (B,) int64. table: (C, 256), the normalised value of each byte in the dtype of
    out. shifts: (2, B) int64, down and right. flips: (B,) fp32. coins, corners: (2, B) fp32; coins[1] < mix_prob
    selects the images that are mixed. gammas: (2, B). mix_enabled: () bool, nothing is mixed where it is false.
    Unused inputs are None.
    out: (B, C, H, W). targets: (B, NUM_CLASSES) fp32, written by the first block of each image.
    Reads and writes each pixel once.
    """
    image, B = tl.program_id(0), tl.num_programs(0)
    pixels = tl.program_id(1) * BLOCK_PIXELS + tl.arange(0, BLOCK_PIXELS)
    mask = pixels < H * W
    y, x = pixels // W, pixels % W
    offsets, inside = _source_offset(image, y, x, shifts_ptr, flips_ptr, H, W, SHIFT, FLIP, BLACK_BORDER)
    source = tl.zeros((BLOCK_PIXELS,), tl.int64) + image
    other, own_weight = image, 1.0
    if CUTMIX:
        gamma1, gamma2 = tl.load(gammas_ptr + image), tl.load(gammas_ptr + B + image)
        side = tl.sqrt_rn(1 - (gamma1 / (gamma1 + gamma2)).to(tl.float32))
        is_mixed = tl.load(coins_ptr + B + image) < mix_prob
        if HAS_MIX_FLAG:
            is_mixed = is_mixed & (tl.load(mix_enabled_ptr) != 0)
        side = tl.where(is_mixed, side, 0.0)
        height, width = tl.floor(side * H + 0.5), tl.floor(side * W + 0.5)
        top = tl.floor((H - height + 1) * tl.load(corners_ptr + image))
        left = tl.floor((W - width + 1) * tl.load(corners_ptr + B + image))
        in_box = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
        other = (image + B - 1) % B
        own_weight = 1.0 - height * width / (H * W)
        other_offsets, other_inside = _source_offset(
            other, y, x, shifts_ptr, flips_ptr, H, W, SHIFT, FLIP, BLACK_BORDER
        )
        offsets, inside = tl.where(in_box, other_offsets, offsets), tl.where(in_box, other_inside, inside)
        source = tl.where(in_box, other, source)
    for c in tl.static_range(C):
        level = tl.load(images_ptr + (source * C + c) * H * W + offsets, mask & inside, 0).to(tl.int32)
        value_ptrs = out_ptr + (image.to(tl.int64) * C + c) * H * W + pixels
        tl.store(value_ptrs, tl.load(table_ptr + c * 256 + level), mask)
    if tl.program_id(1) == 0:
        classes = tl.arange(0, BLOCK_CLASSES)
        target = tl.where(classes == tl.load(labels_ptr + image), own_weight, 0.0)
        target += tl.where(classes == tl.load(labels_ptr + other), 1.0 - own_weight, 0.0)
        tl.store(targets_ptr + image * NUM_CLASSES + classes, target, classes < NUM_CLASSES)
