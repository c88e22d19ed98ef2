"""From pixels to tokens as one kernel: it reads the patches where they lie in the images. And those as a matrix, which
the gradient of their weights is a product of."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _within(inner, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr):
    """Where in an image these numbers of its first patch lie: channel by channel, row by row."""
    return inner // (P * P) * (H * W) + inner // P % P * W + inner % P


@triton.jit
def _corner(place, W: tl.constexpr, P: tl.constexpr):
    return place // (W // P) * (P * W) + place % (W // P) * P


@triton.jit(do_not_specialize=["patches"])
def embed(
    pixels, scale, shift, weight, table, out, patches,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, D: tl.constexpr, FRONT: tl.constexpr,
    NORMALISE: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, PIECE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some patches, N of their numbers; a patch's pixels pass by. FRONT tokens stand before the patches of an image."""
    K: tl.constexpr = C * P * P
    EACH: tl.constexpr = (H // P) * (W // P)
    at = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    image, place = (at // EACH).to(tl.int64), at % EACH
    columns = tl.program_id(0) * N + tl.arange(0, N)
    corner = image * (C * H * W) + _corner(place, W, P)
    there = (at < patches)[:, None]
    tokens = tl.zeros((ROWS, N), tl.float32)
    for k in tl.range(0, K, PIECE, num_stages=STAGES):
        inner = k + tl.arange(0, PIECE)
        seen = tl.load(pixels + corner[:, None] + _within(inner, H, W, P)[None, :], there, 0)
        if NORMALISE:
            seen = seen.to(tl.float32) * tl.load(scale + inner)[None, :] + tl.load(shift + inner)[None, :]
        weights = tl.load(weight + columns[:, None] * K + inner[None, :])
        tokens = tl.dot(seen.to(out.dtype.element_ty), tl.trans(weights), tokens)
    tokens += tl.load(table + place[:, None] * D + columns[None, :])
    row = image * (EACH + FRONT) + FRONT + place
    tl.store(out + row[:, None] * D + columns[None, :], tokens.to(out.dtype.element_ty), there)


@triton.jit(do_not_specialize=["tokens"])
def unfold(
    pixels, out, tokens,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, FRONT: tl.constexpr, ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """The patches as rows, with rows of zeros for the tokens before them."""
    EACH: tl.constexpr = (H // P) * (W // P)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    image, place = (at // (EACH + FRONT)).to(tl.int64), at % (EACH + FRONT) - FRONT
    inner = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    where = image * (C * H * W) + _corner(place, W, P)
    there = (at < tokens)[:, None]
    seen = tl.load(pixels + where[:, None] + _within(inner, H, W, P)[None, :], there & (place >= 0)[:, None], 0)
    tl.store(out + at.to(tl.int64)[:, None] * (C * P * P) + inner[None, :], seen, there)
