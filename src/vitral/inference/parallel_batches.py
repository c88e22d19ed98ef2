"""Batches computed in parallel on a CPU, one per core.

Several cores on one batch wait for each other at the end of every operation, and a batch that suffices for all of them
does not fit into the caches. Separate batches need neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import TypeVar

import torch
from torch import Tensor

from vitral.device.threads import thread_count
from vitral.models.vit import ViTConfig

CACHE_BYTES = 4 * 2**20  # of the largest activation of a batch
MIN_BATCH, MAX_BATCH = 8, 16
AHEAD = 2  # batches per thread that are computed or queued

Item = TypeVar("Item")
Result = TypeVar("Result")


def cache_batch_size(config: ViTConfig) -> int:
    """Images whose largest activation fits into the caches of a core, a multiple of 8."""
    image_bytes = 4 * config.num_tokens * max(3 * config.width, config.hidden_width)
    return min(max(CACHE_BYTES // image_bytes // 8 * 8, MIN_BATCH), MAX_BATCH)


def share_batch(function: Callable[[Tensor], Tensor], images_BCHW: Tensor) -> Tensor:
    """The results of `function` for one batch, of which each thread computes a share."""
    share = -(-len(images_BCHW) // torch.get_num_threads())
    return torch.cat(list(parallel_map(function, images_BCHW.split(share))))


def parallel_map(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield `function(item)` in the order of the items, computed by as many threads as this thread computes with.

    The number of threads belongs to the process, so each of them, and the caller until the last result, computes with
    one thread; nested calls start no further threads. `items` are read a bounded number ahead. A single item is
    computed by this thread, with all of its threads.
    """
    threads, remaining = torch.get_num_threads(), iter(items)
    first = list(islice(remaining, 2))
    if threads == 1 or len(first) < 2:
        yield from map(function, chain(first, remaining))
        return
    pending: deque[Future[Result]] = deque()
    with thread_count(1), ThreadPoolExecutor(threads, "batch", torch.set_num_threads, (1,)) as pool:
        try:
            for item in chain(first, remaining):
                pending.append(pool.submit(function, item))
                if len(pending) > AHEAD * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
