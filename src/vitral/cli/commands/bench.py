"""vitral bench: measure inference speed."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from vitral.cli.checks import check_inputs
from vitral.cli.messages import EVAL_DATA_HELP, JSON_HELP, MODEL_HELP, announce_downloads, load_model
from vitral.cli.parsing import Command, argument, option
from vitral.utils.json_toml import dump_json


@dataclass(frozen=True, kw_only=True)
class BenchArgs:
    """Measure inference speed and accuracy on this CPU for every engine, thread count and batch size.

    The fastest engine that agrees with the reference is stored with the model; predict and serve use it on this CPU.
    """

    model: str = argument(MODEL_HELP)
    data: str | None = option(None, EVAL_DATA_HELP)
    images: int = option(512, "number of images; half of them calibrate int8, the others compare the engines")
    threads: tuple[int, ...] = option((), "thread counts to measure (default: 1 and all cores)")
    batch_sizes: tuple[int, ...] = option((1, 8, 32), "batch sizes to measure")
    seconds: float = option(1.0, "time per measurement, in seconds")
    json: bool = option(False, JSON_HELP)


def bench(args: BenchArgs) -> int:
    check_inputs(args.model, data=args.data)
    from vitral import api

    predictor = load_model(args.model, device="cpu", engine="reference")
    announce_downloads(args.data or predictor.model_config.trained_on)
    result = api.bench(
        predictor,
        data=args.data,
        images=args.images,
        threads=args.threads,
        batch_sizes=args.batch_sizes,
        seconds=args.seconds,
        log=lambda line: print(line, file=sys.stderr),
    )
    if args.json:
        from vitral.utils.serialization import to_dict

        print(dump_json(to_dict(result)))
    else:
        from vitral.reporting.terminal.bench import print_bench

        print_bench(result, "" if api.bench_folder(predictor) else args.model)
    return 0


COMMAND = Command("bench", BenchArgs, bench)
