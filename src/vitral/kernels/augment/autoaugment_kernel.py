"""Triton kernel for the operations of RandAugment, TrivialAugment and colour jitter.

Each operation reproduces `data.image_ops.apply_ops` value by value, with the same precision.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from vitral.data.image_ops import FILL_VALUE, OPS

SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE, BRIGHTNESS, CONTRAST, POSTERIZE = (
    tl.constexpr(OPS.index(name))
    for name in ("shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "contrast", "posterize")
)
SOLARIZE, SOLARIZE_ADD, INVERT, AUTOCONTRAST, EQUALIZE, COLOR, SHARPNESS, CUTOUT = (
    tl.constexpr(OPS.index(name))
    for name in ("solarize", "solarize_add", "invert", "autocontrast", "equalize", "color", "sharpness", "cutout")
)
FILL = tl.constexpr(FILL_VALUE)
RADIANS_PER_DEGREE = tl.constexpr(math.pi / 180)
ROUND_MAGIC = tl.constexpr(1.5 * 2**23)  # adding and subtracting it rounds fp32 to the nearest integer, ties to even


@triton.jit
def apply_ops_kernel(
    images_ptr, ops_ptr, args_ptr, centers_ptr, tables_ptr, out_ptr, H, W,
    C: tl.constexpr, HAS_CENTERS: tl.constexpr, BLOCK_PIXELS: tl.constexpr,
):  # fmt: skip
    """out[b] = OPS[ops[b]](images[b], args[b]), one program per image.

    Grid: (B,).

    images, out: (B, C, H, W) uint8. ops: (B,) int64. args: (B,) fp32. centers: (2, B) fp32 in [0, 1), the centre of
    the cutout square, or None. tables: (B, C, 256) uint8, scratch memory for equalize.
    Reads the image once for pointwise operations, and up to three times for those that need a mean or a histogram.
    """
    image, B = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    op, arg = tl.load(ops_ptr + image), tl.load(args_ptr + image)
    images_ptr += image * C * H * W
    out_ptr += image * C * H * W
    if (op >= SHEAR_X) & (op <= ROTATE):
        _affine(images_ptr, out_ptr, op, arg, H, W, C, BLOCK_PIXELS)
    elif op == EQUALIZE:
        _equalize(images_ptr, out_ptr, tables_ptr + image * C * 256, H * W, C, BLOCK_PIXELS)
    elif (op == COLOR) | (op == SHARPNESS):
        _blend(images_ptr, out_ptr, op, arg, H, W, C, BLOCK_PIXELS)
    else:
        mean = tl.zeros((), tl.float32)
        if op == CONTRAST:
            mean = _mean_luma(images_ptr, H * W, C, BLOCK_PIXELS)
        for c in tl.static_range(C):
            plane_ptr, out_plane_ptr = images_ptr + c * H * W, out_ptr + c * H * W
            low, high = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
            if op == AUTOCONTRAST:
                low, high = _min_max(plane_ptr, H * W, BLOCK_PIXELS)
            for start in range(0, H * W, BLOCK_PIXELS):
                offsets = start + tl.arange(0, BLOCK_PIXELS)
                level = tl.load(plane_ptr + offsets, offsets < H * W, 0).to(tl.int32)
                value = _pointwise(level, op, arg, mean)
                if high > low:
                    value = _autocontrast(level, low, high)
                if HAS_CENTERS:
                    center_y = tl.floor(tl.load(centers_ptr + image) * H)
                    center_x = tl.floor(tl.load(centers_ptr + B + image) * W)
                    distance = tl.maximum(tl.abs(offsets // W + 0.5 - center_y), tl.abs(offsets % W + 0.5 - center_x))
                    value = tl.where((op == CUTOUT) & (distance < arg), FILL, value)
                tl.store(out_plane_ptr + offsets, value.to(tl.uint8), offsets < H * W)


@triton.jit
def _pointwise(level, op, arg, mean):
    """Operations that depend on the pixel alone (and on the image mean): fp32 in [0, 255], to be truncated."""
    v = level.to(tl.float32)
    dropped_bits = (1 << tl.where(op == POSTERIZE, 8 - arg, 0.0).to(tl.int32)) - 1
    value = (level & ~dropped_bits).to(tl.float32)
    value = tl.where(op == SOLARIZE, tl.where(v < arg, v, 255 - v), value)
    value = tl.where((op == SOLARIZE_ADD) & (v < 128), v + arg, value)
    value = tl.where(op == INVERT, 255 - v, value)
    value = tl.where(op == BRIGHTNESS, arg * v, value)
    value = tl.where(op == CONTRAST, mean + arg * (v - mean), value)
    return tl.minimum(tl.maximum(value, 0.0), 255.0)


@triton.jit
def _autocontrast(level, low, high):
    """Stretch [low, high] to [0, 255], in fp64 as Pillow does."""
    scale = tl.full((), 255.0, tl.float64) / (high - low).to(tl.float64)
    value = (level.to(tl.float64) * scale - low.to(tl.float64) * scale).to(tl.int32)
    return tl.minimum(tl.maximum(value, 0), 255).to(tl.float32)


@triton.jit
def _min_max(plane_ptr, num_pixels, BLOCK_PIXELS: tl.constexpr):
    low, high = tl.full((BLOCK_PIXELS,), 255, tl.int32), tl.full((BLOCK_PIXELS,), 0, tl.int32)
    for start in range(0, num_pixels, BLOCK_PIXELS):
        offsets = start + tl.arange(0, BLOCK_PIXELS)
        low = tl.minimum(low, tl.load(plane_ptr + offsets, offsets < num_pixels, 255).to(tl.int32))
        high = tl.maximum(high, tl.load(plane_ptr + offsets, offsets < num_pixels, 0).to(tl.int32))
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit
def _luma(image_ptr, offsets, mask, num_pixels, C: tl.constexpr):
    """Pillow's greyscale: ITU-R 601 in 16-bit fixed point."""
    luma = tl.load(image_ptr + offsets, mask, 0).to(tl.int32)
    if C == 3:
        green = tl.load(image_ptr + num_pixels + offsets, mask, 0).to(tl.int32)
        blue = tl.load(image_ptr + 2 * num_pixels + offsets, mask, 0).to(tl.int32)
        luma = (luma * 19595 + green * 38470 + blue * 7471 + 32768) >> 16
    return luma


