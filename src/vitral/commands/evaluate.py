"""How good a model is."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitral.commands.flags import parse


def run(words: list[str]) -> int:
    from tyro.conf import Positional

    @dataclass(frozen=True)
    class Evaluate:
        """How good a model is: loss, accuracy, per-class figures, confusion matrix."""

        run: Positional[Path]  # a run folder or a model folder
        data: str | None = None  # another set or folder with classes the model knows; default: what it was trained on
        split: Literal["test", "validation", "train"] = "test"
        json: bool = False  # for programs

    chosen = parse(Evaluate, words, "evaluate")
    from vitral import workshop

    metrics = workshop.evaluate(chosen.run, data=chosen.data, split=chosen.split)
    if chosen.json:
        print(json.dumps(metrics.as_dict()))
    else:
        from vitral.report import terminal

        terminal.show_metrics(metrics, split=chosen.split)
    return 0
