"""Muon's step on a GPU, all but its products, as functions of many matrices at once.

N matrices of one shape are a stack, N A B with A ≤ B. Tall ones, B×A, lie on their side in it, after the wide ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from vitral.kernels.muon import kernel as kernels
from vitral.kernels.precompile import launcher

TILE = {"ROWS": 32, "COLUMNS": 64, "num_warps": 4}  # whole lines of memory along either axis
T = TypeVar("T")
MANY = 32  # matrices that one launch is told the addresses of


class Piece(NamedTuple):
    """Rows of a parameter that are a map of their own."""

    weight: Tensor
    gradient: Tensor
    average: Tensor
    lr: Tensor

    @property
    def tall(self) -> bool:
        return self.weight.shape[0] > self.weight.shape[1]


def stacked_ahead(pieces: list[Piece], memory: float, number: torch.dtype) -> Tensor:
    """The averages of these pieces, wide ones first, moved on; what lies ahead, each matrix of norm 1: N A B."""
    A, B = sorted(pieces[0].weight.shape)
    stack = pieces[0].weight.new_empty(len(pieces), A, B, dtype=number)
    tiles = tiles_of(A, B)
    squares = stack.new_empty(len(pieces), tiles, dtype=torch.float32)
    for first, some in batches(pieces):
        launcher(kernels.look_ahead, (tiles, len(some)))(
            tuple(piece.gradient for piece in some), tuple(piece.average for piece in some), stack[first:],
            squares[first:], count_wide(some), 1 - memory, memory, A=A, B=B, COUNT=len(some), **TILE,
        )  # fmt: skip
    block = min(4096, triton.next_power_of_2(A * B))
    programs = (triton.cdiv(A * B, block), len(pieces))
    launcher(kernels.normalise, programs)(stack, squares, SIZE=A * B, TILES=tiles, BLOCK=block)
    return stack


def move_along(pieces: list[Piece], directions_NAB: Tensor, decay: float, length: float, halted: Tensor | None) -> None:
    """Each piece's weights, by its own learning rate times `length`."""
    assert directions_NAB.is_contiguous()
    _, A, B = directions_NAB.shape
    for first, some in batches(pieces):
        launcher(kernels.move, (tiles_of(A, B), len(some)))(
            tuple(piece.weight for piece in some), tuple(piece.lr for piece in some), directions_NAB[first:], halted,
            count_wide(some), decay, length, A=A, B=B, COUNT=len(some), **TILE,
        )  # fmt: skip


def tiles_of(A: int, B: int) -> int:
    return triton.cdiv(A, TILE["ROWS"]) * triton.cdiv(B, TILE["COLUMNS"])


def count_wide(pieces: Sequence[Piece]) -> int:
    return sum(not piece.tall for piece in pieces)


def batches(pieces: Sequence[T]) -> Iterator[tuple[int, Sequence[T]]]:
    """As few as may be, and of one length as far as possible: each length is compiled by itself."""
    each = triton.cdiv(len(pieces), triton.cdiv(len(pieces), MANY))
    for first in range(0, len(pieces), each):
        yield first, pieces[first : first + each]
