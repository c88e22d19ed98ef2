"""vitral serve: serve models over HTTP."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitral import bundled
from vitral.cli.checks import check_inputs
from vitral.cli.config_fields import ConfigField, read_config_fields
from vitral.cli.messages import BUNDLED, ENGINE_HELP, LABELS_HELP, TOME_HELP, print_notes
from vitral.cli.options import DeviceFlag, EngineFlag, checkpoint_flags, checkpoint_options
from vitral.cli.parsing import Command, argument, config_options, option
from vitral.errors import VitralError, error_reason


def limit_fields() -> Iterable[ConfigField]:
    return read_config_fields("vitral.serve.limits", "Limits")


@dataclass(frozen=True, kw_only=True)
class ServeArgs:
    """Serve models over HTTP: a web page, a JSON API (/docs) and Prometheus metrics (/metrics)."""

    models: tuple[str, ...] = argument(f"run or model folders, checkpoint files, hf:owner/name, {BUNDLED}")
    name: tuple[str, ...] = option((), "name of a model, once per model (default: folder names)", repeatable=True)
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 accepts connections from the network")
    port: int = option(8000, "port to listen on; 0 picks a free one")
    allowed_hosts: tuple[str, ...] = option(
        (), "further host names by which clients address the server, e.g. behind a proxy; * for any", repeatable=True
    )
    keys: Path | None = option(None, "file with one API key per line (default: the variable VITRAL_API_KEYS)")
    explorer: Literal["auto", "on", "off"] = option(
        "auto", "/explorer/ runs the models in the browser, which publishes their weights; auto: on localhost only"
    )
    engine: EngineFlag = option("auto", ENGINE_HELP)
    tome_r: int = option(0, TOME_HELP)
    device: DeviceFlag = option("auto", "device to run on; CUDA_VISIBLE_DEVICES selects one of several GPUs")
    threads: int | None = option(None, "CPU threads per batch; several batches run in parallel if cores allow")
    labels: Path | None = option(None, LABELS_HELP)
    checkpoint: Mapping[str, Any] = checkpoint_flags()
    log: Literal["auto", "text", "json"] = option("auto", "log format; auto: text on a terminal, otherwise JSON lines")
    limits: Mapping[str, Any] = config_options(limit_fields, group="Limits")


def serve(args: ServeArgs) -> int:
    from vitral.serve.limits import Limits

    if not args.models:
        raise VitralError(
            "no model given", bundled.missing_model_hint(other_hint="For example: vitral serve runs/mnist")
        )
    try:
        limits = Limits(**args.limits)
    except ValueError as error:
        raise VitralError(str(error), "See `vitral serve --help`") from error
    check_inputs(*args.models, labels=args.labels)
    print_notes(note for model in args.models for note in bundled.shadowing_notes(model))
    try:
        from vitral.serve.server import serve as run_server
    except ModuleNotFoundError as error:
        raise VitralError(f"vitral serve requires {error.name}", "pip install 'vitral[serve]'") from error
    default_log: Literal["text", "json"] = "text" if sys.stderr.isatty() else "json"
    run_server(
        args.models,
        names=args.name,
        labels=args.labels,
        options=checkpoint_options(args.checkpoint),
        host=args.host,
        port=args.port,
        keys=read_keys(args.keys),
        hosts=[name.strip() for names in args.allowed_hosts for name in names.split(",") if name.strip()],
        limits=limits,
        device=args.device,
        engine=args.engine,
        tome_r=args.tome_r,
        threads=args.threads,
        log=default_log if args.log == "auto" else args.log,
        explorer=args.explorer,
    )
    return 0


def read_keys(path: Path | None) -> list[str] | None:
    """API keys from a file or from VITRAL_API_KEYS, comma-separated; None if neither is given.

    Never from flags, which other users can see. A file or variable without keys is an error: the server would be open
    although keys were intended.
    """
    hint = "Write one key per line; openssl rand -hex 24 generates one"
    if path is None:
        variable = os.environ.get("VITRAL_API_KEYS")
        if variable is None:
            return None
        source, keys = "VITRAL_API_KEYS", [key.strip() for key in variable.split(",") if key.strip()]
        hint = "Separate keys with commas, or unset the variable to serve without keys"
    else:
        source = str(path)
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise VitralError(
                f"cannot read API keys from {path}: {error_reason(error)}",
                "Expected a text file with one key per line; or set VITRAL_API_KEYS",
            ) from error
        keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise VitralError(f"no API keys in {source}", hint)
    return keys


COMMAND = Command("serve", ServeArgs, serve)
