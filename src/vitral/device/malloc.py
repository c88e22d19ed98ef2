"""Settings of the C library's allocator for a process that computes on a CPU. Does not import torch.

A forward pass allocates and frees megabytes in every layer. By default glibc returns much of that to the kernel at
once, which maps and clears the same pages again for the next layer.
"""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
SETTINGS = {
    M_MMAP_THRESHOLD: 32 * 2**20,  # bytes; the most that all versions of glibc accept. Larger blocks are returned.
    M_TRIM_THRESHOLD: 512 * 2**20,  # free bytes that are kept at the end of the heap
    M_TOP_PAD: 64 * 2**20,  # the same in the heaps of threads, which are 64 MiB
}
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next allocation. Returns whether it does.

    Other C libraries and the user's own settings are left alone.
    """
    if sys.platform != "linux" or any(os.environ.get(name) for name in VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(parameter, value) == 1 for parameter, value in SETTINGS.items())
