"""Images per second of DINO pretraining: vitral against lightly, with the same model, crops and batch size, in one run.

    python benchmarks/pretrain_speed.py --save

Model: a ViT of 32x32 pixels, 4x4 patches, width 256, depth 6; two global and four local crops per image; head of width
2048 with 4,096 prototypes; EMA teacher; no masked patches, which lightly's DINO does not have.

vitral            all of `vitral pretrain`: loading, views, step
lightly           DINOTransform in a DataLoader (one worker per core), DINOProjectionHead, DINOLoss and
                  update_momentum of lightly, around the same ViT, with bf16 autocast and fused AdamW. --compile
                  compiles its forward pass, which PyTorch 2.11 fails to do
lightly, no data  the same on views that are already on the device: the step alone

Without a GPU: a toy that only shows that everything runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from _output import add_output_arguments, write_results
from peers import NO_GPU_NOTICE, has_gpu, register_torchvision_ops, synchronize
from vitral.data.datasets import Dataset, Split
from vitral.device.select import select_hardware
from vitral.models.vit import ViT, ViTConfig
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import Recipe
from vitral.ssl.dino import DINOConfig
from vitral.training.setup import TrainingSetup, make_preprocessing
from vitral.training.trials.trainer import endless_batches, trial_trainer

MODEL = ViTConfig(
    image_size=(32, 32), patch_size=4, width=256, depth=6, heads=4, num_classes=1, pooling="class", positions="learned"
)
PROTOTYPES = 4096
NUM_LOCAL = 4


def time_steps(step: Callable[[], Any], batch_size: int, steps: int, rounds: int) -> list[float]:
    """Images per second in each round."""
    rates = []
    for _ in range(rounds):
        synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        rates.append(steps * batch_size / (time.perf_counter() - started))
    return rates


def make_recipe(batch_size: int) -> Recipe:
    base = get_recipe("pretrain-small")
    assert base.pretrain is not None
    dino = DINOConfig(prototypes=PROTOTYPES, patch_weight=0.0, balance="center")
    pretrain = replace(
        base.pretrain, method="dino", dino=dino, views=replace(base.pretrain.views, local_views=NUM_LOCAL)
    )
    return replace(
        base,
        model=MODEL,
        variant="plain",
        init_schemes=(),
        pretrain=pretrain,
        data=replace(base.data, mean=(0.5,) * 3, std=(0.25,) * 3),
        optim=replace(base.optim, name="adamw"),
        batch_size=batch_size,
        epochs=100,
        compile="yes",
    )


def vitral_step(images: Tensor, batch_size: int) -> Callable[[], None]:
    recipe = make_recipe(batch_size)
    train = Split(images=images, labels=torch.zeros(len(images), dtype=torch.long))
    empty = Split(images=images[:0], labels=train.labels[:0])
    dataset = Dataset(
        name="random pixels",
        classes=(),
        train=train,
        validation=empty,
        source="",
        fingerprint="",
        load_test=lambda: empty,
    )
    setup = TrainingSetup(
        recipe=recipe,
        dataset=dataset,
        loaded_dataset=dataset,
        preprocessing=make_preprocessing(recipe),
        initial_weights=None,
        notes=(),
    )
    hardware = select_hardware(precision="auto", compile="yes" if has_gpu() else "no", width=MODEL.width)
    trainer = trial_trainer(setup, hardware)
    batches = endless_batches(trainer)
    return lambda: trainer.step_runner.run(*next(batches))


class LightlyDINO(nn.Module):
    """DINO as in lightly's documentation, around vitral's ViT."""

    def __init__(self, device: torch.device, compile: bool) -> None:
        super().__init__()
        from lightly.loss import DINOLoss

        self.student, self.teacher = (self._make_branch().to(device) for _ in range(2))
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.criterion = DINOLoss(output_dim=PROTOTYPES).to(device)
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-3, fused=device.type == "cuda")
        self.device = device
        self.forward_views = torch.compile(self._forward_views) if compile else self._forward_views

    @staticmethod
    def _make_branch() -> nn.ModuleList:
        from lightly.models.modules import DINOProjectionHead

        vit = ViT(MODEL)
        vit.head, vit.accepts_any_grid = nn.Identity(), True
        return nn.ModuleList([vit, DINOProjectionHead(MODEL.width, 2048, 256, PROTOTYPES)])

    def _forward_views(self, branch: nn.ModuleList, images: Tensor) -> Tensor:
        vit, head = branch
        return head(vit(images))

    def step(self, views: list[Tensor]) -> None:
        from lightly.models.utils import update_momentum

        for teacher, student in zip(self.teacher, self.student, strict=True):
            update_momentum(student, teacher, m=0.99)
        n = len(views[0])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            global_views, local_views = torch.cat(views[:2]), torch.cat(views[2:])
            with torch.no_grad():
                targets = self.forward_views(self.teacher, global_views)
            outputs = [self.forward_views(self.student, global_views), self.forward_views(self.student, local_views)]
        predictions = [part.float() for output in outputs for part in output.split(n)]
        loss = self.criterion([part.float() for part in targets.split(n)], predictions, epoch=1)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


class TransformedImages(torch.utils.data.Dataset[Any]):
    def __init__(self, images: Tensor, transform: Callable[[Image.Image], list[Tensor]]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> list[Tensor]:
        return self.transform(Image.fromarray(self.images[index].permute(1, 2, 0).numpy()))


def lightly_loader(images: Tensor, batch_size: int) -> DataLoader[Any]:
    from lightly.transforms.dino_transform import DINOTransform

    transform = DINOTransform(
        global_crop_size=32,
        global_crop_scale=(0.2, 1.0),
        local_crop_size=16,
        local_crop_scale=(0.05, 0.4),
        n_local_views=NUM_LOCAL,
        gaussian_blur=(0.0, 0.0, 0.0),
    )
    workers = len(os.sched_getaffinity(0)) if has_gpu() else 0
    return DataLoader(
        TransformedImages(images, transform),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=has_gpu(),
    )


def measure_lightly(images: Tensor, batch_size: int, steps: int, rounds: int, compile: bool) -> dict[str, list[float]]:
    device = torch.device("cuda" if has_gpu() else "cpu")
    dino = LightlyDINO(device, compile)
    fixed = [torch.randn(batch_size, 3, size, size, device=device) for size in (32, 32, *(16,) * NUM_LOCAL)]
    time_steps(lambda: dino.step(fixed), batch_size, 3, 1)
    rates = {"lightly, no data": time_steps(lambda: dino.step(fixed), batch_size, steps, rounds)}
    loader = lightly_loader(images, batch_size)
    batches: Iterator[Any] = iter([])

    def step() -> None:
        nonlocal batches
        views = next(batches, None)
        if views is None:
            batches = iter(loader)
            views = next(batches)
        dino.step([view.to(device, non_blocking=True) for view in views])

    time_steps(step, batch_size, 2, 1)
    return {"lightly": time_steps(step, batch_size, max(steps // 2, 1), rounds), **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=512 if has_gpu() else 4)
    parser.add_argument("--steps", type=int, default=30 if has_gpu() else 1)
    parser.add_argument("--compile", action="store_true", help="compile the forward pass of lightly's model")
    parser.add_argument("--rounds", type=int, default=5 if has_gpu() else 1)
    add_output_arguments(parser)
    args = parser.parse_args()
    if not has_gpu():
        print(NO_GPU_NOTICE)
    register_torchvision_ops()
    images = torch.randint(0, 256, (args.batch_size * 20, 3, 32, 32), dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = vitral_step(images, args.batch_size)
        time_steps(step, args.batch_size, 6 if has_gpu() else 1, 1)
        rates = {"vitral": time_steps(step, args.batch_size, args.steps, args.rounds)}
        rates |= measure_lightly(images, args.batch_size, args.steps, args.rounds, args.compile)
    base = statistics.median(rates["vitral"])
    rows = []
    for name, values in rates.items():
        median, low, high = statistics.median(values), min(values), max(values)
        speeds = {"images_per_second": round(median), "lowest": round(low), "highest": round(high)}
        rows.append({"library": name, **speeds, "rounds": len(values), "vitral_is": round(base / median, 2)})
        print(f"{name:<18} {median:>9,.0f} images/s ({low:,.0f} to {high:,.0f}), vitral {base / median:.2f}x")
    write_results(args, rows, dtype="bf16", packages=("torch", "lightly"))


if __name__ == "__main__":
    main()
