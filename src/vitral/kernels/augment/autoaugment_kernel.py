"""RandAugment's operations as one kernel: a program takes one image through the operation that it drew.

What each operation means, value by value, is what `data.policy.apply` means, in its numbers.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from vitral.data.autoaugment import GRAY, OPERATIONS

SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE, BRIGHTNESS, CONTRAST, POSTERIZE = (
    tl.constexpr(OPERATIONS.index(name))
    for name in ("shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "contrast", "posterize")
)
SOLARIZE, SOLARIZE_ADD, INVERT, AUTOCONTRAST, EQUALIZE, COLOR, SHARPNESS, CUTOUT = (
    tl.constexpr(OPERATIONS.index(name))
    for name in ("solarize", "solarize_add", "invert", "autocontrast", "equalize", "color", "sharpness", "cutout")
)
OUTSIDE = tl.constexpr(GRAY)
RADIANS = tl.constexpr(math.pi / 180)
WHOLE = tl.constexpr(1.5 * 2**23)  # added and taken away again, it rounds to the nearest whole number, .5 to even


@triton.jit
def operate(
    pixels, operations, arguments, places, tables, result, H, W,
    C: tl.constexpr, CUT: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    image, B = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    operation, argument = tl.load(operations + image), tl.load(arguments + image)
    pixels += image * C * H * W
    result += image * C * H * W
    if (operation >= SHEAR_X) & (operation <= ROTATE):
        _move(pixels, result, operation, argument, H, W, C, PIXELS)
    elif operation == EQUALIZE:
        _equalize(pixels, result, tables + image * C * 256, H * W, C, PIXELS)
    elif (operation == COLOR) | (operation == SHARPNESS):
        _blend(pixels, result, operation, argument, H, W, C, PIXELS)
    else:
        middle = tl.zeros((), tl.float32)
        if operation == CONTRAST:
            middle = _mean(pixels, H * W, C, PIXELS)
        for c in tl.static_range(C):
            plane, to = pixels + c * H * W, result + c * H * W
            low, high = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
            if operation == AUTOCONTRAST:
                low, high = _extremes(plane, H * W, PIXELS)
            for start in range(0, H * W, PIXELS):
                at = start + tl.arange(0, PIXELS)
                level = tl.load(plane + at, at < H * W, 0).to(tl.int32)
                changed = _value(level, operation, argument, middle)
                if high > low:
                    changed = _stretched(level, low, high)
                if CUT:
                    down, right = tl.floor(tl.load(places + image) * H), tl.floor(tl.load(places + B + image) * W)
                    far = tl.maximum(tl.abs(at // W + 0.5 - down), tl.abs(at % W + 0.5 - right))
                    changed = tl.where((operation == CUTOUT) & (far < argument), OUTSIDE, changed)
                tl.store(to + at, changed.to(tl.uint8), at < H * W)


@triton.jit
def _value(level, operation, argument, middle):
    """What a value becomes that needs to know nothing of its neighbours: float, its fraction to be cut off."""
    v = level.to(tl.float32)
    lost = (1 << tl.where(operation == POSTERIZE, 8 - argument, 0.0).to(tl.int32)) - 1
    changed = (level & ~lost).to(tl.float32)
    changed = tl.where(operation == SOLARIZE, tl.where(v < argument, v, 255 - v), changed)
    changed = tl.where((operation == SOLARIZE_ADD) & (v < 128), v + argument, changed)
    changed = tl.where(operation == INVERT, 255 - v, changed)
    changed = tl.where(operation == BRIGHTNESS, argument * v, changed)
    changed = tl.where(operation == CONTRAST, middle + argument * (v - middle), changed)
    return tl.minimum(tl.maximum(changed, 0.0), 255.0)


@triton.jit
def _stretched(level, low, high):
    """autocontrast, in 64 bits as Pillow computes it."""
    scale = tl.full((), 255.0, tl.float64) / (high - low).to(tl.float64)
    changed = (level.to(tl.float64) * scale - low.to(tl.float64) * scale).to(tl.int32)
    return tl.minimum(tl.maximum(changed, 0), 255).to(tl.float32)


@triton.jit
def _extremes(plane, N, PIXELS: tl.constexpr):
    low, high = tl.full((PIXELS,), 255, tl.int32), tl.full((PIXELS,), 0, tl.int32)
    for start in range(0, N, PIXELS):
        at = start + tl.arange(0, PIXELS)
        low = tl.minimum(low, tl.load(plane + at, at < N, 255).to(tl.int32))
        high = tl.maximum(high, tl.load(plane + at, at < N, 0).to(tl.int32))
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit
def _gray(pixels, at, known, N, C: tl.constexpr):
    """Pillow's gray: ITU-R 601 in 16-bit fractions."""
    gray = tl.load(pixels + at, known, 0).to(tl.int32)
    if C == 3:
        green = tl.load(pixels + N + at, known, 0).to(tl.int32)
        blue = tl.load(pixels + 2 * N + at, known, 0).to(tl.int32)
        gray = (gray * 19595 + green * 38470 + blue * 7471 + 32768) >> 16
    return gray


