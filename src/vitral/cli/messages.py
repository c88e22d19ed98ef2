"""Notes on stderr next to a command's output, and help and error texts that several commands share."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitral import bundled
from vitral.cli.options import checkpoint_options
from vitral.errors import VitralError, shell_quote
from vitral.utils.progress import LogFn, progress_lines
from vitral.utils.wrapping import wrap_line

if TYPE_CHECKING:
    from vitral.inference.predictor import Predictor

BUNDLED = f"or a bundled model ({', '.join(bundled.model_names())})"
MODEL_HELP = f"run or model folder, checkpoint file, hf:owner/name, {BUNDLED}"
DATA_HELP = "folder with one subfolder per class, CSV file, WebDataset shards, or a built-in dataset"
EVAL_DATA_HELP = "dataset or folder with the model's classes (default: the dataset it was trained on)"
SPLIT_HELP = "default: test, or validation if there are no test images"
ENGINE_HELP = "inference engine; auto: selected by vitral bench, reference: plain PyTorch in fp32"
TOME_HELP = "merge this many tokens per block (ToMe): faster, less accurate; 8 to 13 are common"
LABELS_HELP = "text file with one class name per line, for a checkpoint without class names"
ALLOW_LEAK_HELP = "do not warn about evaluated images that were used for training"
JSON_HELP = "print JSON"


def load_model(source: Any, checkpoint: Mapping[str, Any], **arguments: Any) -> Predictor:
    """Load a model and print how a checkpoint of another library was interpreted.

    Args:
        source: Any model.
        checkpoint: The values of `checkpoint_flags`.
        arguments: Other arguments of `Predictor.load`.
    """
    from vitral.inference.predictor import Predictor

    predictor = Predictor.load(source, options=checkpoint_options(checkpoint), **arguments)
    print_notes(predictor.notes)
    return predictor


def print_checkpoint_notes(source: str) -> None:
    """Print how a checkpoint is interpreted, before an operation that reads it again. Unreadable files raise here."""
    from vitral import weights

    checkpoint = weights.read(source)
    print_notes(checkpoint.notes if checkpoint.format != "vitral" else ())


def print_notes(notes: Iterable[str]) -> None:
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else sys.maxsize
    for note in notes:
        print(wrap_line(f"  {note}", width, indent=4), file=sys.stderr)


def announce_downloads(*names: str | None) -> None:
    """Print which of these datasets have to be downloaded."""
    from vitral import data
    from vitral.data.names import is_file_dataset

    sizes = {entry.name: entry.size for entry in data.list_datasets() if not entry.is_cached}
    missing = {name for name in names if name in sizes and not is_file_dataset(name)}
    print_notes(f"downloading {name} ({sizes[name] / 1e6:.0f} MB on disk)" for name in sorted(missing))


def find_image_files(paths: Sequence[Path]) -> list[Path]:
    """List the images of files and folders, and print what was skipped in the folders."""
    from vitral.data.decode import SUPPORTED_FORMATS
    from vitral.data.files.walk import SkippedFiles, find_images

    skipped = SkippedFiles()
    files = find_images(paths, skipped.add)
    summary = skipped.summary()
    if not files:
        what = f"no images in {', '.join(map(str, paths))}"
        raise VitralError(f"{what}; {summary}" if summary else what, SUPPORTED_FORMATS)
    print_notes([summary] if summary else [])
    return files


class StatusLine:
    """A line that changes while a command runs, called with its new text, and lines that stay."""

    def __init__(self, update: LogFn, note: LogFn) -> None:
        self.update, self.note = update, note

    def __call__(self, message: str) -> None:
        self.update(message)


@contextmanager
def status_line(message: str = "Loading") -> Iterator[StatusLine]:
    """A status line on stderr that disappears at the end; if stderr is not a terminal, a line every 30 seconds."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        with progress_lines(message) as log:
            yield StatusLine(log, lambda text: print_notes([text]))
        return
    with console.status(message) as line:
        yield StatusLine(line.update, lambda text: console.print(f"  {text}", markup=False, soft_wrap=True))


def missing_images_error(command: str, argument: str) -> VitralError:
    """The error for a command with only one of its two arguments, a model and images."""
    from vitral.data.files.walk import IMAGE_SUFFIXES

    if Path(argument).suffix.lower() in IMAGE_SUFFIXES:
        return VitralError(
            f"no model given; {argument} is an image",
            f"For example: vitral {command} {bundled.model_names()[0]} {shell_quote(argument)}",
        )
    return VitralError("no images given", f"For example: vitral {command} {shell_quote(argument)} photo.jpg folder/")
