"""Patch embedding directly from the images: the GEMM gathers the patches as it loads them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pixel_offsets(k, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PATCH: tl.constexpr):
    """Offsets in an image of the values k of its first patch, which are ordered (channel, row, column)."""
    return k // (PATCH * PATCH) * (HEIGHT * WIDTH) + k // PATCH % PATCH * WIDTH + k % PATCH


@triton.jit
def _patch_offset(patch, WIDTH: tl.constexpr, PATCH: tl.constexpr):
    """Offset of the upper left pixel of a patch."""
    return patch // (WIDTH // PATCH) * (PATCH * WIDTH) + patch % (WIDTH // PATCH) * PATCH


@triton.jit(do_not_specialize=["num_patches"])
def embed_patches_kernel(
    image_ptr, scale_ptr, shift_ptr, weight_ptr, offset_ptr, out_ptr, num_patches,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PATCH: tl.constexpr, DIM: tl.constexpr,
    NUM_PREFIX: tl.constexpr, NORMALISE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """out[b, NUM_PREFIX + p] = patch(b, p)·Wᵀ + offset[p], with patch·scale + shift as the patch if NORMALISE.

    Reads images (B, CHANNELS, HEIGHT, WIDTH), uint8 if NORMALISE, else bf16; scale, shift (K,) fp32, K =
    CHANNELS·PATCH²; W (DIM, K) in the dtype of out; offset (patches per image, DIM) fp32 = bias and position. Writes
    out (B, NUM_PREFIX + patches per image, DIM), except the prefix tokens. num_patches counts all images.
    Grid: (blocks of BLOCK_N columns, blocks of BLOCK_M patches).
    """
    K: tl.constexpr = CHANNELS * PATCH * PATCH
    PATCHES_PER_IMAGE: tl.constexpr = (HEIGHT // PATCH) * (WIDTH // PATCH)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    image, patch = (rows // PATCHES_PER_IMAGE).to(tl.int64), rows % PATCHES_PER_IMAGE
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    patch_offsets = image * (CHANNELS * HEIGHT * WIDTH) + _patch_offset(patch, WIDTH, PATCH)
    mask = (rows < num_patches)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        k = start + tl.arange(0, BLOCK_K)
        pixel_ptrs = image_ptr + patch_offsets[:, None] + _pixel_offsets(k, HEIGHT, WIDTH, PATCH)[None, :]
        if K % BLOCK_K:  # of values beyond the patch, neither pixels nor weights nor their scales are read
            pixels = tl.load(pixel_ptrs, mask & (k < K)[None, :], 0)
            weights = tl.load(weight_ptr + cols[:, None] * K + k[None, :], (k < K)[None, :], 0.0)
        else:
            pixels = tl.load(pixel_ptrs, mask, 0)
            weights = tl.load(weight_ptr + cols[:, None] * K + k[None, :])
        if NORMALISE:
            scale, shift = tl.load(scale_ptr + k, k < K, 0.0), tl.load(shift_ptr + k, k < K, 0.0)
            pixels = pixels.to(tl.float32) * scale[None, :] + shift[None, :]
        acc = tl.dot(pixels.to(out_ptr.dtype.element_ty), tl.trans(weights), acc)
    acc += tl.load(offset_ptr + patch[:, None] * DIM + cols[None, :])
    out_rows = image * (PATCHES_PER_IMAGE + NUM_PREFIX) + NUM_PREFIX + patch
    tl.store(out_ptr + out_rows[:, None] * DIM + cols[None, :], acc.to(out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_tokens"])
def unfold_patches_kernel(
    image_ptr, out_ptr, num_tokens,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PATCH: tl.constexpr, NUM_PREFIX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out = the patches of all images as rows, with a row of zeros for each prefix token.

    Reads images (B, CHANNELS, HEIGHT, WIDTH), writes out (num_tokens, NUM_COLS), same dtype, where NUM_COLS is
    CHANNELS·PATCH² rounded up to a multiple of BLOCK_K with zeros. Grid: (blocks of tokens, blocks of BLOCK_K values).
    """
    K: tl.constexpr = CHANNELS * PATCH * PATCH
    NUM_COLS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    PATCHES_PER_IMAGE: tl.constexpr = (HEIGHT // PATCH) * (WIDTH // PATCH)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    image = (rows // (PATCHES_PER_IMAGE + NUM_PREFIX)).to(tl.int64)
    patch = rows % (PATCHES_PER_IMAGE + NUM_PREFIX) - NUM_PREFIX
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    patch_offsets = image * (CHANNELS * HEIGHT * WIDTH) + _patch_offset(patch, WIDTH, PATCH)
    mask = (rows < num_tokens)[:, None]
    pixel_ptrs = image_ptr + patch_offsets[:, None] + _pixel_offsets(k, HEIGHT, WIDTH, PATCH)[None, :]
    pixels = tl.load(pixel_ptrs, mask & (patch >= 0)[:, None] & (k < K)[None, :], 0)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * NUM_COLS + k[None, :], pixels, mask)
