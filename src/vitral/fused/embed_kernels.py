"""From 8-bit pixels to tokens as one kernel: normalised where they are read, and multiplied by the patches' weights."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def embed(
    pixels, scale, shift, weight, table, out, patches,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, D: tl.constexpr, FRONT: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, PIECE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some patches, N of their numbers; a patch's pixels pass by. FRONT tokens stand before the patches of an image."""
    K: tl.constexpr = C * P * P
    EACH: tl.constexpr = (H // P) * (W // P)
    at = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    image, place = (at // EACH).to(tl.int64), at % EACH
    columns = tl.program_id(0) * N + tl.arange(0, N)
    corner = image * (C * H * W) + place // (W // P) * (P * W) + place % (W // P) * P
    there = (at < patches)[:, None]
    tokens = tl.zeros((ROWS, N), tl.float32)
    for k in tl.range(0, K, PIECE, num_stages=STAGES):
        inner = k + tl.arange(0, PIECE)
        offset = inner // (P * P) * (H * W) + inner // P % P * W + inner % P
        values = tl.load(pixels + corner[:, None] + offset[None, :], there, 0).to(tl.float32)
        seen = values * tl.load(scale + inner)[None, :] + tl.load(shift + inner)[None, :]
        weights = tl.load(weight + columns[:, None] * K + inner[None, :])
        tokens = tl.dot(seen.to(out.dtype.element_ty), tl.trans(weights), tokens)
    tokens += tl.load(table + place[:, None] * D + columns[None, :])
    row = image * (EACH + FRONT) + FRONT + place
    tl.store(out + row[:, None] * D + columns[None, :], tokens.to(out.dtype.element_ty), there)
