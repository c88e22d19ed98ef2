"""vitral compare: compare two models on the same images."""

from __future__ import annotations

from dataclasses import dataclass

from vitral.cli.checks import check_inputs
from vitral.cli.messages import (
    ALLOW_LEAK_HELP,
    ENGINE_HELP,
    EVAL_DATA_HELP,
    JSON_HELP,
    MODEL_HELP,
    SPLIT_HELP,
    announce_downloads,
    load_model,
    print_notes,
    status_line,
)
from vitral.cli.options import EngineFlag, SplitFlag
from vitral.cli.parsing import Command, argument, option
from vitral.utils.json_toml import dump_json


@dataclass(frozen=True, kw_only=True)
class CompareArgs:
    """Compare the accuracy of two models on the same images, with a confidence interval and a significance test."""

    first: str = argument(MODEL_HELP)
    second: str = argument("model to compare it with")
    data: str | None = option(None, EVAL_DATA_HELP)
    split: SplitFlag | None = option(None, SPLIT_HELP)
    engine: EngineFlag = option("auto", ENGINE_HELP)
    allow_leak: bool = option(False, ALLOW_LEAK_HELP)
    json: bool = option(False, JSON_HELP)


def compare(args: CompareArgs) -> int:
    check_inputs(args.first, args.second, data=args.data)
    from vitral import api
    from vitral.reporting.terminal.evaluation import print_paired_comparison

    first, second = load_model(args.first, {}, engine=args.engine), load_model(args.second, {}, engine=args.engine)
    announce_downloads(*(args.data or model.model_config.trained_on for model in (first, second)))
    with status_line("Comparing"):
        comparison = api.compare_models(first, second, data=args.data, split=args.split)
    print_notes(comparison.notes)
    if args.json:
        print(dump_json(comparison.as_dict()))
    else:
        print_paired_comparison(comparison, args.first, args.second, args.allow_leak)
    return 0


COMMAND = Command("compare", CompareArgs, compare)
