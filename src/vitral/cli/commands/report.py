"""One file to send to a colleague."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vitral.cli.messages import opened, status, to_be_fetched
from vitral.cli.parsing import a_model, parse


def run(words: list[str]) -> int:
    from tyro.conf import FlagCreatePairsOff, Positional, arg

    @dataclass(frozen=True)
    class Report:
        """One HTML file about a model: curves, figures with intervals, the confusion matrix with the pictures behind
        it, mistakes with heatmaps, calibration, robustness, data, environment, how to repeat it. It fetches nothing."""

        run: Annotated[Positional[str], arg(help=a_model())]
        out: Path | None = None  # the file; default: report.html in that folder; of a checkpoint or a boxed model, here
        data: str | None = None  # another set or folder with classes the model knows; default: what it was trained on
        split: Literal["test", "validation", "train"] | None = None  # default: test, or validation where there is none
        unknown: str | None = None  # a set or folder of other things: does it notice that it does not know them?
        fast: FlagCreatePairsOff[bool] = False  # without the damaged pictures
        labels: Path | None = None  # class names, one a line, for a checkpoint that has none

    chosen = parse(Report, words, "report")
    from vitral import api as workshop

    predictor = opened(chosen.run, labels=chosen.labels)
    to_be_fetched(chosen.data or predictor.card.trained_on, chosen.unknown)
    with status() as watch:
        path = workshop.report(
            predictor,
            out=chosen.out,
            data=chosen.data,
            split=chosen.split,
            unknown=chosen.unknown,
            fast=chosen.fast,
            watch=watch,
        )
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, one file, needs no network")
    return 0
