"""What commands say beside their answers, on stderr: how a checkpoint was understood, and what is going on."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitral.predict import Predictor


def opened(source: Any, **how: Any) -> "Predictor":
    """The model; where it is another library's checkpoint, how that was understood, before it is used."""
    from vitral.predict import Predictor

    predictor = Predictor.load(source, **how)
    understood(predictor.notes)
    return predictor


def understood_source(source: str) -> None:
    """The same for a checkpoint that is used further down, and read there; one that cannot be read stops here."""
    from vitral import weights

    checkpoint = weights.read(source)
    understood(checkpoint.notes if checkpoint.family != "vitral" else ())


def understood(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"  {note}", file=sys.stderr)


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """One line that says what is going on, and is gone afterwards; nothing where no person looks on."""
    from rich.console import Console

    with Console(stderr=True, highlight=False).status("reading") as line:
        yield line.update
