"""Recommend `--tune` for a dataset, a model and this machine, with the reason in one sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from vitral.device.select import Hardware
from vitral.doctor.estimates import estimate_memory
from vitral.recipes.schema import Recipe
from vitral.utils.text import count_text

# Training images per class. With 1,000 images per task, LoRA is more accurate than training all weights on most tasks
# of VTAB (arXiv 2206.04673).
FEW_PER_CLASS = 10
# Training images for a ViT from scratch; enough only for digits, icons or microscope patches, unlike photographs.
MIN_SCRATCH_IMAGES = 5_000
# Memory of a step with B/16, batch size 256, relative to full: last-4 0.44, LoRA 0.96 (H200, fused backend).
MEMORY_FRACTION = 0.9  # of a GPU's memory that training may need


class TuningAdvice(NamedTuple):
    """A value of `Recipe.tune`, and one sentence with the reason."""

    tune: str
    reason: str


def advise_tuning(recipe: Recipe, num_train: int, hardware: Hardware) -> TuningAdvice:
    """The way to fine-tune that suits the images per class, the hardware and its memory.

    `recipe` has the architecture of the checkpoint and the number of classes.
    """
    per_class = num_train / (recipe.model.num_classes if recipe.task_name == "classification" else 1)
    available = hardware.gpu_memory_bytes
    needed = estimate_memory(replace(recipe, tune="full"), 0, hardware)
    if available is not None and needed > MEMORY_FRACTION * available:
        return TuningAdvice(
            f"last-{max(recipe.model.depth // 3, 1)}",
            f"training all weights needs about {needed / 2**30:.0f} GiB and this GPU has {available / 2**30:.0f} GiB; "
            "frozen first blocks keep no activations, which take most of the memory",
        )
    if per_class < FEW_PER_CLASS:
        count = count_text(round(per_class), "image")
        return TuningAdvice("lora", f"with {count} per class, training all weights usually overfits")
    if available is None:
        return TuningAdvice(
            "full",
            f"{per_class:,.0f} images per class are enough to train all weights; on a CPU, --tune head takes about a "
            "third of the time and is as accurate if the classes resemble those of the checkpoint",
        )
    return TuningAdvice(
        "full",
        f"{per_class:,.0f} images per class are enough to train all weights, and they fit this GPU; --tune lora saves "
        "an adapter of a few megabytes per task instead of a whole model",
    )
