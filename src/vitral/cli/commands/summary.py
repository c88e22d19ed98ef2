"""vitral summary: layers, parameters, FLOPs and memory of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitral import bundled
from vitral.cli.messages import MODEL_HELP
from vitral.cli.options import vit_fields
from vitral.cli.parsing import Command, argument, config_options, option
from vitral.errors import VitralError


@dataclass(frozen=True, kw_only=True)
class SummaryArgs:
    """Print a model layer by layer with shapes, parameters, FLOPs and memory for one image."""

    model: str | None = argument(f"preset (B/16, R50+B/16, ...), {MODEL_HELP}", default=None)
    levels: int = option(3, "how many levels of nested modules to show")
    config: Mapping[str, Any] = config_options(vit_fields, group="Model (defaults: the given model's)")


def summary(args: SummaryArgs) -> int:
    from vitral.analysis.model_summary import summarise
    from vitral.models.presets import PRESETS, PUBLISHED_ACCURACY
    from vitral.models.variants.hybrid import HYBRIDS

    if args.model is None:
        raise VitralError(
            "no model given", f"Presets: {', '.join([*PRESETS, *HYBRIDS])}. {bundled.missing_model_hint()}"
        )
    if args.levels < 1:
        raise VitralError(f"--levels must be at least 1, got {args.levels}", "The default is 3")
    variant, config = architecture_of(args.model)
    try:
        config = replace(config, **args.config)
    except ValueError as error:
        raise VitralError(str(error), "See `vitral summary --help`") from error
    print(summarise(config, args.levels, variant))
    if args.model in PUBLISHED_ACCURACY:
        print(f"Published accuracy  {PUBLISHED_ACCURACY[args.model]}")
    return 0


def architecture_of(name: str) -> tuple[str, Any]:
    """Variant and configuration of a preset, a checkpoint or a bundled model."""
    from vitral import weights
    from vitral.models.variants import resolve_preset

    try:
        return resolve_preset(name)
    except VitralError as error:
        if not name.startswith("hf:") and not Path(bundled.resolve(name)).exists():
            raise VitralError(error.what, f"{error.hint}. {bundled.missing_model_hint()}") from error
    checkpoint = weights.read(name)
    return checkpoint.variant, checkpoint.config


COMMAND = Command("summary", SummaryArgs, summary)
