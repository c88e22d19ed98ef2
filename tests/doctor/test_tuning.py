"""Which --tune the doctor recommends, and that `vitral train` gives the same advice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vitral.device.select import Hardware
from vitral.doctor.estimates import estimate_memory
from vitral.doctor.tuning import advise_tuning
from vitral.models.presets import preset
from vitral.recipes.builtin import get_recipe
from vitral.recipes.schema import Recipe

GIB = 2**30


@pytest.fixture
def finetune() -> Recipe:
    """B/16 with ten classes."""
    recipe = get_recipe("folder-finetune")
    half = (0.5, 0.5, 0.5)
    return replace(recipe, model=preset("B/16", num_classes=10), data=replace(recipe.data, mean=half, std=half))


class FakeGPU(Hardware):
    """A GPU with this much memory, which nothing runs on."""

    memory = 0.0

    @property
    def gpu_memory_bytes(self) -> int | None:
        return int(self.memory)


def gpu(cpu: Hardware, gib: float) -> Hardware:
    FakeGPU.memory = gib * GIB
    return FakeGPU(device=cpu.device, precision="bf16", compile=False, reasons=cpu.reasons)


@pytest.mark.parametrize(
    ("num_train", "gib", "tune", "reason"),
    [
        (10, 80, "lora", "with 1 image per class, training all weights usually overfits"),
        (50, 80, "lora", "with 5 images per class, training all weights usually overfits"),
        (5_000, 80, "full", "500 images per class are enough to train all weights, and they fit this GPU"),
        (5_000, 3, "last-4", "this GPU has 3 GiB"),
        (5_000, None, "full", "on a CPU, --tune head takes about a third of the time"),
    ],
)
def test_advice_follows_images_per_class_and_memory(
    num_train: int, gib: float | None, tune: str, reason: str, finetune: Recipe, cpu: Hardware
) -> None:
    advice = advise_tuning(finetune, num_train, cpu if gib is None else gpu(cpu, gib))
    assert advice.tune == tune
    assert reason in advice.reason


def test_memory_counts_gradients_and_optimizer_state_only_for_what_trains(finetune: Recipe, cpu: Hardware) -> None:
    full, lora, head = (estimate_memory(replace(finetune, tune=t), 0, cpu) for t in ("full", "lora", "head"))
    parameters = 85.8e6
    assert full - head == pytest.approx(4 * 4 * parameters, rel=0.01)  # gradient, two moments, EMA
    assert head < lora < head + 4 * 4 * 1.3e6
