"""Models over HTTP, with a page."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from vitral import bundled as box
from vitral.cli.messages import understood
from vitral.cli.parsing import a_model, parse
from vitral.errors import VitralError, reason

MODELS = "run folders, model folders, checkpoint files, or hf:owner/name"


def run(words: list[str]) -> int:
    from tyro.conf import Positional, UseAppendAction, arg

    from vitral.serve.limits import Limits

    @dataclass(frozen=True)
    class Serve:
        """Serve models over HTTP: a page to try them, /docs for programs, /metrics for Prometheus."""

        runs: Annotated[Positional[tuple[str, ...]], arg(help=a_model(MODELS))]
        name: UseAppendAction[tuple[str, ...]] = ()  # what to call them, once for each; default: the folders' names
        labels: Path | None = None  # class names, one a line, for a checkpoint that has none
        host: str = "127.0.0.1"  # 0.0.0.0: the whole network may ask
        port: int = 8000  # 0: any free one
        keys: Path | None = None  # a file with API keys, one a line; else they are read from VITRAL_API_KEYS
        device: Literal["auto", "cpu", "gpu"] = "auto"
        precision: Literal["auto", "fp32", "bf16", "int8", "fp8"] = (
            "auto"  # auto: on a CPU what vitral bench found, or fp32; on a GPU bf16
        )
        threads: int | None = None  # a batch computes with; as many batches run side by side as the cores allow
        log: Literal["auto", "text", "json"] = "auto"  # auto: text on a terminal, JSON lines elsewhere
        limits: Annotated[Limits, arg(name="")] = field(default_factory=Limits)

    chosen = parse(Serve, words, "serve")
    if not chosen.runs:
        raise VitralError("which model?", box.hint(also="vitral serve runs/mine"))
    understood(note for run in chosen.runs for note in box.notes(run))
    try:
        from vitral.serve.server import serve
    except ModuleNotFoundError as error:
        raise VitralError(f"the server needs {error.name}", "pip install 'vitral[serve]'") from error
    usual: Literal["text", "json"] = "text" if sys.stderr.isatty() else "json"
    serve(
        chosen.runs,
        names=chosen.name,
        labels=chosen.labels,
        host=chosen.host,
        port=chosen.port,
        keys=read_keys(chosen.keys),
        limits=chosen.limits,
        device=chosen.device,
        precision=chosen.precision,
        threads=chosen.threads,
        log=usual if chosen.log == "auto" else chosen.log,
    )
    return 0


def read_keys(path: Path | None) -> list[str]:
    """A file's lines, or what the environment names with commas between; never the command line, which all can see."""
    if path is None:
        return [key.strip() for key in os.environ.get("VITRAL_API_KEYS", "").split(",") if key.strip()]
    try:
        keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise VitralError(
            f"cannot read the keys in {path}: {reason(error)}", "a text file with one key a line; or VITRAL_API_KEYS"
        ) from error
    if not (keys := [key for key in keys if key and not key.startswith("#")]):
        raise VitralError(f"there are no keys in {path}", "one a line; openssl rand -hex 24 makes one")
    return keys
