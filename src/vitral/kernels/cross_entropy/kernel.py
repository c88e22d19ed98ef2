"""Softmax, cross-entropy, its gradient and the count of right answers in one pass: a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def judge(
    logits, targets, labels, dlogits, sums, B, smoothing,
    K: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """One program for all images: sums in one order. `sums`: of the losses, and of the right answers."""
    classes = tl.arange(0, CLASSES)
    lost = tl.zeros((ROWS,), tl.float32)
    right = tl.zeros((ROWS,), tl.float32)
    for start in range(0, B, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < B)[:, None] & (classes < K)[None, :]
        at = rows[:, None] * K + classes[None, :]
        x = tl.load(logits + at, inside, -1e30).to(tl.float32)
        asked = tl.load(targets + at, inside, 0.0) * (1.0 - smoothing) + smoothing / K
        asked = tl.where(inside, asked, 0.0)
        most = tl.max(x, axis=1)
        most = tl.where(rows < B, most, 0.0)
        share = tl.where(inside, tl.exp(x - most[:, None]), 0.0)
        total = tl.where(rows < B, tl.sum(share, axis=1), 1.0)
        whole = tl.sum(asked, axis=1)
        unlikely = tl.log(total)[:, None] + most[:, None] - x
        lost += tl.sum(asked * unlikely, axis=1)
        tl.store(dlogits + at, share / total[:, None] * whole[:, None] - asked, inside)
        first = tl.min(tl.where((x == most[:, None]) & inside, classes[None, :], CLASSES), axis=1)
        right += tl.where((rows < B) & (first == tl.load(labels + rows, rows < B, -1)), 1.0, 0.0)
    tl.store(sums, tl.sum(lost, axis=0))
    tl.store(sums + 1, tl.sum(right, axis=0))
