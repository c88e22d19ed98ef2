"""A model handed on to others."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vitral.cli.messages import understood
from vitral.cli.parsing import a_model, parse


def run(words: list[str]) -> int:
    from tyro.conf import FlagCreatePairsOff, Positional, arg

    @dataclass(frozen=True)
    class Push:
        """Put a model on the Hugging Face hub, with a card of what was measured, as timm and transformers load it.

        Where they cannot express the model, it is written for vitral alone, and the reason is told."""

        run: Annotated[Positional[str], arg(help=a_model())]
        destination: Positional[str]  # hf:owner/name
        heads: int | None = None  # of a checkpoint whose tensors do not tell
        folder: Path | None = None  # write the files there and keep them; default: a temporary folder
        dry_run: FlagCreatePairsOff[bool] = False  # write and check everything, upload nothing
        private: FlagCreatePairsOff[bool] = False  # for a repository that does not exist yet
        license: str | None = None  # for the card: apache-2.0, mit, cc-by-4.0 …

    chosen = parse(Push, words, "push")
    from vitral.reporting.hub.publish import push

    pushed = push(
        chosen.run,
        chosen.destination,
        heads=chosen.heads,
        folder=chosen.folder,
        dry_run=chosen.dry_run,
        private=chosen.private,
        license=chosen.license,
        understood=understood,
    )
    for note in pushed.notes:
        print(note)
    for name, size in pushed.files:
        print(f"  {name:<24}{size:>14,} bytes")
    where = f" ({chosen.folder})" if chosen.folder else ""
    print(f"loaded by {', '.join(pushed.loaded_by)}" + (f"; nothing was uploaded{where}" if chosen.dry_run else ""))
    if pushed.address:
        print(pushed.address)
    return 0
