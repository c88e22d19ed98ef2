"""vitral report: an HTML report about a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.cli.checks import check_inputs, check_output
from vitral.cli.messages import (
    ALLOW_LEAK_HELP,
    ENGINE_HELP,
    EVAL_DATA_HELP,
    LABELS_HELP,
    MODEL_HELP,
    SPLIT_HELP,
    announce_downloads,
    load_model,
    status_line,
)
from vitral.cli.options import EngineFlag, SplitFlag, checkpoint_flags
from vitral.cli.parsing import Command, argument, option


@dataclass(frozen=True, kw_only=True)
class ReportArgs:
    """Write a self-contained HTML report: training curves, metrics with confidence intervals, confusion matrix,
    misclassified images with heatmaps, calibration, robustness, dataset, environment and how to reproduce the run."""

    model: str = argument(MODEL_HELP)
    out: Path | None = option(None, "file to write (default: report.html in the run folder)")
    data: str | None = option(None, EVAL_DATA_HELP)
    split: SplitFlag | None = option(None, SPLIT_HELP)
    engine: EngineFlag = option("auto", ENGINE_HELP)
    ood: str | None = option(None, "dataset or folder of unknown images: measure how many of them are detected")
    fast: bool = option(False, "skip the robustness measurements")
    labels: Path | None = option(None, LABELS_HELP)
    allow_leak: bool = option(False, ALLOW_LEAK_HELP)
    checkpoint: Mapping[str, Any] = checkpoint_flags()


def report(args: ReportArgs) -> int:
    check_inputs(args.model, data=args.data, labels=args.labels)
    check_inputs(data=args.ood)
    check_output(args.out)
    from vitral import api

    predictor = load_model(args.model, args.checkpoint, labels=args.labels, engine=args.engine)
    announce_downloads(args.data or predictor.model_config.trained_on, args.ood)
    with status_line() as log:
        path = api.report(
            predictor,
            out=args.out,
            data=args.data,
            split=args.split,
            ood=args.ood,
            fast=args.fast,
            allow_leak=args.allow_leak,
            log=log,
            note=log.note,
        )
    print(f"Wrote {path} ({path.stat().st_size / 1e6:.2f} MB)")
    return 0


COMMAND = Command("report", ReportArgs, report)
