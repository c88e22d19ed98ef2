"""The fused post-attention block and the FP8 expansion with GELU as functions of tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor, nn

from vitral.kernels.block import kernel as kernels
from vitral.kernels.fp8.op import Fp8Tensor, Fp8Weight, empty_fp8
from vitral.kernels.layernorm_gelu.op import activation_name
from vitral.kernels.precompile import launch

# The post-attention kernel: largest widths that fit into registers, and the minimum number of tokens for a speed-up.
MAX_INFERENCE_WIDTH, MAX_TRAINING_WIDTH, MIN_BLOCK_TOKENS = 256, 192, 6144
BLOCK_ROWS, BLOCK_N = 64, 32  # tokens per program, and weight rows or columns per step
# The FP8 expansion with GELU: largest width, minimum number of tokens for a speed-up, splits of the hidden columns.
MAX_EXPAND_WIDTH, MIN_EXPAND_TOKENS, COL_SPLITS = 384, 16384, 2


class BlockActivations(NamedTuple):
    """Activations that the post-attention kernel saves for the backward pass."""

    mid: Tensor  # (M, D): the residual stream between attention and MLP
    hidden: Tensor  # (M, HIDDEN): before bias and GELU
    norm2_stats: Tensor  # (2, M): mean and rstd
    norm1_stats: Tensor  # (2, M): of the next block's first norm


def split_width(width: int) -> tuple[int, int]:
    """The largest power of two in `width`, and the remainder."""
    largest = 1 << (width.bit_length() - 1)
    return largest, width - largest


def is_one_or_two_powers(width: int, smallest: int) -> bool:
    """Whether `width` is a power of two or the sum of two, none below `smallest`."""
    D1, D2 = split_width(width)
    return smallest <= D1 and (D2 == 0 or (smallest <= D2 and D2 & (D2 - 1) == 0))


def post_attention_supports(width: int, hidden: int, training: bool = False) -> bool:
    """Whether the post-attention kernel supports these widths. Training keeps more values in registers."""
    fits = (MAX_TRAINING_WIDTH if training else MAX_INFERENCE_WIDTH) >= width
    return fits and is_one_or_two_powers(width, 16) and hidden % BLOCK_N == 3 * width % BLOCK_N == 0


def expand_gelu_supports(width: int, hidden: int) -> bool:
    """Whether the FP8 expansion with GELU supports these widths."""
    return width <= MAX_EXPAND_WIDTH and is_one_or_two_powers(width, 32) and hidden % (COL_SPLITS * 64) == 0


def post_attention(
    attn_out: Tensor, x: Tensor, out: Tensor, qkv: Tensor, block: Any, next_block: Any,
    compute_weights: dict[Tensor, Tensor], biases: dict[nn.Linear, Tensor], save: BlockActivations | None = None,
) -> None:  # fmt: skip
    """Write the output of `block` to `out` (M, D) and the qkv of `next_block` to `qkv` (M, 3D).

    attn_out, x: (M, D). `compute_weights` maps weight matrices to their copies in the compute dtype; `biases` holds
    those that replace the bias of a layer.
    """
    (M, D), mlp = x.shape, block.mlp
    layers = (
        block.attention.project, block.norm2, mlp.expand, mlp.contract, next_block.norm1, next_block.attention.qkv,
    )  # fmt: skip
    params = [
        p for layer in layers for p in (compute_weights.get(layer.weight, layer.weight), biases.get(layer, layer.bias))
    ]
    D1, D2 = split_width(D)
    num_stages = 4 if D <= 192 else 3  # two programs' buffers fit into the shared memory of an SM
    launch(kernels.post_attention_kernel, (triton.cdiv(M, BLOCK_ROWS),))(
        attn_out, x, out, qkv, *params, *(save or (None,) * 4), M, block.norm2.eps, next_block.norm1.eps,
        D1=D1, D2=D2, HIDDEN=mlp.expand.out_features, SAVE_FOR_BACKWARD=save is not None,
        ACTIVATION=activation_name(mlp), QKV_BIAS=params[-1] is not None,
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_N=BLOCK_N, NUM_STAGES=num_stages, num_warps=4,
    )  # fmt: skip


def expand_gelu_fp8(x: Fp8Tensor, weight: Fp8Weight, bias: Tensor, activation: str) -> Fp8Tensor:
    """GELU(x·Wᵀ + bias) in FP8: the GEMM and `bias_gelu` without writing the hidden activations.

    x: (M, D), weight: (H, D) -> (M, H). The row norms of the result are not set.
    """
    (M, D), H = x.data.shape, len(weight.data)
    (D1, D2), out = split_width(D), empty_fp8(x.data, H)
    launch(kernels.expand_gelu_fp8_kernel, (COL_SPLITS * triton.cdiv(M, 128),))(
        x.data, x.scales, x.row_norms, weight.data, weight.scales, weight.bound, bias, out.data, out.scales, M,
        D1=D1, D2=D2, HIDDEN=H, ACTIVATION=activation, BLOCK_ROWS=128, BLOCK_N=64, COL_SPLITS=COL_SPLITS,
        NUM_STAGES=2, num_warps=8,
    )  # fmt: skip
    return out
