"""The `vitral` program: find the command, run it, and turn errors into two lines and an exit status.

Exit status: 0 for success, 1 if a command reports problems (unreadable files, doctor), 2 for errors that the user can
fix, 130 after Ctrl-C. Command modules are imported when they are used, so `vitral --help` is fast.
"""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from vitral import __version__, bundled
from vitral.device.malloc import keep_freed_memory
from vitral.errors import Interrupted, VitralError, did_you_mean, one_line
from vitral.utils.json_toml import dump_json

# task -> (name, arguments, summary)
COMMAND_GROUPS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "Start": (("demo", "", "train a small ViT in about a minute and look at the results"),),
    "Train": (
        ("doctor", "FOLDER", "check a folder of images, recommend a recipe, estimate the training time"),
        ("train", "DATA", "train or fine-tune on a folder of images or a built-in dataset"),
        ("pretrain", "IMAGES...", "learn features from images without labels, or continue a checkpoint's pretraining"),
        ("distill", "IMAGES... --teacher MODEL", "learn the features of a teacher from images without labels"),
        ("probe", "DATA --init-from MODEL", "measure how well a model's frozen features fit your images"),
        ("plan", "PRESET --gpus N", "estimate memory, communication and duration on many GPUs"),
    ),
    "Predict": (
        ("predict", "MODEL FILES...", "predict labels for image files and folders"),
        ("embed", "MODEL FILES... --out FILE", "write feature vectors as .npy, .parquet or .csv"),
        ("bench", "MODEL", "find the fastest inference engine for this CPU or GPU"),
    ),
    "Evaluate": (
        ("evaluate", "MODEL", "measure accuracy, calibration, OOD detection and robustness"),
        ("compare", "MODEL MODEL", "test whether one model is better than another"),
        ("report", "MODEL", "write a self-contained HTML report"),
    ),
    "Understand": (
        ("explain", "MODEL FILES...", "draw heatmaps of what predictions depend on, and measure how faithful they are"),
        ("walk", "IMAGE", "follow one image through the model, step by step"),
        ("explorer", "[MODEL...]", "write a site in which a ViT runs in the browser, to explore and take apart"),
        ("figures", "MODEL", "draw the figures of the ViT paper for a model"),
        ("summary", "PRESET|MODEL", "print layers, shapes, parameters, FLOPs and memory"),
    ),
    "Deploy and share": (
        ("serve", "MODEL...", "serve models over HTTP, with a web page"),
        ("export", "MODEL", "export to ONNX or torch.export, verified against the model"),
        ("convert", "SOURCE DESTINATION", "convert checkpoints between timm, transformers, torchvision, ..."),
        ("push", "MODEL hf:owner/name", "upload a model and its card to the Hugging Face Hub"),
    ),
    "Look up": (
        ("recipes", "[show NAME]", "list recipes, or print one as TOML"),
        ("data", "[fetch|where|pack]", "list, download and pack datasets"),
        ("models", "[show NAME]", "list the bundled models"),
        ("completion", "bash|zsh|fish", "print a shell completion script"),
    ),
}
# what other tools call them
COMMANDS_ELSEWHERE = {
    "benchmark": "bench",
    "classify": "predict",
    "fine-tune": "train DATA --init-from MODEL",
    "finetune": "train DATA --init-from MODEL",
    "fit": "train",
    "infer": "predict",
    "inference": "predict",
    "resume": "train --resume RUN",
    "test": "evaluate",
    "val": "evaluate",
    "validate": "evaluate",
    "visualize": "explain",
}
# modules of the packages in pyproject.toml
DEPENDENCIES = {
    "filelock", "matplotlib", "numpy", "PIL", "platformdirs", "rich", "safetensors", "sklearn", "tomli_w", "torch",
    "torchinfo",
}  # fmt: skip
COMMANDS = tuple(name for commands in COMMAND_GROUPS.values() for name, _, _ in commands)


def load_command(name: str) -> Any:
    """The Command or CommandGroup of a name in COMMANDS."""
    return import_module(f"vitral.cli.commands.{name}").COMMAND


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Returns after printing help or the version; otherwise raises SystemExit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape what the terminal's encoding or Unicode cannot represent
        sys.stdout.reconfigure(errors="backslashreplace")
    if os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0") != "0":
        silence_output()
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return
    if words[0] in ("-V", "--version"):
        print(f"vitral {__version__}")
        return
    try:
        sys.exit(run_command(words))
    except VitralError as error:
        exit_with_error(error)
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output (head, less) has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise  # not about a file: a bug
        exit_with_error(
            VitralError(
                f"{error.filename or 'disk'}: {error.strerror}",
                "Check the path, its permissions and the free disk space",
            )
        )
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in DEPENDENCIES:
            hint = "Install vitral without --no-deps; without its dependencies, only exported .onnx models can be used"
            exit_with_error(VitralError(f"vitral {words[0]} requires {error.name}", hint))
        report_to_torchrun(traceback.format_exc())
        raise


def run_command(words: Sequence[str]) -> int:
    """Run `words[0]` with the other words and return its exit status."""
    if words[0] not in COMMANDS:
        command = COMMANDS_ELSEWHERE.get(words[0])
        suggestion = f". Did you mean '{command}'?" if command else did_you_mean(words[0], COMMANDS)
        raise VitralError(f"no command '{words[0]}'{suggestion}", f"Commands: {', '.join(COMMANDS)}")
    if any(re.fullmatch(r"(--[\w.-]+=)?", word) for word in words):
        raise VitralError("an argument is empty", "Check whether a shell variable in the command is unset")
    keep_freed_memory()
    atexit.register(skip_garbage_search)
    return int(load_command(words[0])(words[1:]))


def skip_garbage_search() -> None:
    """At exit, searching the objects of torch for garbage takes 0.13 s. Triton reports those that are not freed."""
    if "triton._C.libtriton" not in sys.modules:
        gc.freeze()


def help_text() -> str:
    from vitral.cli.help import main_help

    footer = (
        "DATA is a folder with one subfolder per class, a CSV file, or a built-in dataset (vitral data).\n"
        "MODEL is a run folder (runs/...), a checkpoint file, hf:owner/name, or a bundled model:\n"
        f"{', '.join(bundled.model_names())}."
    )
    return main_help(__version__, COMMAND_GROUPS, footer)


def exit_with_error(error: VitralError) -> NoReturn:
    """Print what is wrong and what to do; exit with 2, or with 130 after an interruption."""
    report_to_torchrun(error.what)
    interrupted = isinstance(error, Interrupted)
    print(one_line(error.what) if interrupted else f"error: {one_line(error.what)}", file=sys.stderr)
    for line in error.hint.split("\n") if error.hint else ():
        print(one_line(line) if interrupted else f"       {one_line(line)}", file=sys.stderr)
    sys.exit(130 if interrupted else 2)


def silence_output() -> None:
    """Print nothing in ranks other than 0. torchrun reports the error of a rank that fails."""
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        sys.stderr = sys.stdout


def report_to_torchrun(message: str) -> None:
    """Write the error to the file that torchrun reads, so that its summary shows the cause."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        report = {"message": {"message": message, "extraInfo": extra}}
        with suppress(OSError):
            Path(file).write_text(dump_json(report), encoding="utf-8")
