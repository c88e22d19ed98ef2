"""Forward passes of a plain module over a dataset: logits and features of images.

Shapes:  N images   C channels   H, W pixels   K classes   D features
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from vitral.data.lazy_images import Images, LazyImages
from vitral.data.preprocess import Preprocessing, check_image_type
from vitral.data.variable_images import map_batches, select_rows
from vitral.device.select import Hardware
from vitral.distributed.world import World
from vitral.errors import VitralError
from vitral.models.vit import ViT

BATCH_SIZE = 512
CPU_BF16_BATCH_SIZE = 32
ForwardFn = Callable[[Tensor], Tensor]  # normalised images (B, C, H, W) to logits or features; a module is one


def compute_logits(
    model: ForwardFn,
    images_NCHW: Images,
    preprocessing: Preprocessing,
    hardware: Hardware,
    batch_size: int | None = None,
) -> Tensor:
    """Logits (N, K) in fp32, on the device."""
    check_images(images_NCHW, preprocessing)
    forward = partial(_forward, model, preprocessing, hardware)
    return map_batches(images_NCHW, forward, batch_size or default_batch_size(hardware))


def compute_logits_distributed(
    model: ForwardFn, images_NCHW: Images, preprocessing: Preprocessing, hardware: Hardware
) -> Tensor:
    """Logits (N, K) computed by all ranks together. Every rank must call it and receives all logits."""

    def shard_logits(shard: Images) -> Tensor:
        return compute_logits(model, shard, preprocessing, hardware)

    return gather_shards(images_NCHW, hardware.world, shard_logits)


def default_batch_size(hardware: Hardware) -> int:
    """In bf16 on a CPU, the activations of a few images stay in its cache."""
    return CPU_BF16_BATCH_SIZE if hardware.device.type == "cpu" and hardware.precision == "bf16" else BATCH_SIZE


def gather_shards(images_NCHW: Images, world: World, function: Callable[[Images], Tensor]) -> Tensor:
    """The results of `function` for all images, each rank computing a share of those of every size.

    All shares have the same length, padded with the last image: a sharded model needs every rank in every batch.
    """
    if world.size == 1 or not len(images_NCHW):
        return function(images_NCHW)
    rows = torch.arange(len(images_NCHW))
    groups = images_NCHW.group_rows(rows) if isinstance(images_NCHW, LazyImages) else [rows]
    results = []
    for group in groups:
        indices = group[padded_shard(len(group), world.rank, world.size)]
        results.append(world.all_gather(function(select_rows(images_NCHW, indices)))[: len(group)])
    if len(groups) == 1:
        return results[0]
    values = torch.cat(results)
    return values[torch.cat(groups).argsort().to(values.device)]


def padded_shard(count: int, rank: int, world_size: int) -> Tensor:
    """Indices of a rank's contiguous share of `count` images, padded with the last one to the length of the others."""
    length = -(-count // world_size)
    return torch.arange(length * rank, length * (rank + 1)).clamp(max=count - 1)


def _to_normalised(images_BCHW: Tensor, preprocessing: Preprocessing, hardware: Hardware) -> Tensor:
    """Normalised images on the device. One fp32 batch is allocated: new memory takes longer than the arithmetic."""
    return preprocessing.normalise_(images_BCHW.to(hardware.device).to(torch.float32, copy=True))


@torch.inference_mode()
def _forward(model: ForwardFn, preprocessing: Preprocessing, hardware: Hardware, images_BCHW: Tensor) -> Tensor:
    with hardware.autocast():
        logits: Tensor = model(_to_normalised(images_BCHW, preprocessing, hardware))
    return logits.float()


@torch.no_grad()
def compute_features(
    model: ViT, images_NCHW: Images, preprocessing: Preprocessing, hardware: Hardware, batch_size: int = 64
) -> Tensor:
    """Pooled features (N, D), the input of the classification head, in fp32 on the CPU."""
    require_images(images_NCHW)

    def features(images: Tensor) -> Tensor:
        with hardware.autocast():
            return model.features(_to_normalised(images, preprocessing, hardware)).float().cpu()

    was_training = model.training
    model.eval()
    try:
        return map_batches(images_NCHW, features, batch_size)
    finally:
        model.train(was_training)


def require_images(images_NCHW: Images) -> None:
    """Raise VitralError if there are no images to compute features of."""
    if not len(images_NCHW):
        raise VitralError(
            "no images to compute features of",
            "Very small or very similar sets have no validation split: add images, or create a folder named val",
        )


def check_images(images_NCHW: Images, preprocessing: Preprocessing) -> None:
    if not len(images_NCHW):
        raise VitralError("no images to evaluate", "Choose a dataset or folder with --data")
    if images_NCHW.shape[1] != preprocessing.channels:
        raise VitralError(
            f"expected images with {preprocessing.channels} channels, got {images_NCHW.shape[1]}",
            "Convert between greyscale and RGB with vitral.data.preprocess.to_model_input",
        )
    check_image_type(images_NCHW, preprocessing)
