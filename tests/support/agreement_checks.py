"""Checks of what all ranks must decide alike, which tests/distributed runs on two ranks. Each rank raises."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from support.triton_interpreter import fake_gpu
from vitral.data.augment import AugmentConfig
from vitral.data.preprocess import Preprocessing
from vitral.device.cuda_graphs import check_collective_capture, wait_until
from vitral.distributed.parallel import ParallelPlan
from vitral.distributed.world import World, init_distributed, world_from_env
from vitral.errors import VitralError
from vitral.kernels.backend import TritonBackend
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.schema import DataConfig, OptimConfig, Recipe
from vitral.training.backend import ReferenceBackend
from vitral.training.optim.builder import make_optimizers

BROKEN_KERNELS = {  # of rank 1, with what all ranks log
    "embed.op.embed_images": "patch embedding without fused kernel",
    "backend.fused_augment": "augmentation in PyTorch",
    "backend.fused_cross_entropy": "loss in PyTorch",
    "muon.op.momentum_stack": "muon in PyTorch",
    "adamw.op.adamw_update": "adamw in PyTorch",
}


def main() -> None:
    torch.set_num_threads(1)
    world = world_from_env()
    init_distributed(world, torch.device("cpu"))
    check_capture(world)
    check_kernels(world)


def check_capture(world: World) -> None:
    """A capture or a replay that fails on rank 1, while rank 0 would wait for it in a collective."""
    is_faulty = world.rank == 1

    def captured(replay: Callable[[], bool]) -> Callable[[], Callable[[], bool]]:
        return lambda: replay

    def all_reduce() -> bool:
        return bool(world.all_reduce_sum(torch.ones(1)) == world.size)

    def fails() -> bool:
        raise RuntimeError("out of memory\nand a traceback")

    def capture_fails() -> Callable[[], bool]:
        fails()
        return all_reduce

    def waits() -> bool:
        wait_until(lambda: False, 0.05)
        return True

    assert check_collective_capture(world, captured(all_reduce)) is None
    reason = check_collective_capture(world, capture_fails if is_faulty else captured(all_reduce))
    assert reason == "capturing a collective failed: out of memory"
    reason = check_collective_capture(world, captured((lambda: False) if is_faulty else (lambda: True)))
    assert reason == "a captured collective returned a wrong result"
    with pytest.raises(VitralError, match=r"on rank 0: not finished after 0.05 s\nTrain without CUDA graphs"):
        check_collective_capture(world, captured(fails if is_faulty else waits))
    assert all_reduce()  # the ranks are in step


def check_kernels(world: World) -> None:
    """All kernels are used; those that fail on rank 1 are used on no rank."""
    recipe = Recipe(
        name="tiny",
        data=DataConfig(name="none"),
        model=ViTConfig(image_size=(16, 16), patch_size=8, num_classes=5, width=16, depth=1, heads=2),
        optim=OptimConfig(name="muon", lr=1e-2),
        augment=AugmentConfig(flip=True),
        label_smoothing=0.1,
        batch_size=16,
    )
    assert kernel_messages(world, recipe) == []
    with pytest.MonkeyPatch.context() as patched:
        for function in BROKEN_KERNELS if world.rank == 1 else ():
            patched.setattr(f"vitral.kernels.{function}", out_of_memory)
        messages = kernel_messages(world, recipe)
    assert [message.partition(":")[0] for message in messages] == list(BROKEN_KERNELS.values()), messages


def out_of_memory(*args: Any, **options: Any) -> NoReturn:
    raise RuntimeError("out of shared memory")


def kernel_messages(world: World, recipe: Recipe) -> list[str]:
    """Messages of a backend of fused kernels and of its first optimizer step."""
    torch.manual_seed(0)
    messages: list[str] = []
    model, gpu = ViT(recipe.model), fake_gpu(world=world)
    preprocessing = Preprocessing(image_size=(16, 16), channels=3, mean=(0.5,) * 3, std=(0.2,) * 3)
    reference = ReferenceBackend(model, recipe, preprocessing, gpu, ParallelPlan(mode="single", reason="test"))
    backend = TritonBackend(
        reference, model=model, augment=recipe.augment, preprocessing=preprocessing, num_classes=5, micro_batch_size=16,
        label_smoothing=recipe.label_smoothing, hardware=gpu, log=messages.append,
    )  # fmt: skip
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    backend.optimizer_step(make_optimizers(model, recipe.optim))
    return messages


if __name__ == "__main__":
    main()
