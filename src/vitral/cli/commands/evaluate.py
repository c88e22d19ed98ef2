"""How good a model is, and how far to trust it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vitral.cli.messages import opened, status, to_be_fetched
from vitral.cli.parsing import a_model, parse


def run(words: list[str]) -> int:
    from tyro.conf import FlagCreatePairsOff, Positional, arg

    @dataclass(frozen=True)
    class Evaluate:
        """How good a model is, and how far to trust it. Every figure with its 95 % interval."""

        run: Annotated[Positional[str], arg(help=a_model())]
        data: str | None = None  # another set or folder with classes the model knows; default: what it was trained on
        split: Literal["test", "validation", "train"] | None = None  # default: test, or validation where there is none
        full: FlagCreatePairsOff[bool] = False  # every class and the confusion matrix too
        max_error: float | None = None  # 0.01: how sure must it be for at most 1 % of its answers to be wrong?
        unknown: str | None = None  # a set or folder of other things: does it notice that it does not know them?
        robustness: FlagCreatePairsOff[bool] = False  # noise, blur, pale, JPEG, turned: what is left of the accuracy?
        figures: Path | None = None  # a folder for diagrams of all this
        calibrate: FlagCreatePairsOff[bool] = False  # first fit temperature and threshold on the validation images anew
        false_alarms: float = 0.01  # with --calibrate: share of known images that may be called unknown
        labels: Path | None = None  # class names, one a line, for a checkpoint that has none
        json: FlagCreatePairsOff[bool] = False  # for programs

    chosen = parse(Evaluate, words, "evaluate")
    from vitral import api as workshop
    from vitral.reporting.terminal import evaluation as trust_text

    predictor = opened(chosen.run, labels=chosen.labels)
    to_be_fetched(chosen.data or predictor.card.trained_on, chosen.unknown)
    if chosen.calibrate:
        fitted = workshop.calibrate(predictor, false_alarms=chosen.false_alarms)
        if not chosen.json:
            below = "none" if fitted.unknown_below is None else f"{fitted.score} below {fitted.unknown_below:.2f}"
            print(f"calibrated on the validation images: temperature {fitted.temperature:.3f}, unknown: {below}\n")
    with status() as watch:
        found = workshop.evaluate(
            predictor,
            data=chosen.data,
            split=chosen.split,
            max_error=chosen.max_error,
            unknown=chosen.unknown,
            robustness=chosen.robustness,
            watch=watch,
        )
    if chosen.json:
        print(json.dumps(found.as_dict()))
    else:
        trust_text.show_evaluation(found, chosen.full)
    if chosen.figures is not None:
        from vitral.reporting.figures import evaluation as trust_figures

        paths = trust_figures.draw(found, chosen.figures)
        if not chosen.json:
            print("\n" + "\n".join(map(str, paths)))
    return 0
