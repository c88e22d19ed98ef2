"""AdamW's step for many small tensors at once, where they lie: a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from vitral.kernels.layernorm_gelu.kernel import nth


@triton.jit
def adamw(
    weights, gradients, means, squares, steps, rates, decays, sizes, halted, beta1, beta2, eps,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As torch.optim.AdamW moves them; `steps` count this one already. Nothing at all where training has halted."""
    n = tl.program_id(1)
    size, going = nth(sizes, n, COUNT), True
    if halted is not None:
        going = tl.load(halted) <= 0
    if (tl.program_id(0) * BLOCK < size) & going:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        step, lr = tl.load(nth(steps, n, COUNT)), tl.load(nth(rates, n, COUNT))
        w_at, m_at, v_at = nth(weights, n, COUNT) + at, nth(means, n, COUNT) + at, nth(squares, n, COUNT) + at
        g = tl.load(nth(gradients, n, COUNT) + at, inside, 0.0)
        m = tl.load(m_at, inside, 0.0)
        m += (g - m) * (1.0 - beta1)
        v = beta2 * tl.load(v_at, inside, 0.0) + (1.0 - beta2) * g * g
        tl.store(m_at, m, inside)
        tl.store(v_at, v, inside)
        bias1, bias2 = 1.0 - tl.exp2(step * tl.log2(beta1)), 1.0 - tl.exp2(step * tl.log2(beta2))
        w = tl.load(w_at, inside, 0.0) * (1.0 - lr * nth(decays, n, COUNT))
        tl.store(w_at, w - lr / bias1 * m / (tl.sqrt(v) / tl.sqrt(bias2) + eps), inside)
