"""What stands around Muon's products: Triton kernels that each go over many matrices, where they lie.

N matrices of one shape are a stack, N A B with A ≤ B. Tall ones, B×A, lie on their side in it, after the wide ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.layernorm_gelu.kernel import nth


@triton.jit
def _places(A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's tile of its matrix: where that is in a wide one, where in a tall one, and what of it there is."""
    across = tl.cdiv(B, COLUMNS)
    rows = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    wide = rows[:, None] * B + columns[None, :]
    tall = columns[:, None] * A + rows[None, :]
    return wide, tall, (rows < A)[:, None] & (columns < B)[None, :], (columns < B)[:, None] & (rows < A)[None, :]


@triton.jit
def _between(start, end, weight):
    """torch's lerp, which begins at the nearer end."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight))


@triton.jit
def _ahead(gradient, average, at, inside, share, memory):
    g = tl.load(gradient + at, inside, 0.0)
    moved = _between(tl.load(average + at, inside, 0.0), g, share)
    tl.store(average + at, moved, inside)
    return _between(g, moved, memory)


@triton.jit
def look_ahead(
    gradients, averages, stack, squares, wide, share, memory,
    A: tl.constexpr, B: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each gradient's average moved on; a look ahead along it; and the sum of that tile's squares."""
    n = tl.program_id(1)
    gradient, average = nth(gradients, n, COUNT), nth(averages, n, COUNT)
    at, at_tall, inside, inside_tall = _places(A, B, ROWS, COLUMNS)
    if n < wide:
        ahead = _ahead(gradient, average, at, inside, share, memory)
    else:
        ahead = tl.trans(_ahead(gradient, average, at_tall, inside_tall, share, memory))
    rounded = ahead.to(stack.dtype.element_ty)
    tl.store(stack + n.to(tl.int64) * (A * B) + at, rounded, inside)
    exact = rounded.to(tl.float32)
    tl.store(squares + n * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(exact * exact, axis=1), axis=0))


@triton.jit
def normalise(stack, squares, SIZE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Each matrix divided by its norm, always summed in the same order."""
    n = tl.program_id(1)
    total = tl.zeros((256,), tl.float32)
    for start in range(0, TILES, 256):
        tiles = start + tl.arange(0, 256)
        total += tl.load(squares + n * TILES + tiles, tiles < TILES, 0.0)
    norm = tl.sqrt(tl.sum(total, axis=0)) + 1e-7
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = stack + n.to(tl.int64) * SIZE + at
    x = tl.load(place, at < SIZE, 0.0).to(tl.float32)
    tl.store(place, (x / norm).to(stack.dtype.element_ty), at < SIZE)


@triton.jit
def _move(places, inside, direction, keep, step):
    tl.store(places, tl.load(places, inside, 0.0) * keep - step * direction, inside)


@triton.jit
def move(
    weights, rates, directions, halted, wide, decay, length,
    A: tl.constexpr, B: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """w ← w·(1 - lr·decay) - lr·length·direction; nothing at all where training has halted."""
    n = tl.program_id(1)
    weight, lr = nth(weights, n, COUNT), tl.load(nth(rates, n, COUNT))
    at, at_tall, inside, inside_tall = _places(A, B, ROWS, COLUMNS)
    direction = tl.load(directions + n.to(tl.int64) * (A * B) + at, inside, 0.0).to(tl.float32)
    if halted is not None:  # 0 times what is not finite is not 0
        going = tl.load(halted) <= 0
        lr = tl.where(going, lr, 0.0)
        direction = tl.where(going, direction, 0.0)
    keep, step = 1.0 - lr * decay, lr * length
    if n < wide:
        _move(weight + at, inside, direction, keep, step)
    else:
        _move(weight + at_tall, inside_tall, tl.trans(direction), keep, step)
