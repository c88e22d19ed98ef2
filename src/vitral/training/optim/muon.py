"""Muon (Jordan, 2024): momentum, replaced by the nearest orthogonal matrix before each update.

torch.optim.Muon processes one matrix at a time. Here all matrices of the same size are orthogonalised together, which
suits the blocks of a ViT: a few batched GEMMs per step instead of hundreds of small ones. Sharded matrices are
gathered first, because singular vectors depend on all rows.

Shapes: N matrices of size A x B with A ≤ B; taller ones are transposed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from vitral.device.select import bf16_is_faster
from vitral.device.streams import CudaEvent, side_streams
from vitral.distributed.dtensor import full_tensor, is_sharded, shard_like
from vitral.utils.eager_optimizer import EagerOptimizer

ActiveGroups = list[tuple[dict[str, Any], list[Tensor]]]  # parameter groups with their matrices that have a gradient


class MuonKernels(Protocol):
    """Fused kernels for everything but the GEMMs; see vitral.kernels.muon.op."""

    def momentum_stack(
        self, grads: Sequence[Tensor], momentum_buffers: Sequence[Tensor], momentum: float, dtype: torch.dtype
    ) -> Tensor: ...

    def apply_updates(
        self,
        weights: Sequence[Tensor],
        lrs: Sequence[Tensor],
        updates_NAB: Tensor,
        weight_decay: float,
        update_scale: float,
        found_inf: Tensor | None,
    ) -> None: ...


class MatrixSlice(NamedTuple):
    """Rows of a parameter that are orthogonalised as one matrix: a whole parameter, or q, k or v of a fused qkv."""

    weight: Tensor
    grad: Tensor
    momentum_buffer: Tensor
    lr: Tensor

    @property
    def is_tall(self) -> bool:
        return self.weight.shape[0] > self.weight.shape[1]


class GradientReadyHook:
    """Records a CUDA event whenever a gradient is accumulated; `last_event` is the latest.

    A separate object, because Python's garbage collector does not see the hooks of a parameter: a hook that referred to
    the optimizer would keep it alive forever.
    """

    last_event: CudaEvent | None = None

    def __call__(self, parameter: Tensor) -> None:
        self.last_event = CudaEvent()


class Muon(EagerOptimizer):
    """For matrices only. Updates have the RMS of AdamW's (arXiv 2502.16982), so both can share a learning rate.

    `num_matrices` of a group is the number of matrices stacked in each of its parameters: 3 for a fused qkv. Each is
    orthogonalised separately.
    """

    kernel_name: ClassVar[str] = "muon"
    kernels: MuonKernels | None = None  # set by the training backend after its self-check
    found_inf: Tensor | None = None  # as in PyTorch's fused optimizers: weights stay unchanged where it is 1

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor,
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "num_matrices": 1})
        self.gradient_ready = GradientReadyHook()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"Muon needs 2-D parameters, got shape {tuple(parameter.shape)}")

    def overlap_with_backward(self) -> None:
        """Start orthogonalising as soon as the gradients are complete, while the GPU finishes the backward pass.

        Only valid if gradients are not modified (clipped, accumulated) after they were computed.
        """
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = self.active_groups()
        if self.kernels is not None and fits_kernels(groups, self.found_inf):
            self.fused_step(groups, self.kernels)
        else:
            self.reference_step(groups)
        self.gradient_ready.last_event = None

    @torch.no_grad()
    def launch_kernels(self, kernels: MuonKernels) -> None:
        """Launch what the next step would launch, to compile it in a dry run."""
        if fits_kernels(groups := self.active_groups(), self.found_inf):
            self.fused_step(groups, kernels)

    @classmethod
    def kernel_check(cls, kernels: MuonKernels, device: torch.device) -> tuple[Tensor, Tensor]:
        """The weight changes of one step on small matrices, with the kernels and without them."""
        return (
            _weight_changes(lambda muon, groups: muon.fused_step(groups, kernels), device),
            _weight_changes(lambda muon, groups: muon.reference_step(groups), device),
        )

    def active_groups(self) -> ActiveGroups:
        return [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]

    def reference_step(self, groups: ActiveGroups) -> None:
        momenta = [
            full_tensor(matrix)
            for group, matrices in groups
            for matrix in self.nesterov_momentum(matrices, group["momentum"])
        ]
        counts = [group["num_matrices"] for group, matrices in groups for _ in matrices]
        slices = [chunk for matrix, count in zip(momenta, counts, strict=True) for chunk in matrix.chunk(count)]
        updates = iter(orthogonal_updates(slices, self.found_inf))
        is_finite = 1 if self.found_inf is None else 1 - self.found_inf
        for group, matrices in groups:
            matrix_updates = [(matrix, [next(updates) for _ in range(group["num_matrices"])]) for matrix in matrices]
            if not matrix_updates:
                continue
            torch._foreach_mul_(matrices, 1 - group["lr"] * is_finite * group["weight_decay"])
            if any(is_sharded(matrix) for matrix in matrices):
                targets, deltas = matrices, [shard_like(torch.cat(parts), matrix) for matrix, parts in matrix_updates]
            else:
                targets = [chunk for matrix, parts in matrix_updates for chunk in matrix.chunk(len(parts))]
                deltas = [update for _, parts in matrix_updates for update in parts]
            torch._foreach_mul_(deltas, group["lr"] * is_finite)
            torch._foreach_sub_(targets, deltas)

    def fused_step(self, groups: ActiveGroups, kernels: MuonKernels) -> None:
        """The same update with fused kernels. Matrices of different sizes run on different CUDA streams."""
        matrices = [matrix for _, group_matrices in groups for matrix in group_matrices]
        # Without a momentum buffer or a contiguous gradient, tensors are created first, after the gradients.
        is_prepared = all("momentum" in self.state[m] and m.grad.is_contiguous() for m in matrices)  # type: ignore[union-attr]
        gradients_ready = self.gradient_ready.last_event if is_prepared else None
        by_size: dict[tuple[int, int, float, float], list[MatrixSlice]] = defaultdict(list)
        for group, group_matrices in groups:
            for matrix_slice in self.matrix_slices(group, group_matrices):
                short_side, long_side = sorted(matrix_slice.weight.shape)
                by_size[short_side, long_side, group["momentum"], float(group["weight_decay"])].append(matrix_slice)

        def orthogonalise_momentum(
            short_side: int, long_side: int, momentum: float, weight_decay: float
        ) -> Callable[[], None]:
            slices = sorted(
                by_size[short_side, long_side, momentum, weight_decay], key=lambda matrix_slice: matrix_slice.is_tall
            )
            weights, grads, momentum_buffers, lrs = zip(*slices, strict=True)
            dtype = orthogonalise_dtype(weights[0].device, short_side)
            updates = newton_schulz(kernels.momentum_stack(grads, momentum_buffers, momentum, dtype))
            return partial(
                kernels.apply_updates, weights, lrs, updates, weight_decay, update_scale(long_side), self.found_inf
            )

        streams = side_streams(matrices[0].device, len(by_size))  # GEMMs of small matrices leave most SMs idle
        apply_fns = [
            stream.run(partial(orthogonalise_momentum, *size), gradients_ready)
            for stream, size in zip(streams, by_size, strict=True)
        ]
        for stream, apply_fn in zip(streams, apply_fns, strict=True):
            stream.run(apply_fn)
        for stream in streams:
            stream.wait()
        torch.autograd.graph.increment_version(matrices)

    def matrix_slices(self, group: dict[str, Any], matrices: list[Tensor]) -> Iterator[MatrixSlice]:
        lr = group["lr"]
        for matrix, momentum_buffer in zip(matrices, self.momentum_buffers(matrices), strict=True):
            assert matrix.grad is not None
            assert momentum_buffer.is_contiguous()
            if not isinstance(lr, Tensor):
                lr = torch.full((), lr, device=matrix.device)
            tensors = (matrix, matrix.grad.contiguous(), momentum_buffer)
            for weight, grad, buffer in zip(*(t.chunk(group["num_matrices"]) for t in tensors), strict=True):
                yield MatrixSlice(weight, grad, buffer, lr)

    def momentum_buffers(self, matrices: list[Tensor]) -> list[Tensor]:
        for matrix in matrices:
            if "momentum" not in self.state[matrix]:
                self.state[matrix]["momentum"] = torch.zeros_like(matrix)
        return [self.state[matrix]["momentum"] for matrix in matrices]

    def nesterov_momentum(self, matrices: list[Tensor], momentum: float) -> list[Tensor]:
        """Update the momentum buffers; return the Nesterov look-ahead of each matrix."""
        if not matrices:
            return []
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        buffers = self.momentum_buffers(matrices)
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        return list(torch._foreach_lerp(gradients, buffers, momentum))


def fits_kernels(groups: ActiveGroups, found_inf: Tensor | None) -> bool:
    """Whether all tensors are unsharded, contiguous fp32 tensors on one device."""
    matrices = [matrix for _, group_matrices in groups for matrix in group_matrices]
    if not matrices:
        return False
    others = [found_inf, *(group["lr"] for group, _ in groups), *(matrix.grad for matrix in matrices)]
    tensors = matrices + [value for value in others if isinstance(value, Tensor)]
    if any(is_sharded(x) or x.device != matrices[0].device or x.dtype != torch.float32 for x in tensors):
        return False
    return all(matrix.is_contiguous() for matrix in matrices)


def _weight_changes(step: Callable[[Muon, ActiveGroups], None], device: torch.device) -> Tensor:
    initial = [torch.arange(float(a * b), device=device).cos().view(a, b) for a, b in ((16, 80), (80, 8))]
    matrices = [matrix.clone() for matrix in initial]
    for matrix in matrices:
        matrix.grad = torch.arange(float(matrix.numel()), device=device).square().cos().view_as(matrix)
    groups: list[dict[str, Any]] = [{"params": matrices[:1], "num_matrices": 2}, {"params": matrices[1:]}]
    muon = Muon(groups, lr=0.1, weight_decay=0.1)
    with torch.no_grad():
        step(muon, muon.active_groups())
    return torch.cat([(matrix - before).flatten() for matrix, before in zip(matrices, initial, strict=True)])


def orthogonal_updates(matrices: list[Tensor], found_inf: Tensor | None = None) -> list[Tensor]:
    """The nearest orthogonal matrix of each matrix, scaled to the RMS of AdamW's update; 0 where `found_inf` > 0.

    Matrices of the same size are processed as one stack, tall ones transposed, which takes tens of kernel launches
    instead of hundreds.
    """
    by_size: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_size[tuple(sorted(matrix.shape))].append(index)
    updates: dict[int, Tensor] = {}
    for (_, long_side), indices in by_size.items():
        tall = [index for index in indices if matrices[index].shape[0] > matrices[index].shape[1]]
        wide = [index for index in indices if index not in tall]
        stack = torch.stack([matrices[index] for index in wide] + [matrices[index].mT for index in tall])
        stack_updates = orthogonalise(stack) * update_scale(long_side)
        if found_inf is not None:  # 0 times a non-finite value is not 0
            stack_updates = torch.where(found_inf > 0, 0.0, stack_updates)
        updates |= zip(wide, stack_updates[: len(wide)].to(stack.dtype).unbind(), strict=True)
        updates |= zip(tall, stack_updates[len(wide) :].mT.contiguous().to(stack.dtype).unbind(), strict=True)
    return [updates[index] for index in range(len(matrices))]


def update_scale(long_side: int) -> float:
    """Factor that gives an orthogonal matrix with this longer side the RMS of an AdamW update, about 0.2."""
    return 0.2 * long_side**0.5


def orthogonalise_dtype(device: torch.device, short_side: int) -> torch.dtype:
    return torch.bfloat16 if bf16_is_faster(device, short_side) else torch.float32


def orthogonalise(matrices_NAB: Tensor) -> Tensor:
    """Approximately U·Vᵀ of each matrix's singular value decomposition U·S·Vᵀ."""
    is_tall = matrices_NAB.shape[-2] > matrices_NAB.shape[-1]
    x = matrices_NAB.mT if is_tall else matrices_NAB
    x = x.to(orthogonalise_dtype(x.device, x.shape[-2]))
    x = newton_schulz(x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7))
    return x.mT if is_tall else x


def newton_schulz(x_NAB: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration on wide or square matrices with Frobenius norm 1.

    The coefficients of the quintic (Jordan, 2024) favour speed over accuracy: singular values end between about 0.7
    and 1.2, which trains as well as 1. For the same reason bf16 is accurate enough where it is faster.
    """
    x = x_NAB
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x
