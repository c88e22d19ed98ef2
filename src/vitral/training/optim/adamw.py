"""AdamW whose small tensors move in few launches on a GPU.

PyTorch's fused step gives 65,536 numbers to a program: where Muon has the large matrices, most of a GPU waits for the
few programs that are left. State and checkpoints are PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitral.device.hardware import runs_triton
from vitral.distributed.dtensor import is_divided

MOST = 2**22  # numbers in all that our kernel moves: with more, PyTorch's keeps a GPU busy


class Moving(NamedTuple):
    """A tensor and all that moves it."""

    weight: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor
    lr: Tensor
    decay: float


class AdamW(torch.optim.AdamW):
    found_inf: Tensor | None = None  # as for PyTorch's: where it is 1, no weight moves

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """The first one is PyTorch's, which makes the state."""
        device = self.param_groups[0]["params"][0].device
        moving = self.moving() if runs_triton(device) else []
        if not (suit_kernel(moving) and kernel_agrees(device)):
            return super().step(closure)
        return self.step_with_kernel(moving)

    def step_with_kernel(self, moving: list[Moving]) -> None:
        from vitral.kernels.adamw.op import move

        steps = [one.step for one in moving]
        torch._foreach_add_(steps, 1)
        if self.found_inf is not None:
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))
        move(moving, self.defaults["betas"], self.defaults["eps"], self.found_inf)
        torch.autograd.graph.increment_version([one.weight for one in moving])

    def moving(self) -> list[Moving]:
        """The largest first; none where one has no state yet."""
        found = []
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                if not (state := self.state[weight]):
                    return []
                kept = state["exp_avg"], state["exp_avg_sq"], state["step"]
                found.append(Moving(weight, weight.grad, *kept, group["lr"], float(group["weight_decay"])))
        return sorted(found, key=lambda one: -one.weight.numel())


def suit_kernel(moving: list[Moving]) -> bool:
    """Whether all lies whole on one GPU, in fp32 and number by number, and there is not too much of it."""
    tensors: list[Any] = [tensor for one in moving for tensor in one[:-1]]
    if any(not isinstance(x, Tensor) or is_divided(x) or x.device != tensors[0].device for x in tensors):
        return False
    if any(x.dtype != torch.float32 or not x.is_contiguous() for x in tensors):
        return False
    return 0 < sum(one.weight.numel() for one in moving) <= MOST


@cache
def kernel_agrees(device: torch.device) -> bool:
    """With PyTorch's, tried once: a machine may lack what Triton compiles with, and not every GPU was at hand."""
    from vitral.kernels.self_check import largest, reason_against

    def difference() -> float:
        plain = tried(lambda adamw, _: torch.optim.AdamW.step(adamw), device)
        return largest([tried(AdamW.step_with_kernel, device)], [plain])

    return not reason_against(difference, 1e-4)


@torch.no_grad()
def tried(step: Callable[[AdamW, list[Moving]], object], device: torch.device) -> Tensor:
    """How far two steps, the second one as `step` takes it, move the numbers of two small tensors."""
    start = [torch.arange(float(n), device=device).cos() for n in (2000, 7)]
    weights = [weight.clone() for weight in start]
    lr = torch.full((), 0.1, device=device)
    groups: list[dict[str, Any]] = [{"params": weights[:1], "weight_decay": 0.5}, {"params": weights[1:]}]
    adamw = AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True, capturable=True)
    for power in (2, 3):
        for weight in weights:
            weight.grad = torch.arange(float(weight.numel()), device=device).pow(power).cos()
        step(adamw, adamw.moving()) if power == 3 else torch.optim.AdamW.step(adamw)
    return torch.cat([weight - before for weight, before in zip(weights, start, strict=True)])
