"""Triton kernels for everything in Muon's step except its GEMMs.

N matrices of the same size form a stack (N, A, B) with A ≤ B. Wide matrices (A, B) come first; tall ones (B, A) follow
and are transposed into the stack. Each launch covers many matrices through tuples of pointers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.reduce.kernel import select_from_tuple


@triton.jit
def _tile_offsets(A: tl.constexpr, B: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Offsets and masks of this program's tile, in a wide (A, B) matrix and in a tall (B, A) one."""
    tiles_per_row = tl.cdiv(B, BLOCK_COLS)
    rows = tl.program_id(0) // tiles_per_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(0) % tiles_per_row * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    wide_offsets = rows[:, None] * B + cols[None, :]
    tall_offsets = cols[:, None] * A + rows[None, :]
    wide_mask = (rows < A)[:, None] & (cols < B)[None, :]
    tall_mask = (cols < B)[:, None] & (rows < A)[None, :]
    return wide_offsets, tall_offsets, wide_mask, tall_mask


@triton.jit
def _lerp(start, end, weight):
    """torch.lerp, which starts from the nearer end for accuracy."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight))


@triton.jit
def _nesterov_tile(grad_ptr, momentum_buffer_ptr, offsets, mask, lerp_weight, momentum):
    """Update one tile of the momentum buffer and return its Nesterov look-ahead."""
    grad = tl.load(grad_ptr + offsets, mask, 0.0)
    momentum_buffer = _lerp(tl.load(momentum_buffer_ptr + offsets, mask, 0.0), grad, lerp_weight)
    tl.store(momentum_buffer_ptr + offsets, momentum_buffer, mask)
    return _lerp(grad, momentum_buffer, momentum)


@triton.jit
def nesterov_momentum_kernel(
    grad_ptrs, momentum_buffer_ptrs, stack_ptr, square_sums_ptr, num_wide, lerp_weight, momentum,
    A: tl.constexpr, B: tl.constexpr, NUM_MATRICES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """m ← lerp(m, g, 1 - μ);  stack[n] = lerp(g, m, μ);  square_sums[n, tile] = Σ stack[n]² over the tile.

    Grid: (tiles per matrix, NUM_MATRICES). lerp_weight is 1 - μ and momentum is μ.

    grad, momentum_buffer: (A, B) for the first num_wide matrices, (B, A) for the others; fp32, contiguous.
    stack: (NUM_MATRICES, A, B) bf16 or fp32. square_sums: (NUM_MATRICES, tiles) fp32, of the rounded stack.
    Reads 2 and writes 2 values per element.
    """
    matrix = tl.program_id(1)
    grad_ptr = select_from_tuple(grad_ptrs, matrix, NUM_MATRICES)
    momentum_buffer_ptr = select_from_tuple(momentum_buffer_ptrs, matrix, NUM_MATRICES)
    wide_offsets, tall_offsets, wide_mask, tall_mask = _tile_offsets(A, B, BLOCK_ROWS, BLOCK_COLS)
    if matrix < num_wide:
        tile = _nesterov_tile(grad_ptr, momentum_buffer_ptr, wide_offsets, wide_mask, lerp_weight, momentum)
    else:
        tile = tl.trans(_nesterov_tile(grad_ptr, momentum_buffer_ptr, tall_offsets, tall_mask, lerp_weight, momentum))
    rounded = tile.to(stack_ptr.dtype.element_ty)
    tl.store(stack_ptr + matrix.to(tl.int64) * (A * B) + wide_offsets, rounded, wide_mask)
    tile = rounded.to(tl.float32)
    square_sum_ptr = square_sums_ptr + matrix * tl.num_programs(0) + tl.program_id(0)
    tl.store(square_sum_ptr, tl.sum(tl.sum(tile * tile, axis=1), axis=0))


@triton.jit
def frobenius_normalize_kernel(
    stack_ptr, square_sums_ptr, NUMEL: tl.constexpr, NUM_TILES: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """stack[n] ← stack[n] / (‖stack[n]‖_F + 1e-7), with the norm from the per-tile sums of squares.

    Grid: (blocks per matrix, matrices). Every program adds up the tiles of its matrix in the same order, so the result
    is deterministic.

    stack: (N, NUMEL) bf16 or fp32, in place. square_sums: (N, NUM_TILES) fp32.
    """
    matrix = tl.program_id(1)
    partial_sums = tl.zeros((256,), tl.float32)
    for start in range(0, NUM_TILES, 256):
        tiles = start + tl.arange(0, 256)
        partial_sums += tl.load(square_sums_ptr + matrix * NUM_TILES + tiles, tiles < NUM_TILES, 0.0)
    norm = tl.sqrt(tl.sum(partial_sums, axis=0)) + 1e-7
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x_ptr = stack_ptr + matrix.to(tl.int64) * NUMEL + offsets
    x = tl.load(x_ptr, offsets < NUMEL, 0.0).to(tl.float32)
    tl.store(x_ptr, (x / norm).to(stack_ptr.dtype.element_ty), offsets < NUMEL)


@triton.jit
def _update_tile(weight_ptrs, mask, update, decay_factor, step_size):
    tl.store(weight_ptrs, tl.load(weight_ptrs, mask, 0.0) * decay_factor - step_size * update, mask)


@triton.jit
def apply_update_kernel(
    weight_ptrs, lr_ptrs, updates_ptr, found_inf_ptr, num_wide, weight_decay, update_scale,
    A: tl.constexpr, B: tl.constexpr, NUM_MATRICES: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """w ← w·(1 - lr·weight_decay) - lr·update_scale·update; unchanged where found_inf > 0.

    Grid: (tiles per matrix, NUM_MATRICES).

    weight: (A, B) for the first num_wide matrices, (B, A) for the others; fp32, contiguous, in place. lr: () fp32 per
    matrix. updates: (NUM_MATRICES, A, B) bf16 or fp32. found_inf: () fp32 or None.
    Reads 2 and writes 1 value per element.
    """
    matrix = tl.program_id(1)
    weight_ptr = select_from_tuple(weight_ptrs, matrix, NUM_MATRICES)
    lr = tl.load(select_from_tuple(lr_ptrs, matrix, NUM_MATRICES))
    wide_offsets, tall_offsets, wide_mask, tall_mask = _tile_offsets(A, B, BLOCK_ROWS, BLOCK_COLS)
    update = tl.load(updates_ptr + matrix.to(tl.int64) * (A * B) + wide_offsets, wide_mask, 0.0).to(tl.float32)
    if found_inf_ptr is not None:  # both must be zeroed: 0 times a non-finite update is not 0
        is_finite = tl.load(found_inf_ptr) <= 0
        lr = tl.where(is_finite, lr, 0.0)
        update = tl.where(is_finite, update, 0.0)
    decay_factor, step_size = 1.0 - lr * weight_decay, lr * update_scale
    if matrix < num_wide:
        _update_tile(weight_ptr + wide_offsets, wide_mask, update, decay_factor, step_size)
    else:
        _update_tile(weight_ptr + tall_offsets, tall_mask, tl.trans(update), decay_factor, step_size)
