"""Triton kernel for softmax cross-entropy with soft targets, its gradient and the number of correct predictions."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cross_entropy_kernel(
    logits_ptr, logit_offsets_ptr, targets_ptr, labels_ptr, grad_logits_ptr, sums_ptr, num_rows, label_smoothing,
    NUM_CLASSES: tl.constexpr, HAS_OFFSETS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CLASSES: tl.constexpr,
):  # fmt: skip
    """loss = Σ_rows Σ_k -t_k·log softmax(x)_k;  ∂loss/∂x = softmax(x)·Σ_k t_k - t.

    x = logits + logit_offsets if HAS_OFFSETS, otherwise the logits;  t = (1 - s)·target + s/K.

    Grid: (1,). A single program adds up all rows, so the sum has a fixed order and needs no atomics.

    logits: (num_rows, NUM_CLASSES) bf16 or fp32. logit_offsets: (NUM_CLASSES,) fp32; not read unless HAS_OFFSETS.
    targets: (num_rows, NUM_CLASSES) fp32; rows need not sum to 1. labels: (num_rows,) int64.
    grad_logits: (num_rows, NUM_CLASSES) fp32. sums: (2,) fp32, the summed loss and the number of rows whose label is
    the argmax of the logits without offsets (the first maximum on a tie).
    Reads logits and targets once and writes grad_logits once.
    """
    classes = tl.arange(0, BLOCK_CLASSES)
    loss_sum = tl.zeros((BLOCK_ROWS,), tl.float32)
    num_correct = tl.zeros((BLOCK_ROWS,), tl.float32)
    for start in range(0, num_rows, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        mask = (rows < num_rows)[:, None] & (classes < NUM_CLASSES)[None, :]
        offsets = rows[:, None] * NUM_CLASSES + classes[None, :]
        logits = tl.load(logits_ptr + offsets, mask, -1e30).to(tl.float32)
        targets = tl.load(targets_ptr + offsets, mask, 0.0) * (1.0 - label_smoothing) + label_smoothing / NUM_CLASSES
        targets = tl.where(mask, targets, 0.0)
        is_max = logits == tl.max(logits, axis=1)[:, None]
        argmax = tl.min(tl.where(is_max & mask, classes[None, :], BLOCK_CLASSES), axis=1)
        if HAS_OFFSETS:
            logits += tl.load(logit_offsets_ptr + classes, classes < NUM_CLASSES, 0.0)[None, :]
        row_max = tl.max(logits, axis=1)
        row_max = tl.where(rows < num_rows, row_max, 0.0)
        exp_logits = tl.where(mask, tl.exp(logits - row_max[:, None]), 0.0)
        exp_sum = tl.where(rows < num_rows, tl.sum(exp_logits, axis=1), 1.0)
        target_sum = tl.sum(targets, axis=1)
        neg_log_softmax = tl.log(exp_sum)[:, None] + row_max[:, None] - logits
        loss_sum += tl.sum(targets * neg_log_softmax, axis=1)
        tl.store(grad_logits_ptr + offsets, exp_logits / exp_sum[:, None] * target_sum[:, None] - targets, mask)
        labels = tl.load(labels_ptr + rows, rows < num_rows, -1)
        num_correct += tl.where((rows < num_rows) & (argmax == labels), 1.0, 0.0)
    tl.store(sums_ptr, tl.sum(loss_sum, axis=0))
    tl.store(sums_ptr + 1, tl.sum(num_correct, axis=0))
