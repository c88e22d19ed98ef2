"""Two models, asked the same images."""

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from vitral.cli.messages import opened, to_be_fetched
from vitral.cli.parsing import a_model, parse


def run(words: list[str]) -> int:
    from tyro.conf import FlagCreatePairsOff, Positional, arg

    @dataclass(frozen=True)
    class Compare:
        """Which of two models is better, by how much, and whether that can be luck."""

        first: Annotated[Positional[str], arg(help=a_model())]
        second: Positional[str]  # a second one, to compare it with
        data: str | None = None  # a set or folder for both; default: what they were trained on
        split: Literal["test", "validation", "train"] | None = None  # default: test, or validation where there is none
        json: FlagCreatePairsOff[bool] = False  # for programs

    chosen = parse(Compare, words, "compare")
    from vitral import api as workshop
    from vitral.reporting.terminal import evaluation as trust_text

    first, second = opened(chosen.first), opened(chosen.second)
    to_be_fetched(*(chosen.data or model.card.trained_on for model in (first, second)))
    found = workshop.compare_models(first, second, data=chosen.data, split=chosen.split)
    if chosen.json:
        print(json.dumps(found.as_dict()))
    else:
        trust_text.show_comparison(found, chosen.first, chosen.second)
    return 0
