"""What commands say beside their answers, on stderr: how a checkpoint was understood, and what is going on."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitral.inference.predictor import Predictor


def opened(source: Any, **how: Any) -> "Predictor":
    """The model; where it is another library's checkpoint, how that was understood, before it is used."""
    from vitral.inference.predictor import Predictor

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


def to_be_fetched(*names: str | None) -> None:
    """Of the sets that are about to be read, those that have to come over the network first."""
    from vitral import data
    from vitral.data.files.listing import looks_like_files

    sizes = {entry.name: entry.size for entry in data.catalogue() if not entry.cached}
    wanted = {name for name in names if name in sizes and not looks_like_files(name)}
    understood(f"fetching {name}: {sizes[name] / 1e6:.0f} MB, once" for name in sorted(wanted))


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """One line that says what is going on, and is gone afterwards; nothing where no person looks on."""
    from rich.console import Console

    with Console(stderr=True, highlight=False).status("reading") as line:
        yield line.update
