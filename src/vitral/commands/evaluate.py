"""How good a model is."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitral.commands.flags import parse


def run(words: list[str]) -> int:
    from tyro.conf import FlagCreatePairsOff, Positional

    @dataclass(frozen=True)
    class Evaluate:
        """How good a model is: loss, accuracy, per-class figures, confusion matrix."""

        run: Positional[Path]  # a run folder or a model folder
        data: str | None = None  # another set or folder with classes the model knows; default: what it was trained on
        split: Literal["test", "validation", "train"] = "test"
        calibrate: FlagCreatePairsOff[bool] = False  # first fit temperature and threshold on the validation images anew
        json: FlagCreatePairsOff[bool] = False  # for programs

    chosen = parse(Evaluate, words, "evaluate")
    from vitral import workshop

    if chosen.calibrate:
        found = workshop.calibrate(chosen.run)
        if not chosen.json:
            below = "none" if found.unknown_below is None else f"{found.score} below {found.unknown_below:.2f}"
            print(f"calibrated on the validation images: temperature {found.temperature:.3f}, unknown: {below}\n")
    metrics = workshop.evaluate(chosen.run, data=chosen.data, split=chosen.split)
    if chosen.json:
        print(json.dumps(metrics.as_dict()))
    else:
        from vitral.report import terminal

        terminal.show_metrics(metrics, split=chosen.split)
    return 0
