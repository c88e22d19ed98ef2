"""What to train on a folder of images, and what that takes on this machine: a few steps of the real model are timed."""

from __future__ import annotations

import shlex
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from vitral.analysis import cost as estimate
from vitral.device.hardware import Hardware, choose, is_busy
from vitral.doctor import IMBALANCE, Diagnosis
from vitral.recipes.builtin import named
from vitral.recipes.schema import Recipe
from vitral.training.setup import of_preset, preprocessing_of, shaped_like
from vitral.training.state import begin
from vitral.training.trainer import Task, train_step
from vitral.utils.serialization import to_plain

# Where a checkpoint of each size is to be had: trained on ImageNet-21k (arXiv 2106.10270).
CHECKPOINTS = {
    "Ti/16": "hf:timm/vit_tiny_patch16_224.augreg_in21k",
    "S/16": "hf:timm/vit_small_patch16_224.augreg_in21k",
    "B/16": "hf:timm/vit_base_patch16_224.augreg_in21k",
}
ENOUGH_FOR_SCRATCH = 50_000  # training images; below, a checkpoint wins clearly (the paper, section 4.3)
ENOUGH_IF_SMALL = 5_000  # of pictures that are no photographs: digits, icons, patches of a microscope's image
SMALL = 64  # pixels of the shorter side up to which they are taken for such
PROCESS = 0.4e9  # bytes of Python and PyTorch themselves
TIMED = 2.0  # seconds of steps that are timed, and so many at least
LEAST_STEPS = 2
TIMED_BATCH = 8  # on a CPU, whose time grows with the images: a whole batch could take longer than all the rest here


@dataclass(frozen=True, kw_only=True)
class Advice:
    what: str  # "fine-tune Ti/16 at 224 px, 10 epochs"
    why: str
    command: str
    seconds: float  # of the whole training on this machine
    memory: float  # bytes, at most
    hardware: str
    steps_timed: int
    busy: str  # a sentence, where other work on this machine made the steps slower

    def as_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain


