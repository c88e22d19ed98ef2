"""How good frozen features are."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vitral.cli.messages import opened
from vitral.cli.parsing import a_model, parse
from vitral.errors import VitralError


def run(words: list[str]) -> int:
    from tyro.conf import Positional, arg

    @dataclass(frozen=True)
    class Probe:
        """How good a checkpoint's features are for your images, without training it: minutes on a CPU."""

        data: Positional[str]  # a folder with class folders, a CSV list, or a known set
        init: Annotated[str, arg(help=a_model())]
        heads: int | None = None  # of a checkpoint whose tensors do not tell
        out: Path | None = None  # a plot: probe.png
        json: bool = False  # for programs

    chosen = parse(Probe, words, "probe")
    if chosen.out is not None and chosen.out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise VitralError(f"a plot cannot be written to {chosen.out}", "Known endings: .png, .svg, .pdf")
    from vitral import api as workshop
    from vitral.reporting.terminal import tables as terminal

    predictor = opened(chosen.init, heads=chosen.heads)
    result = workshop.probe(chosen.data, predictor, out=chosen.out)
    if chosen.json:
        print(json.dumps(result.as_dict()))
    else:
        terminal.show_probe(result)
    return 0
