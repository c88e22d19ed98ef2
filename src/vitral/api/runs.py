"""What training with and without labels does around the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from vitral.device.select import DeviceOption, select_hardware
from vitral.distributed.world import World, init_distributed
from vitral.evaluation.leaks import (
    fingerprint_training_images,
    save_training_images,
)
from vitral.runs.run import Run
from vitral.training.setup import (
    TrainingSetup,
)


def join_process_group(device: DeviceOption) -> World:
    """Join the other processes of a distributed run, if there are any."""
    hardware = select_hardware(device=device)
    init_distributed(hardware.world, hardware.device)
    return hardware.world


@contextmanager
def run_lock(run: Run, world: World) -> Iterator[None]:
    """Lock the run folder on rank 0; if that fails, all ranks fail."""
    with ExitStack() as stack:
        world.broadcast_from_rank0(lambda: stack.enter_context(run.lock()))
        yield


def store_training_images(run: Run, setup: TrainingSetup) -> None:
    """Store fingerprints of the training images with the model, so that evaluations recognise them."""
    save_training_images(run.model_dir, fingerprint_training_images(setup.loaded_dataset))
