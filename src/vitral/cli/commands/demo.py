"""vitral demo: train a small model and show what to try next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitral.cli.parsing import Command, option


@dataclass(frozen=True, kw_only=True)
class DemoArgs:
    """Train a small ViT on MNIST in about a minute, evaluate it and compare it with a bundled model."""

    out: Path | None = option(None, "run folder to create (default: runs/<recipe>-<date>-<id>)")


def demo(args: DemoArgs) -> int:
    from vitral import api

    api.demo(out=args.out, quiet=False)
    return 0


COMMAND = Command("demo", DemoArgs, demo)
