"""Helpers that several test files import; fixtures are in conftest.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vitral.data.datasets import Split
from vitral.runs.run import Run

Fit = Callable[..., Run]
Command = Callable[..., tuple[int, str, str]]


def textures(count: int, seed: int, size: int = 8, channels: int = 1) -> Split:
    """Four kinds of noisy images: rows, columns, a chequerboard, or nothing of it."""
    draws = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 120, (count, channels, size, size), generator=draws, dtype=torch.uint8)
    labels = torch.arange(count) % 4
    y, x = torch.arange(size)[:, None] // 2, torch.arange(size)[None, :] // 2
    kinds = torch.stack([(y + 0 * x) % 2, (x + 0 * y) % 2, (x + y) % 2, 0 * (x + y)])
    return Split(images=images + 100 * kinds[labels][:, None].to(torch.uint8), labels=labels)


def leave_out_pictures(patched: pytest.MonkeyPatch) -> None:
    patched.setattr("vitral.api_train.draw", lambda run, *_: run.figures / "example.png")
    patched.setattr("vitral.api_train.gather", lambda *_: None)
    patched.setattr("vitral.api_train.write_report", lambda _, page: page)


def identical(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """The same names and the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
