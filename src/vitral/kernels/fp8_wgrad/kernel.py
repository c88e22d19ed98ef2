"""Transposed FP8 operands for weight-gradient GEMMs.

A weight gradient grad_outᵀ·x sums over tokens, and an FP8 GEMM needs both operands contiguous along the summed
dimension: the (num_tokens, NUM_COLS) matrices are written as (NUM_COLS, num_tokens), four tokens of a column packed
into one 32-bit word. The GEMM also needs a multiple of 16 tokens: NUM_PADDED zeros follow the last one.

A GEMM cannot scale the terms of its sum, so tokens have no scales of their own here. The scale of a token's gradient
relative to the largest is multiplied into the other operand, or about half of it (in the exponent) into each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.dropout.kernel import dropout_factor
from vitral.kernels.layernorm_gelu.gelu import INTERPRETED, gelu_and_slope


@triton.jit
def relative_scales_kernel(scale_ptr, max_scale_ptr, out_ptr, num_rows, BLOCK_ROWS: tl.constexpr):
    """out = (relative, pow2_root, relative / pow2_root) with relative = scale / max_scale.

    pow2_root is a power of two near sqrt(relative): multiplying by it rounds nothing.
    Reads scale (num_rows,) and max_scale (1,), writes out (3, num_rows), all fp32.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    relative = tl.load(scale_ptr + rows, rows < num_rows, 1.0) / tl.load(max_scale_ptr)
    # At most 1, because x / x may exceed it on a GPU.
    pow2_root = tl.minimum(tl.exp2(tl.ceil(0.5 * tl.log2(tl.maximum(relative, 1e-30)))), 1.0)
    tl.store(out_ptr + rows, relative, rows < num_rows)
    tl.store(out_ptr + num_rows + rows, pow2_root, rows < num_rows)
    tl.store(out_ptr + 2 * num_rows + rows, relative / pow2_root, rows < num_rows)


