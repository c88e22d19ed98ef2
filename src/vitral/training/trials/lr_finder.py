"""Learning-rate finder: train with an exponentially increasing learning rate (arXiv 1506.01186)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

from vitral.device.select import Hardware
from vitral.errors import VitralError
from vitral.training.setup import TrainingSetup
from vitral.training.trials.trainer import endless_batches, trial_trainer

STEPS = 120
FIRST_LR, LAST_LR = 1e-6, 1.0
SMOOTHING = 0.9  # decay per step of the averaged loss
DIVERGED = 4.0  # stop when the averaged loss is this many times the best one


@dataclass(frozen=True, kw_only=True)
class LRSweep:
    """Learning rates (values of `optim.lr`) and the averaged loss after a step with each."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    diverged: bool  # the sweep ended before the last learning rate

    @property
    def steepest(self) -> float:
        """The learning rate at which the loss falls fastest per factor of the learning rate."""
        lowest = min(range(len(self.losses)), key=lambda index: self.losses[index])
        window = range(1, max(lowest, 2))
        slopes = {i: self.losses[i + 1] - self.losses[i - 1] for i in window if i + 1 < len(self.losses)}
        return self.rates[min(slopes, key=lambda index: slopes[index])] if slopes else self.rates[lowest]

    @property
    def tenth_of_lowest(self) -> float:
        """A tenth of the learning rate with the lowest loss, just before training diverges."""
        lowest = min(range(len(self.losses)), key=lambda index: self.losses[index])
        return self.rates[lowest] / 10

    @property
    def suggestion(self) -> float:
        """The steepest point, rounded to one digit, but at most a tenth of the learning rate with the lowest loss."""
        return float(f"{min(self.steepest, self.tenth_of_lowest):.0e}")


def sweep_lr(setup: TrainingSetup, hardware: Hardware) -> LRSweep:
    """Sweep the learning rate from FIRST_LR to LAST_LR on a model that is then discarded."""
    trainer = trial_trainer(setup, hardware, head_init=setup.recipe.head_init)
    state = trainer.state
    rates: list[float] = []
    losses: list[float] = []
    average, best = 0.0, math.inf
    for index, (images, labels) in enumerate(islice(endless_batches(trainer), STEPS)):
        lr = FIRST_LR * (LAST_LR / FIRST_LR) ** (index / (STEPS - 1))
        state.epoch_sums.zero_()
        trainer.step_runner.run(images, labels, lr=lr * setup.recipe.lr_scale)
        state.step += 1
        loss = (state.epoch_sums[0] / state.epoch_sums[2]).item()
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smoothed = average / (1 - SMOOTHING ** (index + 1))
        if not math.isfinite(smoothed) or state.found_nonfinite.item() or smoothed > DIVERGED * best:
            break
        rates.append(lr)
        losses.append(smoothed)
        best = min(best, smoothed)
    if len(rates) < 3:
        raise VitralError(
            f"the loss is not finite from a learning rate of {FIRST_LR:g} on", "Check the data and the initial weights"
        )
    return LRSweep(rates=tuple(rates), losses=tuple(losses), diverged=len(rates) < STEPS)