@triton.jit
def _mean_luma(image_ptr, num_pixels, C: tl.constexpr, BLOCK_PIXELS: tl.constexpr):
    """Mean of the greyscale image, rounded to an integer."""
    luma_sum = tl.zeros((BLOCK_PIXELS,), tl.int64)
    for start in range(0, num_pixels, BLOCK_PIXELS):
        offsets = start + tl.arange(0, BLOCK_PIXELS)
        mask = offsets < num_pixels
        luma_sum += tl.where(mask, _luma(image_ptr, offsets, mask, num_pixels, C), 0)
    return ((2 * tl.sum(luma_sum, 0) + num_pixels) // (2 * num_pixels)).to(tl.float32)


@triton.jit
def _equalize(image_ptr, out_ptr, tables_ptr, num_pixels, C: tl.constexpr, BLOCK_PIXELS: tl.constexpr):
    """Histogram equalisation. The lookup tables go through global memory because every thread reads any entry."""
    level = tl.arange(0, 256)
    for c in tl.static_range(C):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, num_pixels, BLOCK_PIXELS):
            offsets = start + tl.arange(0, BLOCK_PIXELS)
            values = tl.load(image_ptr + c * num_pixels + offsets, offsets < num_pixels, 0).to(tl.int32)
            counts += tl.histogram(values, 256)
        # Masked loads were counted as level 0.
        counts -= tl.where(level == 0, tl.cdiv(num_pixels, BLOCK_PIXELS) * BLOCK_PIXELS - num_pixels, 0)
        brightest = tl.max(tl.where(counts > 0, level, 0), 0)
        step = (num_pixels - tl.sum(tl.where(level == brightest, counts, 0), 0)) // 255
        equalized = (tl.cumsum(counts, 0) - counts + step // 2) // tl.maximum(step, 1)
        table = tl.where(step > 0, tl.minimum(equalized, 255), level)
        tl.store(tables_ptr + c * 256 + level, table.to(tl.uint8))
    tl.debug_barrier()
    for c in tl.static_range(C):
        for start in range(0, num_pixels, BLOCK_PIXELS):
            offsets = start + tl.arange(0, BLOCK_PIXELS)
            values = tl.load(image_ptr + c * num_pixels + offsets, offsets < num_pixels, 0).to(tl.int32)
            tl.store(out_ptr + c * num_pixels + offsets, tl.load(tables_ptr + c * 256 + values), offsets < num_pixels)


@triton.jit
def _load_minus_fill(plane_ptr, y, x, H, W):
    """The pixel minus the fill value, so that pixels outside the image are 0."""
    inside = (y >= 0) & (y < H) & (x >= 0) & (x < W)
    return tl.load(plane_ptr + y * W + x, inside, FILL).to(tl.float32) - FILL


@triton.jit
def _affine(image_ptr, out_ptr, op, arg, H, W, C: tl.constexpr, BLOCK_PIXELS: tl.constexpr):
    """Shear about the top left corner, translate, or rotate about the centre, with bilinear interpolation."""
    angle = tl.where(op == ROTATE, arg, 0.0) * RADIANS_PER_DEGREE
    cos, sin = tl.cos(angle), tl.sin(angle)
    x_per_y = tl.where(op == SHEAR_X, arg, 0.0) - sin
    y_per_x = tl.where(op == SHEAR_Y, arg, 0.0) + sin
    shift_x = W / 2 * (1 - cos) + H / 2 * sin + tl.where(op == TRANSLATE_X, arg, 0.0)
    shift_y = H / 2 * (1 - cos) - W / 2 * sin + tl.where(op == TRANSLATE_Y, arg, 0.0)
    for start in range(0, H * W, BLOCK_PIXELS):
        offsets = start + tl.arange(0, BLOCK_PIXELS)
        y, x = offsets // W + 0.5, offsets % W + 0.5
        source_y, source_x = y_per_x * x + cos * y + (shift_y - 0.5), cos * x + x_per_y * y + (shift_x - 0.5)
        top, left = tl.floor(source_y), tl.floor(source_x)
        weight_y, weight_x = source_y - top, source_x - left  # of the lower and of the right neighbours
        top, left = top.to(tl.int32), left.to(tl.int32)
        for c in tl.static_range(C):
            plane_ptr = image_ptr + c * H * W
            upper_left = _load_minus_fill(plane_ptr, top, left, H, W)
            upper = upper_left * (1 - weight_x) + _load_minus_fill(plane_ptr, top, left + 1, H, W) * weight_x
            lower_left = _load_minus_fill(plane_ptr, top + 1, left, H, W)
            lower = lower_left * (1 - weight_x) + _load_minus_fill(plane_ptr, top + 1, left + 1, H, W) * weight_x
            value = upper * (1 - weight_y) + lower * weight_y + FILL
            out_ptrs = out_ptr + c * H * W + offsets
            tl.store(out_ptrs, ((value + ROUND_MAGIC) - ROUND_MAGIC).to(tl.uint8), offsets < H * W)


@triton.jit
def _blend(image_ptr, out_ptr, op, arg, H, W, C: tl.constexpr, BLOCK_PIXELS: tl.constexpr):
    """base + arg·(image - base), where base is the greyscale image (color) or the smoothed image (sharpness)."""
    for start in range(0, H * W, BLOCK_PIXELS):
        offsets = start + tl.arange(0, BLOCK_PIXELS)
        mask, y, x = offsets < H * W, offsets // W, offsets % W
        luma = _luma(image_ptr, offsets, mask, H * W, C)
        interior = mask & (y > 0) & (y < H - 1) & (x > 0) & (x < W - 1)
        for c in tl.static_range(C):
            plane_ptr = image_ptr + c * H * W + offsets
            value = tl.load(plane_ptr, mask, 0).to(tl.int32)
            base = luma
            if op == SHARPNESS:  # the 3x3 filter (1 1 1, 1 5 1, 1 1 1)/13, rounded
                weighted_sum = 4 * value
                for dy in tl.static_range(-1, 2):
                    for dx in tl.static_range(-1, 2):
                        weighted_sum += tl.load(plane_ptr + dy * W + dx, interior, 0).to(tl.int32)
                base = tl.where(interior, (2 * weighted_sum + 13) // 26, value)
            v, b = value.to(tl.float32), base.to(tl.float32)
            blended = tl.minimum(tl.maximum((v - b) * arg + b, 0.0), 255.0)
            tl.store(out_ptr + c * H * W + offsets, blended.to(tl.uint8), mask)
