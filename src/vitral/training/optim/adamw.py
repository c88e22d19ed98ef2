"""AdamW that can update many small tensors in few launches.

PyTorch's fused step assigns 65,536 elements to each program. When Muon updates the large matrices, the remaining
tensors are too small to occupy a GPU that way. State and checkpoints are those of torch.optim.AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from vitral.distributed.dtensor import is_sharded
from vitral.utils.eager_optimizer import EagerOptimizer, eager_step

MAX_KERNEL_ELEMENTS = 2**22  # with more, PyTorch's step occupies the GPU


class AdamWUpdate(NamedTuple):
    """A tensor with its gradient, state and hyperparameters."""

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    lr: Tensor
    weight_decay: float


class AdamWKernels(Protocol):
    """The fused update; see vitral.kernels.adamw.op."""

    def adamw_update(
        self, tensors: Sequence[AdamWUpdate], betas: tuple[float, float], eps: float, found_inf: Tensor | None
    ) -> None: ...


class AdamW(EagerOptimizer, torch.optim.AdamW):
    kernel_name: ClassVar[str] = "adamw"
    kernels: AdamWKernels | None = None  # set by the training backend after its self-check
    found_inf: Tensor | None = None  # as in PyTorch's fused step: weights stay unchanged where it is 1
    torch_step = eager_step(torch.optim.AdamW)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """The first step is always PyTorch's, which creates the state."""
        if self.kernels is not None and fits_kernels(updates := self.updates()):
            return self.fused_step(updates, self.kernels)
        return self.torch_step(closure)

    def fused_step(self, updates: list[AdamWUpdate], kernels: AdamWKernels) -> None:
        steps = [update.step for update in updates]
        torch._foreach_add_(steps, 1)
        if self.found_inf is not None:
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))
        kernels.adamw_update(updates, self.defaults["betas"], self.defaults["eps"], self.found_inf)
        torch.autograd.graph.increment_version([update.weight for update in updates])

    @torch.no_grad()
    def launch_kernels(self, kernels: AdamWKernels) -> None:
        """Launch what the next step would launch, to compile it in a dry run."""
        if fits_kernels(updates := self.updates()):
            kernels.adamw_update(updates, self.defaults["betas"], self.defaults["eps"], self.found_inf)

    @classmethod
    def kernel_check(cls, kernels: AdamWKernels, device: torch.device) -> tuple[Tensor, Tensor]:
        """The weight changes of two steps on small tensors, the second with the kernel and with PyTorch's step."""
        return (
            _weight_changes(lambda adamw: adamw.fused_step(adamw.updates(), kernels), device),
            _weight_changes(torch.optim.AdamW.step, device),
        )

    def updates(self) -> list[AdamWUpdate]:
        """All tensors with a gradient, the largest first; none if one has no state yet."""
        updates = []
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                if not (state := self.state[weight]):
                    return []
                moments = state["exp_avg"], state["exp_avg_sq"], state["step"]
                updates.append(AdamWUpdate(weight, weight.grad, *moments, group["lr"], float(group["weight_decay"])))
        return sorted(updates, key=lambda update: -update.weight.numel())


def fits_kernels(updates: list[AdamWUpdate]) -> bool:
    """Whether all tensors are unsharded, contiguous fp32 tensors on one device, and few enough."""
    tensors: list[Any] = [tensor for update in updates for tensor in update[:-1]]
    if any(not isinstance(x, Tensor) or is_sharded(x) or x.device != tensors[0].device for x in tensors):
        return False
    if any(x.dtype != torch.float32 or not x.is_contiguous() for x in tensors):
        return False
    return 0 < sum(update.weight.numel() for update in updates) <= MAX_KERNEL_ELEMENTS


@torch.no_grad()
def _weight_changes(second_step: Callable[[AdamW], object], device: torch.device) -> Tensor:
    initial = [torch.arange(float(n), device=device).cos() for n in (2000, 7)]
    weights = [weight.clone() for weight in initial]
    lr = torch.full((), 0.1, device=device)
    groups: list[dict[str, Any]] = [{"params": weights[:1], "weight_decay": 0.5}, {"params": weights[1:]}]
    adamw = AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True, capturable=True)
    for step, power in enumerate((2, 3)):
        for weight in weights:
            weight.grad = torch.arange(float(weight.numel()), device=device).pow(power).cos()
        torch.optim.AdamW.step(adamw) if step == 0 else second_step(adamw)
    return torch.cat([weight - before for weight, before in zip(weights, initial, strict=True)])
