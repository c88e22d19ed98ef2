"""Synthetic logits and labels for tests of metrics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def calibrated_logits(N: int, K: int, seed: int, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits and labels drawn from their softmax: a perfectly calibrated model."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(N, K, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(dim=1), 1, generator=generator).flatten()


def noisy_logits(N: int, K: int, seed: int, skill: float = 2.0, missing: int = 0) -> tuple[Tensor, Tensor]:
    """Logits that favour the true class by `skill`. The last `missing` classes do not occur."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, K - missing, (N,), generator=generator)
    return torch.randn(N, K, generator=generator) + skill * F.one_hot(labels, K), labels


def class_names(K: int) -> tuple[str, ...]:
    return tuple(f"class {k}" for k in range(K))
