"""How fast a model answers on this machine."""

import json
import sys
from dataclasses import dataclass
from typing import Annotated

from vitral.cli.messages import opened, to_be_fetched
from vitral.cli.parsing import a_model, parse


def run(words: list[str]) -> int:
    from tyro.conf import FlagCreatePairsOff, Positional, arg

    @dataclass(frozen=True)
    class Bench:
        """Number type × threads × batch on this CPU, and which way to take: it is kept with the model and used by
        predict and serve on this CPU."""

        run: Annotated[Positional[str], arg(help=a_model())]
        data: str | None = None  # a set or folder to measure with; default: what it was trained on
        images: int = 512  # half to learn from, half to compare on
        threads: tuple[int, ...] = ()  # default: one, and all cores
        batches: tuple[int, ...] = (1, 8, 32)
        seconds: float = 1.0  # for each row
        json: FlagCreatePairsOff[bool] = False  # for programs

    chosen = parse(Bench, words, "bench")
    from vitral import api_ship as shipping

    predictor = opened(chosen.run, device="cpu", precision="fp32")
    to_be_fetched(chosen.data or predictor.card.trained_on)
    measured = shipping.bench(
        predictor,
        data=chosen.data,
        images=chosen.images,
        threads=chosen.threads,
        batches=chosen.batches,
        seconds=chosen.seconds,
        say=lambda line: print(line, file=sys.stderr),
    )
    if chosen.json:
        from vitral.utils.serialization import to_plain

        print(json.dumps(to_plain(measured)))
    else:
        from vitral.reporting.terminal.bench import show_measured

        show_measured(measured, "" if shipping.kept_in(predictor) else chosen.run)
    return 0
