"""GPU memory: copies to pinned host memory, defragmentation, measurements, the budget for a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def to_pinned_cpu(tensor: Tensor) -> Tensor:
    """Copy to the host and wait for the copy. Pinned memory is several times faster to write to than pageable."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return pinned


def defragment(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Move tensors through the host so that they end up contiguous in GPU memory.

    The caching allocator can only return whole segments to the driver: a single live tensor keeps its segment.
    """
    copies = [tensor.data.cpu() for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.new_empty(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.data = copy.to(device)


def dataset_budget_bytes(device: torch.device) -> float:
    """Bytes a dataset may occupy on the device: half of the free GPU memory, unlimited on a CPU (no copy is made)."""
    return torch.cuda.mem_get_info(device)[0] / 2 if device.type == "cuda" else torch.inf


def free_bytes(device: torch.device) -> int | None:
    """Free memory of the GPU; None on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def allocated_bytes(device: torch.device) -> int:
    """Memory of the tensors on the GPU that exist now."""
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device, compute: Callable[[], object]) -> int | None:
    """Peak memory of tensors on the GPU during a computation; None if there is not enough memory for it."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        compute()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated(device)


def release_cached_memory(device: torch.device) -> None:
    """Return the allocator's unused memory to the driver."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch could not allocate a tensor, on a GPU or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def gpu_memory_bytes(device: torch.device) -> int | None:
    """Total memory of the GPU; None on a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
