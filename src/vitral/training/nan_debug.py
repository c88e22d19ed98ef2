"""When a training diverges: where the first value stands that is not a number, and how large the largest are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from vitral.data.loader import Loader
from vitral.device.hardware import Hardware
from vitral.errors import VitralError, typed
from vitral.recipes.schema import Recipe
from vitral.runs.run import Run
from vitral.training import checkpoint
from vitral.training.state import State

MOST_ROLLBACKS = 5  # each halves the learning rate; what does not go at a 32nd of it has another cause

Draws = tuple[int, Tensor, dict[str, Tensor]]  # a step, and the random generators as they were before it


class Diverged(VitralError):
    """The loss is not a number, or out of all proportion, since `step` (counted from 0)."""

    def __init__(self, what: str, step: int, hint: str = "") -> None:
        super().__init__(what, hint)
        self.step = step


def finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())


class Look:
    """Watches one forward and backward pass, module by module; remembers the first value that is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self.first = ""
        self.largest, self.largest_in = 0.0, ""
        self.names = {module: name for name, module in model.named_modules()}
        self.model = model
        self.handles: list[Any] = []

    def __enter__(self) -> Look:
        for name, parameter in self.model.named_parameters():
            if not finite(parameter):
                self._note(f"{name} (weights)")
            if parameter.requires_grad:
                hook = partial(self._gradient, f"{name} (gradient)")
                self.handles.append(parameter.register_hook(hook))
        for module in self.names:
            self.handles.append(module.register_forward_pre_hook(self._before))
            self.handles.append(module.register_forward_hook(self._after))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _note(self, where: str) -> None:
        self.first = self.first or where

    def _before(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        """What is already bad when it comes in was made by the module around this one, or came with the images."""
        if any(isinstance(value, Tensor) and not finite(value) for value in given):
            name = self.names[module]
            self._note(f"{name.rpartition('.')[0] or 'the model'} (activation)" if name else "the images")

    def _after(self, module: nn.Module, _given: tuple[Any, ...], made: Any) -> None:
        if not isinstance(made, Tensor):
            return
        name = self.names[module] or "the model"
        if not finite(made):
            self._note(f"{name} (activation)")
        elif (size := made.abs().max().item()) > self.largest:
            self.largest, self.largest_in = size, name
        if made.requires_grad:
            made.register_hook(partial(self._gradient, f"{name} (gradient)"))

    def _gradient(self, where: str, gradient: Tensor) -> None:
        if not finite(gradient):
            self._note(where)


def where_it_breaks(model: nn.Module, again: Callable[[], Tensor]) -> tuple[str, Tensor]:
    """What to say after "the loss is not finite", and what `again` gave: it computes the bad step once more."""
    with Look(model) as look:
        result = again()
    model.zero_grad(set_to_none=True)
    if look.first:
        return f"first in {look.first}", result
    return f"the largest value is {look.largest:.1e}, in {look.largest_in}", result


def explain(
    trouble: Diverged,
    state: State,
    loader: Loader,
    before: deque[Draws],
    loss_again: Callable[[Tensor, Tensor], Tensor],
    recipe: Recipe,
    hardware: Hardware,
    run: Run,
) -> Diverged:
    """Compute the bad step once more, with the weights and the draws it had, and name the module it breaks in."""
    what = trouble.what
    for step, draws, random in reversed(before):  # after a rollback a step stands there more than once
        if step != trouble.step:
            continue
        images, labels = next(loader.epoch(state.epoch, start=state.position - (state.step - step)))
        state.draws.set_state(draws)
        hardware.set_random_state(random)
        where, loss = where_it_breaks(state.model, partial(loss_again, images, labels))
        everywhere = hardware.world.gather([where])  # only the process with the bad image may have seen it
        where = next((found for found in everywhere if found.startswith("first")), where)
        if loss.isfinite():
            what = f"the gradient is not finite at step {step + 1}"
            if not where.startswith("first"):
                what = f"the loss is {loss:.1e} at step {step + 1}"
        what += f", {where}"
        break
    saved = checkpoint.newest(run.checkpoints)
    kept = f"the last good state is {saved}" if saved else "nothing was saved before"
    if recipe.on_nan == "rollback":
        return Diverged(what, trouble.step, f"{kept}; 1/{2**MOST_ROLLBACKS} of the learning rate did not help either")
    again = f"vitral train --resume {typed(run)} --on-nan rollback" if saved else "--on-nan rollback"
    return Diverged(f"{what}: the training diverged", trouble.step, f"{kept}; try a lower --optim.lr, or: {again}")
