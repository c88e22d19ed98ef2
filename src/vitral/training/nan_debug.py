"""Find the module in which a diverged training step first produced a non-finite value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from vitral.errors import VitralError


class Diverged(VitralError):
    """The loss or a gradient is not finite, or the loss is far too large, since `step` (counted from 0)."""

    def __init__(self, what: str, step: int, hint: str = "") -> None:
        super().__init__(what, hint)
        self.step = step


class RngSnapshot(NamedTuple):
    """The random generators before a step, so that the step can be computed again."""

    step: int
    augment_rng: Tensor
    device_rng: dict[str, Tensor]


class NonFiniteReport(NamedTuple):
    """Where a forward and backward pass went wrong."""

    nonfinite_in: str | None  # module or parameter of the first non-finite value
    largest: float  # largest finite activation
    largest_in: str

    @property
    def text(self) -> str:
        if self.nonfinite_in is not None:
            return f"first in {self.nonfinite_in}"
        return f"the largest value is {self.largest:.1e}, in {self.largest_in}"


def is_finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())


class NonFiniteFinder:
    """Context that checks every activation and gradient of a forward and backward pass through `model`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.nonfinite_in: str | None = None
        self.largest, self.largest_in = 0.0, ""
        self.handles: list[Any] = []

    def __enter__(self) -> NonFiniteFinder:
        for name, parameter in self.model.named_parameters():
            if not is_finite(parameter):
                self._record(f"{name} (weights)")
            if parameter.requires_grad:
                hook = partial(self._check_gradient, f"{name} (gradient)")
                self.handles.append(parameter.register_hook(hook))
        for module in self.names:
            self.handles.append(module.register_forward_pre_hook(self._check_inputs))
            self.handles.append(module.register_forward_hook(self._check_output))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    @property
    def report(self) -> NonFiniteReport:
        return NonFiniteReport(self.nonfinite_in, self.largest, self.largest_in)

    def _record(self, location: str) -> None:
        self.nonfinite_in = self.nonfinite_in or location

    def _check_inputs(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """A non-finite input was produced by the parent module, or is in the images."""
        if any(isinstance(value, Tensor) and not is_finite(value) for value in inputs):
            name = self.names[module]
            self._record(f"{name.rpartition('.')[0] or 'the model'} (activation)" if name else "the images")

    def _check_output(self, module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        name = self.names[module] or "the model"
        if not is_finite(output):
            self._record(f"{name} (activation)")
        elif (magnitude := output.abs().max().item()) > self.largest:
            self.largest, self.largest_in = magnitude, name
        if output.requires_grad:
            output.register_hook(partial(self._check_gradient, f"{name} (gradient)"))

    def _check_gradient(self, location: str, gradient: Tensor) -> None:
        if not is_finite(gradient):
            self._record(location)


def locate_nonfinite(model: nn.Module, recompute: Callable[[], Tensor]) -> tuple[NonFiniteReport, Tensor]:
    """Call `recompute`, which repeats the bad computation; return where it went wrong and its result."""
    with NonFiniteFinder(model) as finder:
        result = recompute()
    model.zero_grad(set_to_none=True)
    return finder.report, result


def describe_divergence(loss: Tensor, step: int, reports: Iterable[NonFiniteReport]) -> str:
    """One sentence about the repeated step. `reports`: one per rank; only the rank with the bad image may see it."""
    per_rank = list(reports)
    report = next((report for report in per_rank if report.nonfinite_in is not None), per_rank[0])
    if not loss.isfinite():
        what = f"the loss is not finite at step {step + 1}"
    elif report.nonfinite_in is not None:
        what = f"the gradient is not finite at step {step + 1}"
    else:
        what = f"the loss is {loss:.1e} at step {step + 1}"
    return f"{what}, {report.text}"
