"""Feature vectors."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vitral.cli.messages import opened
from vitral.cli.parsing import a_model, parse


def run(words: list[str]) -> int:
    from tyro.conf import Positional, arg

    @dataclass(frozen=True)
    class Embed:
        """One vector an image, from before the head, for programs of your own."""

        run: Annotated[Positional[str], arg(help=a_model())]
        files: Positional[tuple[Path, ...]]
        out: Path  # features.npy, .parquet or .csv
        heads: int | None = None  # of a checkpoint whose tensors do not tell

    chosen = parse(Embed, words, "embed")
    from vitral import api as workshop
    from vitral.inference.prediction import exit_status

    predictor = opened(chosen.run, heads=chosen.heads)
    made, troubles = workshop.embed(predictor, chosen.files, chosen.out)
    for trouble in troubles:
        print(f"error: {trouble}", file=sys.stderr)
    print(f"{chosen.out}: the features of {made:,} {'image' if made == 1 else 'images'}")
    return exit_status(len(troubles), made + len(troubles))
