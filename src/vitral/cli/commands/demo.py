"""A small ViT in about a minute."""

from dataclasses import dataclass
from pathlib import Path

from vitral.cli.parsing import parse


def run(words: list[str]) -> int:
    @dataclass(frozen=True)
    class Demo:
        """Train a small ViT in about a minute, look at what it does, and say what to try next."""

        out: Path | None = None  # the run folder to make

    out = parse(Demo, words, "demo").out
    from vitral import api_train as making

    making.demo(out=out, quiet=False)
    return 0
