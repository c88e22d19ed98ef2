"""All that changes while training: begun, saved, restored, taken back. A checkpoint is a State on disk."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from vitral.device.hardware import Hardware
from vitral.distributed.dtensor import load_weights, parameters_of, placed_state
from vitral.distributed.parallel import divide, way_of
from vitral.errors import VitralError
from vitral.models.variants import VARIANTS
from vitral.models.vit import ViT
from vitral.recipes.schema import Recipe, from_values
from vitral.runs.run import Run
from vitral.training import checkpoint
from vitral.training.activation_checkpointing import recompute_blocks
from vitral.training.init_schemes import start_as, start_at_even_odds
from vitral.training.optim.build import Averaged, make_optimizers, restore_optimizer
from vitral.training.optim.muon import Muon
from vitral.utils.serialization import to_plain


@dataclass
class State:
    """All that changes while training."""

    model: ViT
    optimizers: list[Optimizer]
    averaged: Averaged | None
    draws: Generator  # for augmentation; dropout and stochastic depth draw from the device's own generator
    totals: Tensor  # of this epoch so far: loss, right answers, images
    first_bad: Tensor  # the step whose loss or gradient was not finite, or -1; from then on no weight moves
    halted: Tensor  # 1 from then on: torch's fused optimizers look at it, on the device
    at: Tensor  # `step`, on the device
    epoch: int = 0
    position: int = 0  # batches of this epoch already seen
    step: int = 0
    seconds: float = 0.0
    best: dict[str, float] = field(default_factory=dict)  # epoch, top1, loss
    rollbacks: int = 0  # each has halved the learning rate
    rolled_to: int = -1  # the step that the last one went back to

    @property
    def answering(self) -> ViT:
        """The model that is asked: averaged weights where there are such."""
        return self.averaged.model if self.averaged is not None else self.model  # type: ignore[return-value]

    def to_save(self, hardware: Hardware) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "averaged": self.averaged.model.state_dict() if self.averaged is not None else None,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "draws": self.draws.get_state(),
            "random": hardware.random_state(),
            "randoms": hardware.world.gather([hardware.random_state()]),  # of every process
            "totals": self.totals,
            "epoch": self.epoch,
            "position": self.position,
            "seconds": self.seconds,
            "best": self.best,
            "rollbacks": self.rollbacks,
            "rolled_to": self.rolled_to,
        }

    def restore(self, saved: dict[str, Any], hardware: Hardware) -> None:
        load_weights(self.model, saved["model"])
        if self.averaged is not None:
            load_weights(self.averaged.model, saved["averaged"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            restore_optimizer(optimizer, placed_state(optimizer, state))
        if saved["draws"].shape == self.draws.get_state().shape:
            self.draws.set_state(saved["draws"])
        else:  # made on another kind of device: its draws cannot be continued here, only begun anew
            self.draws.manual_seed(saved["step"])
        world, randoms = hardware.world, saved.get("randoms", [saved["random"]])
        if len(randoms) == world.size:
            hardware.set_random_state(randoms[world.rank])
        elif world.first:
            hardware.set_random_state(saved["random"])
        else:  # made by another number of processes: this one's draws are begun anew
            torch.manual_seed(own_seed(saved["step"], world.rank))
        self.totals.copy_(saved["totals"])
        self.epoch, self.position, self.step = saved["epoch"], saved["position"], saved["step"]
        self.seconds, self.best = saved["seconds"], saved["best"]
        self.rollbacks, self.rolled_to = saved.get("rollbacks", 0), saved.get("rolled_to", -1)
        self.first_bad.fill_(-1)
        self.halted.zero_()

    def like(self, name: str) -> Tensor | None:
        """The parameter that a saved tensor belongs to, by its name in `to_save`: "optimizers/0/state/5/exp_avg"."""
        kind, _, rest = name.partition("/")
        if kind == "optimizers":
            which, _, index, _ = rest.split("/")
            return parameters_of(self.optimizers[int(which)])[int(index)]
        model = self.averaged.model if kind == "averaged" and self.averaged is not None else self.model
        found: Tensor | None = model.state_dict().get(rest)
        return found


def begin(
    recipe: Recipe,
    hardware: Hardware,
    steps: int,
    start: dict[str, Tensor] | None = None,
    sample: Tensor | None = None,
) -> State:
    """Everything as it is before the first step, with weights drawn from the seed or given in `start`.

    `sample`: some training images, normalised, for weights that are chosen by them."""
    torch.manual_seed(recipe.seed)
    model = VARIANTS[recipe.variant](recipe.model)
    if start is not None:
        model.load_state_dict(start)
    else:
        start_as(recipe.start, model, sample)
    if recipe.loss == "sigmoid":
        start_at_even_odds(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(recipe.frozen))
    share = recipe.ema_share(steps)
    copied = copy.deepcopy(model) if share else None
    way = way_of(recipe, hardware)
    for one in (model, copied):
        if one is not None:
            divide(one, way, hardware)
    if not hardware.world.first:  # dropout and stochastic depth: other draws for other images
        torch.manual_seed(own_seed(recipe.seed, hardware.world.rank))
    state = State(
        model=model.train(),
        optimizers=make_optimizers(model, recipe.optim, on_device=hardware.device if hardware.graph else None),
        averaged=Averaged(model, share, steps, copied) if share else None,
        draws=Generator(hardware.device).manual_seed(recipe.seed),
        totals=torch.zeros(3, device=hardware.device, dtype=torch.float64),  # fp32 counts to 16 million
        first_bad=torch.full((), -1, device=hardware.device),
        halted=torch.zeros((), device=hardware.device),
        at=torch.zeros((), device=hardware.device, dtype=torch.int64),
    )
    for optimizer in state.optimizers:
        optimizer.found_inf = state.halted  # type: ignore[attr-defined]
        if isinstance(optimizer, Muon) and hardware.graph and way.name == "alone" and gradients_stay(recipe):
            optimizer.begin_early()
    if recipe.recompute:
        recompute_blocks(model)
    return state


def gradients_stay(recipe: Recipe) -> bool:
    """As the one pass backwards leaves them, until the step."""
    return recipe.accumulate == 1 and not recipe.optim.clip


def own_seed(seed: int, rank: int) -> int:
    """Of one process among several."""
    return (seed + rank * 0x9E3779B97F4A7C15) % 2**63


def write_checkpoint(state: State, recipe: Recipe, hardware: Hardware, run: Run) -> None:
    content = {"recipe": recipe.essence(), **state.to_save(hardware)}
    checkpoint.save(run.checkpoints, state.step, content, recipe.keep, hardware.world)


def resume(state: State, recipe: Recipe, hardware: Hardware, run: Run) -> bool:
    """From the run's newest checkpoint, if it has one."""
    if (saved := checkpoint.newest(run.checkpoints)) is None:
        return False
    try:
        content = checkpoint.load(saved, state.like, hardware.world)
        if as_of_now(content["recipe"], recipe) != recipe.essence():
            raise ValueError("the recipe was changed")
        state.restore(content, hardware)
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise VitralError(
            f"the checkpoint {saved} does not fit {run.recipe_file}", "put the recipe back, or begin a new run"
        ) from error
    return True


def as_of_now(essence: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """A recipe's essence, saved before some fields were there, with these as they were then: their defaults."""
    values = to_plain(recipe)
    try:
        return from_values({**values, **essence, "data": {**values["data"], **essence["data"]}}).essence()
    except VitralError as error:
        raise ValueError(error.what) from error


def roll_back(state: State, recipe: Recipe, hardware: Hardware, run: Run) -> None:
    """To the last checkpoint, or to the one before if the last did not help; the learning rate is halved for good."""
    rollbacks, best = state.rollbacks + 1, state.best  # the best weights stay, though their epoch may be taken back
    saved = checkpoint.newest(run.checkpoints)
    assert saved is not None
    world = hardware.world
    content = checkpoint.load(saved, state.like, world)
    if content["step"] == state.rolled_to and (older := checkpoint.newest(run.checkpoints, before=saved)):
        content = checkpoint.load(older, state.like, world)
        world.tell(lambda: checkpoint.forget(saved))
    state.restore(content, hardware)
    state.rollbacks, state.rolled_to, state.best = rollbacks, state.step, best
    write_checkpoint(state, recipe, hardware, run)