@triton.jit
def _pack_fp8(x0, x1, x2, x3):
    """Four values as e4m3 in one word, x0 in the lowest byte.

    Inline PTX takes two instructions. Packing with Triton's own casts and shifts gave wrong words on a GPU for values
    that are also stored as FP8, although the generated PTX was correct.
    """
    if INTERPRETED:
        return _fp8_byte(x0, 0) | _fp8_byte(x1, 1) | _fp8_byte(x2, 2) | _fp8_byte(x3, 3)
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
             cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
             cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
             mov.b32 $0, {low, high}; }""",
        "=r,r,r,r,r", (x0, x1, x2, x3), tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _fp8_byte(x, BYTE: tl.constexpr):
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << (8 * BYTE)


@triton.jit
def _row_mask(rows, num_tokens, NUM_PADDED: tl.constexpr):
    """Whether rows + 0 ... rows + 3 are tokens; only with padding the four can differ."""
    if NUM_PADDED:
        return (rows < num_tokens, rows + 1 < num_tokens, rows + 2 < num_tokens, rows + 3 < num_tokens)
    mask = rows < num_tokens
    return (mask, mask, mask, mask)


@triton.jit
def _store_transposed(
    out_ptr, words, first_col, first_word, num_tokens,
    NUM_COLS: tl.constexpr, BLOCK_WORDS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Store a tile of words (BLOCK_WORDS, BLOCK_COLS) to out (NUM_COLS, num_tokens / 4); num_tokens with padding."""
    num_tokens = tl.multiple_of(num_tokens, 16)
    cols, word_rows = tl.arange(0, BLOCK_COLS), tl.arange(0, BLOCK_WORDS)
    mask = (first_col + cols < NUM_COLS)[:, None] & (first_word + word_rows < num_tokens // 4)[None, :]
    tile_ptr = out_ptr + first_col.to(tl.int64) * (num_tokens // 4) + first_word
    tl.store(tile_ptr + cols[:, None] * (num_tokens // 4) + word_rows[None, :], tl.trans(words), mask)


@triton.jit
def transpose_fp8_kernel(
    x_ptr, factor_ptr, out_ptr, num_tokens,
    NUM_COLS: tl.constexpr, NUM_PADDED: tl.constexpr, BLOCK_WORDS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out = (x·factor)ᵀ, where factor is one power of two per token, or None.

    Reads x (num_tokens, NUM_COLS) e4m3 and factor (num_tokens,) fp32, writes out (NUM_COLS, num_tokens + NUM_PADDED)
    e4m3 as int32 words. Grid: (blocks of 4·BLOCK_WORDS tokens, blocks of columns).
    """
    first_word, first_col = tl.program_id(0) * BLOCK_WORDS, tl.program_id(1) * BLOCK_COLS
    rows, cols = 4 * (first_word + tl.arange(0, BLOCK_WORDS)), first_col + tl.arange(0, BLOCK_COLS)
    row_masks = _row_mask(rows, num_tokens, NUM_PADDED)
    offsets = rows.to(tl.int64)[:, None] * NUM_COLS + cols[None, :]
    values = ()
    for n in tl.static_range(4):
        mask = row_masks[n][:, None] & (cols < NUM_COLS)[None, :]
        x = tl.load(x_ptr + offsets + n * NUM_COLS, mask, 0.0).to(tl.float32)
        values += (x if factor_ptr is None else x * tl.load(factor_ptr + rows + n, row_masks[n], 0.0)[:, None],)
    _store_transposed(
        out_ptr, _pack_fp8(*values), first_col, first_word, num_tokens + NUM_PADDED, NUM_COLS, BLOCK_WORDS, BLOCK_COLS
    )


@triton.jit
def layernorm_transposed_kernel(
    x_ptr, stats_ptr, weight_ptr, bias_ptr, factor_ptr, scale_ptr, out_ptr, num_tokens,
    NUM_COLS: tl.constexpr, NUM_PADDED: tl.constexpr, BLOCK_WORDS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out = fp8(LayerNorm(x)·factor / scale)ᵀ, from the saved statistics.

    Reads x (num_tokens, NUM_COLS) bf16, stats (2, num_tokens) = mean and rstd, weight and bias (NUM_COLS,), factor
    (num_tokens,), scale (1,), all fp32. Writes out (NUM_COLS, num_tokens + NUM_PADDED) e4m3 as int32 words.
    """
    first_word, first_col = tl.program_id(0) * BLOCK_WORDS, tl.program_id(1) * BLOCK_COLS
    rows, cols = 4 * (first_word + tl.arange(0, BLOCK_WORDS)), first_col + tl.arange(0, BLOCK_COLS)
    row_masks = _row_mask(rows, num_tokens, NUM_PADDED)
    offsets = rows.to(tl.int64)[:, None] * NUM_COLS + cols[None, :]
    inv_scale = 1.0 / tl.load(scale_ptr)
    weight = tl.load(weight_ptr + cols, cols < NUM_COLS, 0.0)[None, :]
    bias = tl.load(bias_ptr + cols, cols < NUM_COLS, 0.0)[None, :]
    values = ()
    for n in tl.static_range(4):
        mask = row_masks[n][:, None] & (cols < NUM_COLS)[None, :]
        mean = tl.load(stats_ptr + rows + n, row_masks[n], 0.0)[:, None]
        rstd = tl.load(stats_ptr + num_tokens + rows + n, row_masks[n], 0.0)[:, None]
        factor = (tl.load(factor_ptr + rows + n, row_masks[n], 0.0) * inv_scale)[:, None]
        y = (tl.load(x_ptr + offsets + n * NUM_COLS, mask, 0.0).to(tl.float32) - mean) * rstd * weight + bias
        values += (y * factor,)
    _store_transposed(
        out_ptr, _pack_fp8(*values), first_col, first_word, num_tokens + NUM_PADDED, NUM_COLS, BLOCK_WORDS, BLOCK_COLS
    )


@triton.jit
def gelu_backward_fp8_kernel(
    h_ptr, bias_ptr, grad_gelu_ptr, grad_scale_ptr, scale_ratio_ptr, factor_ptr, gelu_scale_ptr, grad_h_ptr,
    grad_h_scale_ptr, grad_h_t_ptr, gelu_t_ptr, partial_sum_ptr, seed_ptr, dropout_p, num_tokens,
    NUM_COLS: tl.constexpr, NUM_PADDED: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """grad_h = dropout(grad_gelu)·GELU'(h + bias) in FP8, row-major and transposed, and dropout(GELU(h + bias))ᵀ.

    Reads h, grad_gelu (num_tokens, NUM_COLS) bf16. grad_gelu is the GEMM of FP8 rows with scales grad_scale
    (num_tokens,), so that grad_scale·scale_ratio bounds grad_h and is its scale. GELU is multiplied by factor
    (num_tokens,) and divided by gelu_scale (1,). Both scales must allow for the factor 1/(1 - dropout_p). Writes
    grad_h (num_tokens, NUM_COLS) e4m3 with grad_h_scale (num_tokens,); grad_h_t and gelu_t (NUM_COLS, num_tokens +
    NUM_PADDED) e4m3 as int32 words; partial_sum (programs, NUM_COLS) fp32 = the bias gradient. Grid: (partial sums,
    blocks of columns).
    """
    first_col = tl.program_id(1) * BLOCK_COLS
    cols, word_rows = tl.arange(0, BLOCK_COLS), tl.arange(0, BLOCK_WORDS)
    col_mask = first_col + cols < NUM_COLS
    bias = tl.load(bias_ptr + first_col + cols, col_mask, 0.0)
    scale_ratio, inv_gelu_scale = tl.load(scale_ratio_ptr), 1.0 / tl.load(gelu_scale_ptr)
    tile_offsets = word_rows[:, None] * (4 * NUM_COLS) + cols[None, :]
    acc = tl.zeros((BLOCK_WORDS, BLOCK_COLS), tl.float32)
    num_words = (num_tokens + NUM_PADDED) // 4
    for block in range(tl.program_id(0), tl.cdiv(num_words, BLOCK_WORDS), tl.num_programs(0)):
        first_word = block * BLOCK_WORDS
        row_masks = _row_mask(4 * (first_word + word_rows), num_tokens, NUM_PADDED)
        base = (4 * first_word).to(tl.int64) * NUM_COLS + first_col
        loaded = ()
        for n in tl.static_range(4):  # all loads before the first store, which would keep later ones from overlapping
            mask = row_masks[n][:, None] & col_mask[None, :]
            loaded += (
                tl.load(h_ptr + base + n * NUM_COLS + tile_offsets, mask, 0.0),
                tl.load(grad_gelu_ptr + base + n * NUM_COLS + tile_offsets, mask, 0.0),
            )
        grad_h_values = ()
        gelu_values = ()
        for n in tl.static_range(4):
            rows = 4 * (first_word + word_rows) + n
            gelu, slope = gelu_and_slope(loaded[2 * n].to(tl.float32) + bias[None, :], ACTIVATION)
            if DROPOUT:
                kept = dropout_factor(seed_ptr, base + n * NUM_COLS + tile_offsets, dropout_p)
                gelu *= kept
                slope *= kept
            grad_h = loaded[2 * n + 1].to(tl.float32) * slope
            acc += grad_h
            grad_h_scale = tl.maximum(tl.load(grad_scale_ptr + rows, row_masks[n], 1.0) * scale_ratio, 1e-30)
            if tl.program_id(1) == 0:
                tl.store(grad_h_scale_ptr + rows, grad_h_scale, row_masks[n])
            grad_h *= (1.0 / grad_h_scale)[:, None]
            mask = row_masks[n][:, None] & col_mask[None, :]
            tl.store(grad_h_ptr + base + n * NUM_COLS + tile_offsets, grad_h.to(tl.float8e4nv), mask)
            factor = tl.load(factor_ptr + rows, row_masks[n], 0.0) * inv_gelu_scale
            grad_h_values += (grad_h,)
            gelu_values += (gelu * factor[:, None],)
        _store_transposed(
            grad_h_t_ptr, _pack_fp8(*grad_h_values), first_col, first_word, num_tokens + NUM_PADDED, NUM_COLS,
            BLOCK_WORDS, BLOCK_COLS,
        )  # fmt: skip
        _store_transposed(
            gelu_t_ptr, _pack_fp8(*gelu_values), first_col, first_word, num_tokens + NUM_PADDED, NUM_COLS, BLOCK_WORDS,
            BLOCK_COLS,
        )  # fmt: skip
    tl.store(partial_sum_ptr + tl.program_id(0) * NUM_COLS + first_col + cols, tl.sum(acc, axis=0), col_mask)
