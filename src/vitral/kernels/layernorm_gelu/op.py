"""Residual + LayerNorm and bias + GELU as functions of tensors, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn

from vitral.kernels.dropout.op import NO_DROPOUT, Dropout
from vitral.kernels.fp8.op import Fp8Tensor, GemmBound, empty_fp8, pointers
from vitral.kernels.layernorm_gelu import kernel as kernels
from vitral.kernels.precompile import launch
from vitral.kernels.reduce.op import ColumnSums, num_partial_sums
from vitral.models.vit import QuickGELU, SwiGLU

ACTIVATION_NAMES: dict[type[nn.Module], str] = {QuickGELU: "quick_gelu", SwiGLU: "swiglu"}


class LayerNormParams(NamedTuple):
    weight: Tensor
    bias: Tensor
    eps: float


class AddNormOutput(NamedTuple):
    """The residual sum (M, D) and its LayerNorm."""

    sum: Tensor
    stats: Tensor  # (2, M) fp32: mean and rstd
    normed: Tensor | None
    normed_fp8: Fp8Tensor | None = None


class AddNormGrads(NamedTuple):
    x: Tensor  # (M, D)
    branch: Tensor  # (M, D)
    branch_fp8: Fp8Tensor | None
    params: Tensor  # (3, D) fp32: gradients of the norm's weight, its bias and the branch bias
    normed: Tensor | None  # the saved or recomputed output of the norm


def activation_name(mlp: Any) -> str:
    """The activation of an MLP as ViTConfig names it."""
    activation = mlp.activation
    if isinstance(activation, nn.GELU):
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    return ACTIVATION_NAMES[type(activation)]


def row_blocks(num_cols: int) -> dict[str, int]:
    """Launch parameters for blocks of whole rows. One warp, where it can hold a row, needs no synchronisation."""
    block_cols = triton.next_power_of_2(num_cols)
    block_rows, num_warps = max(1, 1024 // block_cols), max(1, block_cols // 1024)
    return {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "num_warps": num_warps}


def tile_blocks(num_cols: int, block_cols: int, block_rows: int) -> tuple[dict[str, int], int]:
    """Launch parameters for tiles of wide rows, and the number of tiles per row."""
    block_cols = min(block_cols, triton.next_power_of_2(num_cols))
    return {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "num_warps": 4}, triton.cdiv(num_cols, block_cols)


def tokens_per_image(num_rows: int, branch_scale: Tensor | None) -> int:
    return 1 if branch_scale is None else num_rows // branch_scale.numel()


def add_layernorm(
    x: Tensor, branch: Tensor | None, branch_bias: Tensor | None, branch_scale: Tensor | None, norm: LayerNormParams,
    fp8: bool, store_normed: bool = True, in_place: bool = False, dropout: Dropout = NO_DROPOUT,
) -> AddNormOutput:  # fmt: skip
    """x + branch_scale·dropout(branch + branch_bias) and its LayerNorm, in bf16 (`store_normed`), in FP8, or both.

    x, branch: (M, D). branch_scale: one factor per image (stochastic depth). `in_place` writes the sum over x.
    """
    M, D = x.shape
    out = x if branch is None or in_place else torch.empty_like(x)
    normed = torch.empty_like(x) if store_normed else None
    stats, normed_fp8 = x.new_empty(2, M, dtype=torch.float32), empty_fp8(x) if fp8 else None
    blocks = row_blocks(D)
    launch(kernels.add_layernorm_kernel, (triton.cdiv(M, blocks["BLOCK_ROWS"]),))(
        x, branch, branch_bias, branch_scale, norm.weight, norm.bias, out, normed, stats, *pointers(normed_fp8),
        *dropout, M, tokens_per_image(M, branch_scale), norm.eps,
        NUM_COLS=D, ADD=branch is not None, DROP_PATH=branch_scale is not None, DROPOUT=dropout.seed is not None,
        STORE_NORMED=store_normed, FP8=fp8, **blocks,
    )  # fmt: skip
    return AddNormOutput(out, stats, normed, normed_fp8)


def add_layernorm_backward(
    saved: AddNormOutput, grad_normed: Tensor, grad_residual: Tensor | None, branch_scale: Tensor | None,
    norm: LayerNormParams, sums: ColumnSums, fp8: bool = False, recompute: bool = True, dropout: Dropout = NO_DROPOUT,
) -> AddNormGrads:  # fmt: skip
    """Gradients from that of the norm's output and that of the residual stream after the sum, all (M, D).

    With `recompute`, the norm's output is computed again unless it was saved.
    """
    M, D = saved.sum.shape
    grad_x = torch.empty_like(saved.sum)
    grad_branch = grad_x if branch_scale is None is dropout.seed else torch.empty_like(saved.sum)
    recompute = recompute and saved.normed is None
    normed = torch.empty_like(saved.sum) if recompute else saved.normed
    branch_fp8 = empty_fp8(saved.sum) if fp8 else None
    blocks = row_blocks(D)
    num_programs = num_partial_sums(M, blocks["BLOCK_ROWS"])
    partial_sums = saved.sum.new_empty(num_programs, 3, D, dtype=torch.float32)
    launch(kernels.add_layernorm_backward_kernel, (num_programs,))(
        saved.sum, saved.stats, grad_normed, grad_residual, branch_scale, norm.weight, norm.bias, grad_x, grad_branch,
        normed, *pointers(branch_fp8), partial_sums, *dropout, M, tokens_per_image(M, branch_scale),
        NUM_COLS=D, ADD_RESIDUAL=grad_residual is not None, DROP_PATH=branch_scale is not None,
        DROPOUT=dropout.seed is not None, RECOMPUTE=recompute, FP8=fp8, **blocks,
    )  # fmt: skip
    return AddNormGrads(grad_x, grad_branch, branch_fp8, sums.add(partial_sums), normed)


def bias_gelu(
    h: Tensor, bias: Tensor, activation: str, bound: GemmBound | None, in_place: bool = False,
    dropout: Dropout = NO_DROPOUT,
) -> tuple[Tensor | None, Fp8Tensor | None]:  # fmt: skip
    """dropout(GELU(h + bias)) for h (M, N): in bf16, or in FP8 if the bound of the GEMM that computed h is given."""
    M, N = h.shape
    out, out_fp8 = (h if in_place else torch.empty_like(h), None) if bound is None else (None, empty_fp8(h))
    blocks, column_blocks = tile_blocks(N, 1024, 4) if out_fp8 is None else tile_blocks(N, 512, 8)
    launch(kernels.bias_gelu_kernel, (triton.cdiv(M, blocks["BLOCK_ROWS"]), column_blocks))(
        h, bias, out, *pointers(out_fp8)[:2], *(bound or (None, None)), *dropout, M,
        NUM_COLS=N, ACTIVATION=activation, DROPOUT=dropout.seed is not None, FP8=out_fp8 is not None, **blocks,
    )  # fmt: skip
    return out, out_fp8


def bias_gelu_backward(
    h: Tensor, bias: Tensor, grad_out: Tensor, activation: str, bound: GemmBound | None, saved_gelu: Tensor | None,
    sums: ColumnSums, dropout: Dropout = NO_DROPOUT,
) -> tuple[Tensor, Tensor, Fp8Tensor | None, Tensor]:  # fmt: skip
    """dropout(GELU(h + bias)), recomputed unless saved; the gradient of h, the same in FP8; the gradient of the bias.

    h and grad_out are overwritten. `bound` is that of the GEMM that computed grad_out; None without FP8.
    """
    M, N = h.shape
    gelu, grad_h = h if saved_gelu is None else saved_gelu, grad_out
    grad_h_fp8 = None if bound is None else empty_fp8(h)
    blocks, column_blocks = tile_blocks(N, 512, 2)
    num_programs = num_partial_sums(M, blocks["BLOCK_ROWS"], column_blocks)
    partial_sums = h.new_empty(num_programs, N, dtype=torch.float32)
    launch(kernels.bias_gelu_backward_kernel, (num_programs, column_blocks))(
        h, bias, grad_out, gelu, grad_h, *pointers(grad_h_fp8)[:2], *(bound or (None, None)), partial_sums, *dropout, M,
        NUM_COLS=N, ACTIVATION=activation, DROPOUT=dropout.seed is not None, RECOMPUTE=saved_gelu is None,
        FP8=grad_h_fp8 is not None, **blocks,
    )  # fmt: skip
    return gelu, grad_h, grad_h_fp8, sums.add(partial_sums)
