"""vitral probe: measure the quality of frozen features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.cli.checks import check_inputs
from vitral.cli.messages import (
    ALLOW_LEAK_HELP,
    DATA_HELP,
    ENGINE_HELP,
    JSON_HELP,
    MODEL_HELP,
    load_model,
    print_notes,
    status_line,
)
from vitral.cli.options import EngineFlag, checkpoint_flags
from vitral.cli.parsing import Command, argument, option, required_option
from vitral.errors import VitralError
from vitral.utils.json_toml import dump_json


@dataclass(frozen=True, kw_only=True)
class ProbeArgs:
    """Measure how well a model's frozen features separate your classes, without training the model: nearest
    neighbours, linear probe and few-shot regression. Takes minutes on a CPU."""

    data: str = argument(DATA_HELP)
    init_from: str = required_option(MODEL_HELP)
    checkpoint: Mapping[str, Any] = checkpoint_flags()
    engine: EngineFlag = option("auto", ENGINE_HELP)
    out: Path | None = option(None, "plot to write: .png, .svg or .pdf")
    allow_leak: bool = option(False, ALLOW_LEAK_HELP)
    json: bool = option(False, JSON_HELP)


def probe(args: ProbeArgs) -> int:
    if args.out is not None and args.out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise VitralError(f"cannot write a plot to {args.out}", "Supported formats: .png, .svg, .pdf")
    check_inputs(args.init_from, data=args.data)
    from vitral import api
    from vitral.reporting.terminal import tables

    predictor = load_model(args.init_from, args.checkpoint, engine=args.engine)
    with status_line("Computing features and fitting classifiers"):
        result = api.probe(args.data, predictor, out=args.out)
    print_notes(result.data_notes)
    if args.json:
        print(dump_json(result.as_dict()))
    else:
        tables.print_probe(result, args.allow_leak)
    return 0


COMMAND = Command("probe", ProbeArgs, probe)