@triton.jit
def _mean(pixels, N, C: tl.constexpr, PIXELS: tl.constexpr):
    """Of an image's gray, whole."""
    total = tl.zeros((PIXELS,), tl.int64)
    for start in range(0, N, PIXELS):
        at = start + tl.arange(0, PIXELS)
        total += tl.where(at < N, _gray(pixels, at, at < N, N, C), 0)
    return ((2 * tl.sum(total, 0) + N) // (2 * N)).to(tl.float32)


@triton.jit
def _equalize(pixels, result, tables, N, C: tl.constexpr, PIXELS: tl.constexpr):
    """As many pixels above as below. Each channel's table goes through memory: any thread may need any value of it."""
    level = tl.arange(0, 256)
    for c in tl.static_range(C):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, N, PIXELS):
            at = start + tl.arange(0, PIXELS)
            counts += tl.histogram(tl.load(pixels + c * N + at, at < N, 0).to(tl.int32), 256)
        counts -= tl.where(level == 0, tl.cdiv(N, PIXELS) * PIXELS - N, 0)  # what was read beyond the end
        brightest = tl.max(tl.where(counts > 0, level, 0), 0)
        step = (N - tl.sum(tl.where(level == brightest, counts, 0), 0)) // 255
        flat = (tl.cumsum(counts, 0) - counts + step // 2) // tl.maximum(step, 1)
        table = tl.where(step > 0, tl.minimum(flat, 255), level)
        tl.store(tables + c * 256 + level, table.to(tl.uint8))
    tl.debug_barrier()
    for c in tl.static_range(C):
        for start in range(0, N, PIXELS):
            at = start + tl.arange(0, PIXELS)
            value = tl.load(pixels + c * N + at, at < N, 0).to(tl.int32)
            tl.store(result + c * N + at, tl.load(tables + c * 256 + value), at < N)


@triton.jit
def _near(plane, y, x, H, W):
    """A value as it is off the gray that lies outside."""
    inside = (y >= 0) & (y < H) & (x >= 0) & (x < W)
    return tl.load(plane + y * W + x, inside, OUTSIDE).to(tl.float32) - OUTSIDE


@triton.jit
def _move(pixels, result, operation, argument, H, W, C: tl.constexpr, PIXELS: tl.constexpr):
    """Shear about the top left corner, shift, or turn about the middle: each pixel is read between four others."""
    turn = tl.where(operation == ROTATE, argument, 0.0) * RADIANS
    cos, sin = tl.cos(turn), tl.sin(turn)
    across = tl.where(operation == SHEAR_X, argument, 0.0) - sin
    down = tl.where(operation == SHEAR_Y, argument, 0.0) + sin
    right = W / 2 * (1 - cos) + H / 2 * sin + tl.where(operation == TRANSLATE_X, argument, 0.0)
    below = H / 2 * (1 - cos) - W / 2 * sin + tl.where(operation == TRANSLATE_Y, argument, 0.0)
    for start in range(0, H * W, PIXELS):
        at = start + tl.arange(0, PIXELS)
        y, x = at // W + 0.5, at % W + 0.5
        from_y, from_x = down * x + cos * y + (below - 0.5), cos * x + across * y + (right - 0.5)
        top, left = tl.floor(from_y), tl.floor(from_x)
        low, far = from_y - top, from_x - left  # shares of the lower and of the right neighbours
        top, left = top.to(tl.int32), left.to(tl.int32)
        for c in tl.static_range(C):
            plane = pixels + c * H * W
            above = _near(plane, top, left, H, W) * (1 - far) + _near(plane, top, left + 1, H, W) * far
            under = _near(plane, top + 1, left, H, W) * (1 - far) + _near(plane, top + 1, left + 1, H, W) * far
            value = above * (1 - low) + under * low + OUTSIDE
            tl.store(result + c * H * W + at, ((value + WHOLE) - WHOLE).to(tl.uint8), at < H * W)


@triton.jit
def _blend(pixels, result, operation, argument, H, W, C: tl.constexpr, PIXELS: tl.constexpr):
    """Away from the image's gray (color), or from the image smoothed (sharpness), or towards it."""
    for start in range(0, H * W, PIXELS):
        at = start + tl.arange(0, PIXELS)
        known, y, x = at < H * W, at // W, at % W
        gray = _gray(pixels, at, known, H * W, C)
        inner = known & (y > 0) & (y < H - 1) & (x > 0) & (x < W - 1)
        for c in tl.static_range(C):
            plane = pixels + c * H * W + at
            value = tl.load(plane, known, 0).to(tl.int32)
            other = gray
            if operation == SHARPNESS:
                around = 4 * value
                for row in tl.static_range(-1, 2):
                    for column in tl.static_range(-1, 2):
                        around += tl.load(plane + row * W + column, inner, 0).to(tl.int32)
                other = tl.where(inner, (2 * around + 13) // 26, value)
            v, o = value.to(tl.float32), other.to(tl.float32)
            changed = tl.minimum(tl.maximum((v - o) * argument + o, 0.0), 255.0)
            tl.store(result + c * H * W + at, changed.to(tl.uint8), known)