def advise(diagnosis: Diagnosis, *, init: str | None = None) -> Advice:
    """`init`: a checkpoint that the person has; otherwise one of the hub's is named."""
    held_out = 0 if "validation" in diagnosis.splits else 0.15
    images = round(diagnosis.splits.get("train", 0) * (1 - held_out))
    good = [photo for photo in diagnosis.photos if not photo.error]
    short = statistics.median(min(photo.size) for photo in good)
    scratch, why = _from_scratch(images, short, init)
    size = _preset(images, choose().memory is not None)
    flags: list[str] = []
    if scratch:
        plan, kind = _scaled(named("folder-scratch"), short), "train from scratch"
        if plan.model.image_size != named("folder-scratch").model.image_size:
            flags.append(f"--model.image-size {plan.model.image_size[0]}")
        if plan.model.patch_size != named("folder-scratch").model.patch_size:
            flags.append(f"--model.patch-size {plan.model.patch_size}")
    elif init is not None:
        plan, kind = shaped_like(named("folder-finetune"), init), "fine-tune this checkpoint"
        flags.append(f"--init {init}")
    else:
        plan, kind = of_preset(named("folder-finetune"), size), f"fine-tune {size}"
        flags.append(f"--init {CHECKPOINTS[size]}")
    epochs = plan.epochs if images < 5_000 else max(plan.epochs // 2, 3)
    if epochs != plan.epochs:
        flags.append(f"--epochs {epochs}")
    counts = [of.get("train", 0) for of in diagnosis.classes.values() if of.get("train")]
    if max(counts) >= IMBALANCE * min(counts):
        flags.append("--sampling balanced")
    plan = replace(
        plan,
        epochs=epochs,
        batch=min(plan.batch, max(images, 1)),
        model=replace(plan.model, classes=max(len(counts), 1)),
        data=replace(plan.data, mean=(0.5,) * plan.model.channels, std=(0.5,) * plan.model.channels),
    )
    busy = is_busy()
    seconds, hardware, timed = time_of(plan, images, diagnosis.images)
    return Advice(
        what=f"{kind} at {plan.model.image_size[0]} px, {epochs} epochs",
        why=why,
        command=" ".join(["vitral train", shlex.quote(diagnosis.folder), *flags]),
        seconds=seconds,
        memory=memory_of(plan, diagnosis.images, hardware),
        hardware=hardware.name,
        steps_timed=timed,
        busy=busy,
    )


def _from_scratch(images: int, short: float, init: str | None) -> tuple[bool, str]:
    if init is not None:
        return False, "a checkpoint is there"
    if images >= ENOUGH_FOR_SCRATCH:
        return True, f"{images:,} training images are enough to begin from nothing"
    if short <= SMALL and images >= ENOUGH_IF_SMALL:
        return True, f"small pictures ({short:.0f} px) and {images:,} of them: photographs' weights help little"
    return False, f"{images:,} training images are few for a ViT: a checkpoint has seen millions"


def _preset(images: int, gpu: bool) -> str:
    """More images can teach a larger model, where there is something to compute it with."""
    return "B/16" if gpu and images >= 20_000 else "S/16" if gpu and images >= 2_000 else "Ti/16"


def _scaled(plan: Recipe, short: float) -> Recipe:
    """From scratch: images no larger than they are, and patches that leave at least 7×7 of them."""
    side = plan.model.image_size[0]
    if short >= side:
        return plan
    patch = plan.model.patch_size if short >= 7 * plan.model.patch_size else 8 if short >= 56 else 4
    pixels = max(int(short) // patch * patch, 4 * patch)
    return replace(plan, model=replace(plan.model, image_size=(pixels, pixels), patch_size=patch))


def time_of(plan: Recipe, images: int, all_images: int) -> tuple[float, Hardware, int]:
    """Seconds of the whole training, from a few real steps on random pixels."""
    steps = max(images // plan.batch, 1)
    hardware = choose(
        device=plan.device, precision=plan.precision, compile="no", width=plan.model.width, steps=steps * plan.epochs
    )
    state, seen = begin(plan, hardware, steps * plan.epochs), preprocessing_of(plan)
    height, width = (int(side / seen.crop) for side in seen.image_size)
    batch = plan.batch if hardware.memory else min(plan.batch, TIMED_BATCH)
    shape = (batch, seen.channels, height if plan.augment.crop else seen.image_size[0],
             width if plan.augment.crop else seen.image_size[1])  # fmt: skip
    draws = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draws).to(hardware.device)
    labels = torch.randint(0, plan.model.classes, shape[:1], generator=draws).to(hardware.device)
    took: list[float] = []
    begun = time.perf_counter()
    while len(took) <= LEAST_STEPS or time.perf_counter() - begun < TIMED:
        start = time.perf_counter()
        train_step(state.model, state, pixels, labels, Task(plan, seen, hardware))
        hardware.synchronize()
        took.append(time.perf_counter() - start)
        if time.perf_counter() - begun > 10 * TIMED and len(took) > 1:
            break
    a_step = statistics.median(took[1:]) * plan.batch / batch  # the first one also allocates
    a_question = a_step / plan.batch / 3  # forward alone is a third of the arithmetic
    asked = (all_images - images) * a_question * plan.epochs
    return plan.epochs * steps * a_step + asked, hardware, len(took) - 1


def memory_of(plan: Recipe, images: int, hardware: Hardware) -> float:
    """Bytes at most: weights, gradients, AdamW's two averages, averaged weights, activations, the images themselves."""
    parameters = estimate.count(plan.model).total
    kept = estimate.activations(plan.model, hardware.precision, "gpu" if hardware.memory else "cpu").plain
    seen = preprocessing_of(plan)
    pixels = images * seen.channels * (seen.image_size[0] / seen.crop) * (seen.image_size[1] / seen.crop)
    return PROCESS + 4 * parameters * (5 if plan.ema else 4) + plan.batch * kept + pixels
