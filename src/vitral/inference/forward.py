"""Forward passes of a plain module over a dataset: logits and features of images.

Shapes:  N images   C channels   H, W pixels   K classes   D features
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vitral.data.lazy_images import Images, iter_batches
from vitral.data.preprocess import Preprocessing, check_image_type
from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.models.vit import ViT
from vitral.utils.progress import ProgressFn, no_progress


def compute_logits(
    model: nn.Module,
    images_NCHW: Images,
    preprocessing: Preprocessing,
    hardware: Hardware,
    batch_size: int = 512,
    progress: ProgressFn = no_progress,
) -> Tensor:
    """Logits (N, K) in fp32, on the device."""
    check_images(images_NCHW, preprocessing)
    return _forward_batches(model, images_NCHW.split(batch_size), preprocessing, hardware, progress)


def compute_logits_distributed(
    model: nn.Module,
    images_NCHW: Images,
    preprocessing: Preprocessing,
    hardware: Hardware,
    batch_size: int = 512,
    progress: ProgressFn = no_progress,
) -> Tensor:
    """Logits (N, K) computed by all ranks together. Every rank must call it and receives all logits."""
    world = hardware.world
    if world.size == 1 or not len(images_NCHW):
        return compute_logits(model, images_NCHW, preprocessing, hardware, batch_size, progress)
    indices = padded_shard(len(images_NCHW), world.rank, world.size)
    batches = iter_batches(images_NCHW, indices.split(batch_size))
    logits = _forward_batches(model, batches, preprocessing, hardware, progress)
    return world.all_gather(logits)[: len(images_NCHW)]


def padded_shard(count: int, rank: int, world_size: int) -> Tensor:
    """Indices of a rank's contiguous share of `count` images.

    All shares have the same length, padded with the last image: a sharded model needs every rank in every batch.
    """
    length = -(-count // world_size)
    return torch.arange(length * rank, length * (rank + 1)).clamp(max=count - 1)


@torch.inference_mode()
def _forward_batches(
    model: nn.Module, batches: Iterable[Tensor], preprocessing: Preprocessing, hardware: Hardware, progress: ProgressFn
) -> Tensor:
    logits: list[Tensor] = []
    for images in batches:
        if logits:
            progress(sum(map(len, logits)))
        with hardware.autocast():
            logits.append(model(preprocessing.normalise(images.to(hardware.device))).float())
    return torch.cat(logits)


@torch.no_grad()
def compute_features(
    model: ViT, images_NCHW: Images, preprocessing: Preprocessing, hardware: Hardware, batch_size: int = 64
) -> Tensor:
    """Pooled features (N, D), the input of the classification head, in fp32 on the CPU."""
    if not len(images_NCHW):
        raise VitralError(
            "no images to compute features of",
            "Very small or very similar sets have no validation split: add images, or create a folder named val",
        )
    features, was_training = [], model.training
    model.eval()
    try:
        for images in images_NCHW.split(batch_size):
            with hardware.autocast():
                batch_features = model.features(preprocessing.normalise(images.to(hardware.device)))
            features.append(batch_features.float().cpu())
    finally:
        model.train(was_training)
    return torch.cat(features)


def check_images(images_NCHW: Images, preprocessing: Preprocessing) -> None:
    if not len(images_NCHW):
        raise VitralError("no images to evaluate", "Choose a dataset or folder with --data")
    if images_NCHW.shape[1] != preprocessing.channels:
        raise VitralError(
            f"expected images with {preprocessing.channels} channels, got {images_NCHW.shape[1]}",
            "Convert between greyscale and RGB with vitral.data.preprocess.to_model_input",
        )
    check_image_type(images_NCHW, preprocessing)
