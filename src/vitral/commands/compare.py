"""Two models, asked the same images."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitral.commands.flags import parse


def run(words: list[str]) -> int:
    from tyro.conf import FlagCreatePairsOff, Positional

    @dataclass(frozen=True)
    class Compare:
        """Which of two models is better, by how much, and whether that can be luck."""

        first: Positional[Path]  # a run folder or a model folder
        second: Positional[Path]
        data: str | None = None  # a set or folder for both; default: what they were trained on
        split: Literal["test", "validation", "train"] | None = None  # default: test, or validation where there is none
        json: FlagCreatePairsOff[bool] = False  # for programs

    chosen = parse(Compare, words, "compare")
    from vitral import workshop
    from vitral.report import trust_text

    found = workshop.compare_models(chosen.first, chosen.second, data=chosen.data, split=chosen.split)
    if chosen.json:
        print(json.dumps(found.as_dict()))
    else:
        trust_text.show_comparison(found, str(chosen.first), str(chosen.second))
    return 0
