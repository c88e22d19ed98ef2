"""The command line: a thin shell. A command is a file in vitral/commands, imported when it is asked for."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from vitral import __version__
from vitral import bundled as box
from vitral.errors import VitralError, nearest

# name, what stands behind it, what it does: in the order people meet them
TABLE = (
    ("demo", "", "train a small ViT in about a minute and look at it"),
    # learn
    ("doctor", "FOLDER", "what is wrong with a folder of images, what to train on it, how long it takes"),
    ("train", "DATA", "train on class folders or a known set; every field of the recipe is a flag"),
    ("probe", "DATA --init SOURCE", "how good a checkpoint's features are for your images"),
    # ask
    ("evaluate", "RUN", "how good it is, and how far to trust it: calibration, unknown and damaged images"),
    ("compare", "RUN RUN", "which of two models is better, and whether that can be luck"),
    ("report", "RUN", "one HTML file about a model, to send to a colleague"),
    ("predict", "RUN FILES…", "ranked labels for image files and folders"),
    ("bench", "RUN", "number type × threads × batch on this CPU; the best is kept with the model"),
    ("embed", "RUN FILES… --out FILE", "feature vectors as .npy, .parquet or .csv"),
    # look inside
    ("explain", "RUN FILES…", "where the model looked, and how far such maps can be trusted"),
    ("walk", "IMAGE [--model RUN]", "from pixels to logits, step by step, with the values and the source"),
    ("figures", "RUN", "the paper's figures: filters, positions, how far each head looks"),
    ("summary", "PRESET", "a model layer by layer: shapes, parameters, arithmetic, memory"),
    ("plan", "PRESET --gpus N", "memory, communication and days of a training on many GPUs"),
    # hand on
    ("export", "RUN --to onnx|torch", "one file for other programs, proven to agree"),
    ("serve", "RUN…", "models over HTTP, with a page to try them"),
    ("convert", "SOURCE FILE --to LIB", "a checkpoint of one library as another's"),
    ("push", "RUN hf:owner/name", "onto the Hugging Face hub, with a card, as timm and transformers load it"),
    # what there is
    ("recipes", "[show NAME]", "the named recipes; a complete one as TOML"),
    ("data", "list|fetch|where|pack", "the known sets; photographs decoded once"),
    ("models", "[show NAME]", "the models that come with vitral, ready to be asked"),
)
COMMANDS = tuple(name for name, _, _ in TABLE)


def help_text() -> str:
    rows = "".join(f"  {name + ' ' + behind:<31}{does}\n" for name, behind, does in TABLE)
    return (
        f"vitral {__version__}: a Vision Transformer workshop\n\n"
        f"usage: vitral COMMAND …          vitral COMMAND --help says more\n\n{rows}\n"
        "A run is the folder that `vitral train` leaves behind: runs/<recipe>-<date>-<id>.\n"
        f"Models that come with vitral are named like one: {', '.join(box.names())}.\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit with 0, with 2 where a person can fix it, with 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal of few letters, a name that is no Unicode: as \\x…
        sys.stdout.reconfigure(errors="backslashreplace")
    if os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0") != "0":
        silence()
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return
    if words[0] in ("-V", "--version"):
        print(f"vitral {__version__}")
        return
    try:
        if words[0] not in COMMANDS:
            raise VitralError(
                f"there is no command {words[0]!r}.{nearest(words[0], COMMANDS)}", f"Known: {', '.join(COMMANDS)}"
            )
        if any(re.fullmatch(r"(--[\w.-]+=)?", word) for word in words):
            raise VitralError("there is an empty word on the command line", "is a variable of the shell not set?")
        sys.exit(import_module(f"vitral.cli.commands.{words[0]}").run(words[1:]))
    except VitralError as error:
        tell_torchrun(error.what)
        interrupted = type(error).__name__ == "Interrupted"  # by name: its module would import torch
        print(error.what if interrupted else f"error: {error.what}", file=sys.stderr)
        for line in error.hint.splitlines():
            print(line if interrupted else f"       {line}", file=sys.stderr)
        sys.exit(130 if interrupted else 2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output (head, less) is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise  # not about a file: a bug
        print(f"error: {error.filename or 'the disk'}: {error.strerror}", file=sys.stderr)
        print("       is the name right, may this user read and write there, is there space?", file=sys.stderr)
        sys.exit(2)
    except Exception:
        tell_torchrun(traceback.format_exc())
        raise


def silence() -> None:
    """Of several processes only the first prints; torchrun reports what another one fails of."""
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        sys.stderr = sys.stdout


def tell_torchrun(what: str) -> None:
    """The reason, where torchrun looks for it: its report names the first process that failed, and this."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": what, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": what, "extraInfo": extra}}), encoding="utf-8")
