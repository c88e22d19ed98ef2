"""Triton kernel for the AdamW update of many small tensors in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.reduce.kernel import select_from_tuple


@triton.jit
def adamw_kernel(
    weight_ptrs, grad_ptrs, exp_avg_ptrs, exp_avg_sq_ptrs, step_ptrs, lr_ptrs, weight_decays, numels, found_inf_ptr,
    beta1, beta2, eps,
    NUM_TENSORS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """AdamW, in place, as torch.optim.AdamW computes it.

        m ← m + (1 - β1)·(g - m)
        v ← β2·v + (1 - β2)·g²
        w ← w·(1 - lr·λ) - lr/(1 - β1ᵗ) · m / (√v/√(1 - β2ᵗ) + ε)

    Grid: (blocks of the largest tensor, NUM_TENSORS). Each tuple has one entry per tensor.

    weight, grad, exp_avg, exp_avg_sq: (numel,) fp32, contiguous. step: () fp32, already incremented for this update.
    lr: () fp32. found_inf: () fp32 or None.
    Reads 4 and writes 3 values per element; reads and writes nothing where found_inf > 0.
    """
    tensor = tl.program_id(1)
    numel, is_finite = select_from_tuple(numels, tensor, NUM_TENSORS), True
    if found_inf_ptr is not None:
        is_finite = tl.load(found_inf_ptr) <= 0
    if (tl.program_id(0) * BLOCK_SIZE < numel) & is_finite:
        offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        mask = offsets < numel
        step = tl.load(select_from_tuple(step_ptrs, tensor, NUM_TENSORS))
        lr = tl.load(select_from_tuple(lr_ptrs, tensor, NUM_TENSORS))
        weight_ptr = select_from_tuple(weight_ptrs, tensor, NUM_TENSORS) + offsets
        exp_avg_ptr = select_from_tuple(exp_avg_ptrs, tensor, NUM_TENSORS) + offsets
        exp_avg_sq_ptr = select_from_tuple(exp_avg_sq_ptrs, tensor, NUM_TENSORS) + offsets
        grad = tl.load(select_from_tuple(grad_ptrs, tensor, NUM_TENSORS) + offsets, mask, 0.0)
        exp_avg = tl.load(exp_avg_ptr, mask, 0.0)
        exp_avg += (grad - exp_avg) * (1.0 - beta1)
        exp_avg_sq = beta2 * tl.load(exp_avg_sq_ptr, mask, 0.0) + (1.0 - beta2) * grad * grad
        tl.store(exp_avg_ptr, exp_avg, mask)
        tl.store(exp_avg_sq_ptr, exp_avg_sq, mask)
        bias_correction1 = 1.0 - tl.exp2(step * tl.log2(beta1))
        bias_correction2 = 1.0 - tl.exp2(step * tl.log2(beta2))
        weight = tl.load(weight_ptr, mask, 0.0)
        weight *= 1.0 - lr * select_from_tuple(weight_decays, tensor, NUM_TENSORS)
        step_size = lr / bias_correction1
        weight -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) / tl.sqrt(bias_correction2) + eps)
        tl.store(weight_ptr, weight, mask)
