"""Muon (Jordan, 2024): momentum whose matrix is replaced by the nearest orthogonal one before each step.

torch.optim.Muon goes matrix by matrix; here all matrices of one shape are orthogonalised together, which is what the
blocks of a ViT offer: a few batched products a step instead of hundreds of small ones. On a GPU, what stands around the
products is three kernels of our own. A matrix of which each process holds some rows is gathered: its singular vectors
cannot be had from rows alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vitral.device.hardware import Moment, asides, bf16_is_faster, runs_triton
from vitral.distributed.dtensor import is_divided, placed, whole

Groups = list[tuple[dict[str, Any], list[Tensor]]]  # each with those of its matrices that have a gradient


class Arrivals:
    """When the last gradient came, of those that it is called for. It knows nothing of them: what a parameter calls is
    not seen by Python's collector, and an optimizer that it led to would stay for ever."""

    last: Moment | None = None

    def __call__(self, parameter: Tensor) -> None:
        self.last = Moment()


class Muon(Optimizer):
    """For matrices alone. Steps are as long as AdamW's (arXiv 2502.16982), so that both share a learning rate.

    A group's `parts` says how many square maps its matrices hold, one above the other: queries, keys and values are
    three. Each is orthogonalised by itself.
    """

    found_inf: Tensor | None = None  # as in torch's fused optimizers: where it is 1, no weight moves
    rehearsed = False

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor,
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "parts": 1})
        self.arrivals = Arrivals()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(f"Muon moves matrices; this parameter has shape {tuple(parameter.shape)}")

    def begin_early(self) -> None:
        """Directions are found from when the gradients are there, beside what the device still has to do before the
        step. For those who change no gradient afterwards, on a GPU."""
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            parameter.register_post_accumulate_grad_hook(self.arrivals)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        if suit_kernels(groups, self.found_inf) and self.kernels_agree(groups):
            self.step_with_kernels(groups)
        else:
            self.step_plainly(groups)
        self.arrivals.last = None

    def kernels_agree(self, groups: Groups) -> bool:
        """With the plain way, here. Those of the trial and of this step are compiled at once before."""
        from vitral.kernels.precompile import compile_ahead

        device = self.param_groups[0]["params"][0].device

        def rehearsal() -> None:
            tried(Muon.step_with_kernels, device)
            self.step_with_kernels(groups)

        if not self.rehearsed:
            compile_ahead(rehearsal)
            self.rehearsed = True
        return kernels_agree(device)

    def step_plainly(self, groups: Groups) -> None:
        ahead = [
            whole(matrix) for group, matrices in groups for matrix in self.move_averages(matrices, group["momentum"])
        ]
        counts = [group["parts"] for group, matrices in groups for _ in matrices]
        pieces = [piece for matrix, count in zip(ahead, counts, strict=True) for piece in matrix.chunk(count)]
        directions = iter(turned(pieces, self.found_inf))
        moving = 1 if self.found_inf is None else 1 - self.found_inf
        for group, matrices in groups:
            parts = [(matrix, [next(directions) for _ in range(group["parts"])]) for matrix in matrices]
            if not parts:
                continue
            torch._foreach_mul_(matrices, 1 - group["lr"] * moving * group["weight_decay"])
            if any(is_divided(matrix) for matrix in matrices):
                places, moves = matrices, [placed(torch.cat(own), matrix) for matrix, own in parts]
            else:
                places = [place for matrix, own in parts for place in matrix.chunk(len(own))]
                moves = [move for _, own in parts for move in own]
            torch._foreach_mul_(moves, group["lr"] * moving)
            torch._foreach_sub_(places, moves)

    def step_with_kernels(self, groups: Groups) -> None:
        """The same on a GPU, each matrix read and written where it lies."""
        from vitral.kernels.muon import op as kernels

        matrices = [matrix for _, some in groups for matrix in some]
        as_they_are = all("momentum" in self.state[m] and m.grad.is_contiguous() for m in matrices)  # type: ignore[union-attr]
        ready = self.arrivals.last if as_they_are else None
        alike: dict[tuple[int, int, float, float], list[kernels.Piece]] = defaultdict(list)
        for group, some in groups:
            for piece in self.pieces(group, some):
                shorter, longer = sorted(piece.weight.shape)
                alike[shorter, longer, group["momentum"], float(group["weight_decay"])].append(piece)

        def turn(shorter: int, longer: int, memory: float, decay: float) -> Callable[[], None]:
            pieces = sorted(alike[shorter, longer, memory, decay], key=lambda piece: piece.tall)
            ahead = kernels.stacked_ahead(pieces, memory, number(pieces[0].weight.device, shorter))
            return partial(kernels.move_along, pieces, newton_schulz(ahead), decay, length(longer), self.found_inf)

        beside = asides(matrices[0].device, len(alike))  # a product of small matrices leaves most cores idle
        moves = [aside.begin(partial(turn, *shape), ready) for aside, shape in zip(beside, alike, strict=True)]
        for aside, move in zip(beside, moves, strict=True):
            aside.begin(move)
        for aside in beside:
            aside.wait()
        torch.autograd.graph.increment_version(matrices)

    def pieces(self, group: dict[str, Any], matrices: list[Tensor]) -> Iterator[Any]:
        """Each of a group's maps, with all that moves it."""
        from vitral.kernels.muon.op import Piece

        lr = group["lr"]
        for matrix, average in zip(matrices, self.averages(matrices), strict=True):
            assert matrix.grad is not None
            assert average.is_contiguous()
            if not isinstance(lr, Tensor):
                lr = torch.full((), lr, device=matrix.device)
            parts = (tensor.chunk(group["parts"]) for tensor in (matrix, matrix.grad.contiguous(), average))
            for weight, gradient, moving in zip(*parts, strict=True):
                yield Piece(weight, gradient, moving, lr)

    def averages(self, matrices: list[Tensor]) -> list[Tensor]:
        for matrix in matrices:
            if "momentum" not in self.state[matrix]:
                self.state[matrix]["momentum"] = torch.zeros_like(matrix)
        return [self.state[matrix]["momentum"] for matrix in matrices]

    def move_averages(self, matrices: list[Tensor], memory: float) -> list[Tensor]:
        """Each gradient's average moved on; and a look ahead along it (Nesterov)."""
        if not matrices:
            return []
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        averages = self.averages(matrices)
        torch._foreach_lerp_(averages, gradients, 1 - memory)
        return list(torch._foreach_lerp(gradients, averages, memory))


