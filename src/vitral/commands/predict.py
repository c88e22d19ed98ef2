"""Ranked labels for image files."""

import sys
from dataclasses import dataclass
from pathlib import Path

from vitral.commands.flags import parse, understood
from vitral.errors import VitralError


def run(words: list[str]) -> int:
    from tyro.conf import FlagCreatePairsOff, Positional

    @dataclass(frozen=True)
    class Predict:
        """Ranked labels for image files of any size, mode and orientation, and for the images in folders."""

        run: Positional[str]  # a run folder, a model folder, a checkpoint file, or hf:owner/name
        files: Positional[tuple[Path, ...]]
        labels: Path | None = None  # class names, one a line, for a checkpoint that has none
        heads: int | None = None  # of a checkpoint whose tensors do not tell
        top: int = 3  # labels a picture
        json: FlagCreatePairsOff[bool] = False  # one object a line
        csv: FlagCreatePairsOff[bool] = False  # file, rank, label, probability, unknown, error

    chosen = parse(Predict, words, "predict")
    if not chosen.files:
        raise VitralError("which images?", f"vitral predict {chosen.run} photo.jpg folder/")
    from vitral.predict import Predictor
    from vitral.report import terminal

    predictor = Predictor.load(chosen.run, labels=chosen.labels, heads=chosen.heads)
    understood(predictor.notes)
    answers = predictor.predict_files(chosen.files, top=chosen.top)
    show = terminal.as_json if chosen.json else terminal.as_csv if chosen.csv else terminal.as_lines
    show(answers)
    failed = [answer for answer in answers if answer.error]
    for answer in failed:
        print(f"error: {answer.error}", file=sys.stderr)
    if failed:
        print(f"       {len(failed)} of {len(answers)} files could not be read", file=sys.stderr)
    return 1 if failed else 0
