"""Batches in parallel: the results of one after the other, and no effect on the threads of the caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from vitral.data.variable_images import VariableSizeImages, map_batches
from vitral.device.threads import thread_count
from vitral.inference.engine import EngineChoice
from vitral.inference.parallel_batches import MAX_BATCH, MIN_BATCH, cache_batch_size, parallel_map, share_batch
from vitral.models.vit import ViTConfig


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with thread_count(2):
        yield


def test_results_are_in_the_order_of_the_items() -> None:
    assert list(parallel_map(lambda n: n * n, range(100))) == [n * n for n in range(100)]


def test_each_worker_computes_with_one_thread_and_the_caller_keeps_its_own() -> None:
    together = threading.Barrier(2, timeout=60)

    def threads(_: int) -> int:
        together.wait()  # both workers take part
        return torch.get_num_threads()

    assert list(parallel_map(threads, range(4))) == [1, 1, 1, 1]
    assert torch.get_num_threads() == 2
    new_thread: list[int] = []
    thread = threading.Thread(target=lambda: new_thread.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert new_thread == [2]


def test_a_single_item_is_computed_by_the_caller_with_all_threads() -> None:
    assert list(parallel_map(lambda _: torch.get_num_threads(), [0])) == [2]
    assert list(parallel_map(lambda _: threading.current_thread(), [0])) == [threading.current_thread()]
    assert list(parallel_map(lambda n: n, [])) == []


def test_a_call_within_a_worker_starts_no_more_threads() -> None:
    def names(_: int) -> set[str]:
        return {threading.current_thread().name, *parallel_map(lambda _: threading.current_thread().name, range(3))}

    assert all(len(each) == 1 for each in parallel_map(names, range(4)))


def test_an_error_in_a_worker_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        list(parallel_map(lambda n: 1 // (n - 5), range(50)))


def test_items_are_read_a_bounded_number_ahead() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for n in range(1000):
            read.append(n)
            yield n

    results = parallel_map(lambda n: n, items())
    assert next(results) == 0
    assert len(read) < 20
    results.close()  # type: ignore[attr-defined]


def test_images_of_several_sizes_keep_their_order() -> None:
    images = [torch.full((1, 4 + n % 3, 6), n, dtype=torch.uint8) for n in range(40)]

    def mean(batch: Tensor) -> Tensor:
        return batch.float().mean(dim=(1, 2, 3))

    progress: list[int] = []
    result = map_batches(VariableSizeImages.stack(images), mean, 4, progress.append, parallel_map)
    assert result.tolist() == [float(n) for n in range(40)]
    assert progress == sorted(progress)


@pytest.mark.parametrize(("count", "expected"), [(1, [1]), (2, [1, 1]), (9, [4, 5]), (40, [8, 16, 16])])
def test_every_thread_has_a_batch(count: int, expected: list[int]) -> None:
    sizes: list[int] = []

    class SizeEngine:
        def __call__(self, images_BCHW: Tensor) -> Tensor:
            sizes.append(len(images_BCHW))
            return images_BCHW.float().mean(dim=(2, 3))

        features = __call__

    choice = EngineChoice(
        name="fp32", precision="fp32", device="cpu", batch_size=16, reason="a test", engine=SizeEngine()
    )
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    for method in (choice.logits, choice.features):
        sizes.clear()
        assert method(images).flatten().tolist() == list(range(count))
        assert sorted(sizes) == expected


def test_the_shares_of_a_batch_keep_their_order() -> None:
    sizes: list[int] = []

    def mean(batch: Tensor) -> Tensor:
        sizes.append(len(batch))
        return batch.float().mean(dim=(1, 2, 3))

    images = torch.arange(9, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    assert share_batch(mean, images).tolist() == list(range(9))
    assert sorted(sizes) == [4, 5]


def test_the_batch_of_a_small_model_is_larger() -> None:
    small = ViTConfig(image_size=(28, 28), patch_size=7, channels=1, width=96, depth=4, heads=4, num_classes=10)
    tiny16 = ViTConfig(image_size=(224, 224), patch_size=16, width=192, depth=12, heads=3, num_classes=1000)
    sizes = [cache_batch_size(config) for config in (small, tiny16)]
    assert sizes == [MAX_BATCH, MIN_BATCH]