def suit_kernels(groups: Groups, halted: Tensor | None) -> bool:
    """Whether all lies whole on one GPU, in fp32 and row by row."""
    matrices = [matrix for _, matrices in groups for matrix in matrices]
    if not matrices or not runs_triton(device := matrices[0].device):
        return False
    beside = [halted, *(group["lr"] for group, _ in groups), *(matrix.grad for matrix in matrices)]
    tensors = matrices + [given for given in beside if isinstance(given, Tensor)]
    if any(is_divided(x) or x.device != device or x.dtype != torch.float32 for x in tensors):
        return False
    return all(matrix.is_contiguous() for matrix in matrices)


@cache
def kernels_agree(device: torch.device) -> bool:
    """Tried once: a machine may lack what Triton compiles with, and not every GPU was at hand."""
    from vitral.kernels.self_check import largest, reason_against

    def difference() -> float:
        return largest([tried(Muon.step_with_kernels, device)], [tried(Muon.step_plainly, device)])

    return not reason_against(difference, 0.1)


def tried(step: Callable[[Muon, Groups], None], device: torch.device) -> Tensor:
    """How far a step moves the numbers of a few small matrices."""
    start = [torch.arange(float(a * b), device=device).cos().view(a, b) for a, b in ((16, 80), (80, 8))]
    matrices = [matrix.clone() for matrix in start]
    for matrix in matrices:
        matrix.grad = torch.arange(float(matrix.numel()), device=device).square().cos().view_as(matrix)
    groups: list[dict[str, Any]] = [{"params": matrices[:1], "parts": 2}, {"params": matrices[1:]}]
    muon = Muon(groups, lr=0.1, weight_decay=0.1)
    step(muon, [(group, group["params"]) for group in muon.param_groups])
    return torch.cat([(matrix - before).flatten() for matrix, before in zip(matrices, start, strict=True)])


def turned(matrices: list[Tensor], halted: Tensor | None = None) -> list[Tensor]:
    """For each matrix the orthogonal one beside it, of the length of AdamW's step; zeros where training has `halted`.

    All of one shape go through together, tall ones turned on their side, and come out as tensors that lie side by
    side: a step has tens of kernels, not hundreds.
    """
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        alike[tuple(sorted(matrix.shape))].append(index)
    found: dict[int, Tensor] = {}
    for (_, longer), members in alike.items():
        tall = [index for index in members if matrices[index].shape[0] > matrices[index].shape[1]]
        wide = [index for index in members if index not in tall]
        stack = torch.stack([matrices[index] for index in wide] + [matrices[index].mT for index in tall])
        moves = orthogonalise(stack) * length(longer)
        if halted is not None:  # 0 times what is not finite is not 0
            moves = torch.where(halted > 0, 0.0, moves)
        found |= zip(wide, moves[: len(wide)].to(stack.dtype).unbind(), strict=True)
        found |= zip(tall, moves[len(wide) :].mT.contiguous().to(stack.dtype).unbind(), strict=True)
    return [found[index] for index in range(len(matrices))]


def length(longer: int) -> float:
    """What makes the mean square of a step that of AdamW's, by a matrix's longer side."""
    return 0.2 * longer**0.5


def number(device: torch.device, shorter: int) -> torch.dtype:
    return torch.bfloat16 if bf16_is_faster(device, shorter) else torch.float32


def orthogonalise(matrices_NAB: Tensor) -> Tensor:
    """Towards U·Vᵀ of each matrix's singular value decomposition U·S·Vᵀ."""
    tall = matrices_NAB.shape[-2] > matrices_NAB.shape[-1]
    x = matrices_NAB.mT if tall else matrices_NAB
    x = x.to(number(x.device, x.shape[-2]))
    x = newton_schulz(x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7))
    return x.mT if tall else x


def newton_schulz(x_NAB: Tensor, steps: int = 5) -> Tensor:
    """Five steps from matrices of norm 1, none of them tall.

    The quintic's coefficients (Jordan, 2024) trade exactness for speed: singular values end between about 0.7 and
    1.2, which serves as well as 1. So bf16 is exact enough, where it is faster.
    """
    x = x_NAB
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x
