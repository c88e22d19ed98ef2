"""Dropout as a device function. Masks are not stored: both passes compute them from a seed and the element's index.

The random bits are a hash of the index, with the seed mixed in twice. It takes ten integer instructions per element;
Philox, as in PyTorch, takes more than fifty, which kernels that only move data would notice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dropout_factor(seed_ptr, offsets, p):
    """0 with probability p, else 1/(1 - p), for each element of a matrix at `offsets`. seed_ptr: two int32."""
    x = offsets.to(tl.uint32) ^ tl.load(seed_ptr).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + tl.load(seed_ptr + 1).to(tl.uint32)) * 0x846CA68B
    x = (x ^ (x >> 16)) * 0x31848BAB
    x = x ^ (x >> 15)
    uniform = (x >> 8).to(tl.float32) * (1.0 / 16777216.0)
    return tl.where(uniform >= p, 1.0 / (1.0 - p), 0.0)


@triton.jit
def dropout_kernel(x_ptr, out_ptr, seed_ptr, p, num_elements, BLOCK: tl.constexpr):
    """out = x·dropout_factor. Reads x and writes out (num_elements,), seed (2,) int32. One program per BLOCK."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    x = tl.load(x_ptr + offsets, mask, 0.0).to(tl.float32) * dropout_factor(seed_ptr, offsets, p)
    tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty), mask)
