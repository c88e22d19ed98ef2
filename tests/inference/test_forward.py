"""Forward passes over datasets: batching, features and invalid input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from support.models import build_model, cpu_fp32, smooth_images
from vitral.data.preprocess import Preprocessing
from vitral.errors import VitralError
from vitral.inference.forward import compute_features, compute_logits, compute_logits_distributed, padded_shard

PREPROCESSING = Preprocessing(image_size=(4, 4), channels=1, mean=(0.2,), std=(0.5,))


@pytest.mark.parametrize("batch_size", [1, 3, 7, 512])
def test_logits_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    images = torch.randint(0, 256, (7, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    logits = compute_logits(nn.Flatten(), images, PREPROCESSING, cpu_fp32(), batch_size=batch_size)
    torch.testing.assert_close(logits, (images.flatten(1) / 255 - 0.2) / 0.5)
    assert logits.dtype == torch.float32


class FloatBatches(TorchDispatchMode):
    """Counts the allocated fp32 tensors of the size of `images`."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.images = images
        self.alive: list[Tensor] = []  # so that no memory is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if isinstance(result, Tensor) and result.dtype == torch.float32 and result.numel() == self.images.numel():
            self.alive.append(result)
        return result

    @property
    def count(self) -> int:
        return len({tensor.data_ptr() for tensor in self.alive} - {self.images.data_ptr()})


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_batch_is_normalised_in_the_memory_of_its_fp32_copy(dtype: Literal["uint8", "float32"]) -> None:
    images = torch.randint(0, 256, (6, 1, 4, 4), dtype=torch.uint8).to(getattr(torch, dtype))
    original, preprocessing = images.clone(), replace(PREPROCESSING, dtype=dtype)
    with FloatBatches(images) as batches:
        compute_logits(lambda batch: batch.mean(dim=(2, 3)), images, preprocessing, cpu_fp32())
    assert batches.count == 1
    assert torch.equal(images, original)


def test_a_single_rank_computes_all_logits() -> None:
    images = torch.randint(0, 256, (10, 1, 4, 4), dtype=torch.uint8)
    logits = compute_logits_distributed(nn.Flatten(), images, PREPROCESSING, cpu_fp32())
    torch.testing.assert_close(logits, compute_logits(nn.Flatten(), images, PREPROCESSING, cpu_fp32()))


@pytest.mark.parametrize(("count", "world_size"), [(10, 3), (2, 4), (8, 2), (1, 1)])
def test_padded_shards_cover_all_images_and_have_equal_length(count: int, world_size: int) -> None:
    shards = [padded_shard(count, rank, world_size) for rank in range(world_size)]
    assert len({len(shard) for shard in shards}) == 1
    assert torch.equal(torch.cat(shards)[:count], torch.arange(count))


def test_images_with_the_wrong_number_of_channels_are_refused() -> None:
    with pytest.raises(VitralError, match="expected images with 1 channels, got 3"):
        compute_logits(nn.Flatten(), torch.zeros(2, 3, 4, 4, dtype=torch.uint8), PREPROCESSING, cpu_fp32())


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(VitralError, match="no images"):
        compute_logits(nn.Flatten(), torch.zeros(0, 1, 4, 4, dtype=torch.uint8), PREPROCESSING, cpu_fp32())


def test_features_are_the_input_of_the_head_and_leave_the_mode_unchanged() -> None:
    model, preprocessing = build_model("class")
    images = smooth_images(5)
    model.train()
    features = compute_features(model, images, preprocessing, cpu_fp32(), batch_size=2)
    assert model.training
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(features, model.features(preprocessing.normalise(images)))
    with pytest.raises(VitralError, match="no images to compute features of"):
        compute_features(model, images[:0], preprocessing, cpu_fp32())
