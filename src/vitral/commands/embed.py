"""Feature vectors."""

import sys
from dataclasses import dataclass
from pathlib import Path

from vitral.commands.beside import opened
from vitral.commands.flags import parse


def run(words: list[str]) -> int:
    from tyro.conf import Positional

    @dataclass(frozen=True)
    class Embed:
        """One vector an image, from before the head, for programs of your own."""

        run: Positional[str]  # a run folder, a model folder, a checkpoint file, or hf:owner/name
        files: Positional[tuple[Path, ...]]
        out: Path  # features.npy, .parquet or .csv
        heads: int | None = None  # of a checkpoint whose tensors do not tell

    chosen = parse(Embed, words, "embed")
    from vitral import workshop

    predictor = opened(chosen.run, heads=chosen.heads)
    troubles = workshop.embed(predictor, chosen.files, chosen.out)
    for trouble in troubles:
        print(f"error: {trouble}", file=sys.stderr)
    print(f"{chosen.out}: written")
    return 1 if troubles else 0
