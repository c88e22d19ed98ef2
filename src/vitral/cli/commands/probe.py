"""vitral probe: measure the quality of frozen features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.cli.checks import check_inputs, check_output
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
from vitral.cli.options import EngineFlag, checkpoint_flags, checkpoint_options
from vitral.cli.parsing import Command, argument, option, required_option
from vitral.errors import VitralError
from vitral.utils.json_toml import dump_json

RANDOM = "random"  # that of vitral.api.label_efficiency, which imports torch
AGAINST = "Comparison of initial weights (--against)"


@dataclass(frozen=True, kw_only=True)
class ProbeArgs:
    """Measure how well a model's frozen features separate your classes, without training the model: nearest
    neighbours, linear probe and few-shot regression. The expected time is printed first: about half a minute for 2,500
    photographs and a Ti/16 on two CPU cores.

    With --against, compare two sets of initial weights, such as those before and after pretraining: nearest neighbours,
    linear probe, and fine-tuning with 1%, 10% and all of the labels, over several seeds. The last line says whether the
    weights of --init-from help. Fine-tuning takes long on a CPU; the expected time is printed first.
    """

    data: str = argument(DATA_HELP)
    init_from: str = required_option(MODEL_HELP)
    engine: EngineFlag = option("auto", ENGINE_HELP)
    out: Path | None = option(None, "plot to write: .png, .svg or .pdf")
    allow_leak: bool = option(False, ALLOW_LEAK_HELP)
    json: bool = option(False, JSON_HELP)
    against: str | None = option(
        None, "model to compare with, or random: the same architecture with random weights", group=AGAINST
    )
    fractions: tuple[float, ...] | None = option(
        None, "fractions of the labels to learn from (default: 0.01,0.1,1)", group=AGAINST
    )
    seeds: int | None = option(None, "repetitions with other labels and random seeds (default: 3)", group=AGAINST)
    epochs: int | None = option(None, "epochs of fine-tuning with all labels (default: the recipe's)", group=AGAINST)
    recipe: str | None = option(None, "recipe for fine-tuning: name or TOML file", group=AGAINST)
    fine_tuning: bool | None = option(None, "also fine-tune, which takes nearly all of the time", group=AGAINST)
    results: Path | None = option(
        None,
        "folder for the result and finished runs, which are not repeated (default: runs/label-efficiency-<date>-<id>)",
        group=AGAINST,
    )
    checkpoint: Mapping[str, Any] = checkpoint_flags()


def probe(args: ProbeArgs) -> int:
    if args.out is not None and args.out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise VitralError(f"cannot write a plot to {args.out}", "Supported formats: .png, .svg, .pdf")
    other = args.against if args.against != RANDOM else None
    check_inputs(args.init_from, other, data=args.data, recipe=args.recipe)
    check_output(args.out)
    if args.against is not None:
        return compare(args, args.against)
    for name in ("fractions", "seeds", "epochs", "recipe", "fine_tuning", "results"):
        if (value := getattr(args, name)) is not None:
            flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
            raise VitralError(f"{flag} is for the comparison with another model", "Name that model with --against")
    from vitral import api
    from vitral.reporting.terminal import tables

    predictor = load_model(args.init_from, args.checkpoint, engine=args.engine)
    with status_line("Reading images") as log:
        result = api.probe(args.data, predictor, out=args.out, log=log, note=log.note)
    print_notes(result.data_notes)
    if args.json:
        print(dump_json(result.as_dict()))
    else:
        tables.print_probe(result, args.allow_leak)
    return 0


def compare(args: ProbeArgs, against: str) -> int:
    from vitral.api import compare_label_efficiency
    from vitral.reporting.terminal.label_efficiency import print_label_efficiency

    names = ("fractions", "seeds", "epochs", "recipe", "fine_tuning", "results", "out")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    result = compare_label_efficiency(
        args.data,
        args.init_from,
        against,
        options=checkpoint_options(args.checkpoint),
        engine=args.engine,
        allow_leak=args.allow_leak,
        quiet=False,
        **given,
    )
    if args.json:
        print(dump_json(result.as_dict()))
    else:
        print_label_efficiency(result, args.allow_leak)
    return 0


COMMAND = Command("probe", ProbeArgs, probe)
