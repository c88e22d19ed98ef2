"""Checkpoints from one library to another."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vitral.cli.parsing import a_model, parse


def run(words: list[str]) -> int:
    from tyro.conf import Positional, arg

    @dataclass(frozen=True)
    class Convert:
        """Write a checkpoint of one library as another's, and prove that nothing was lost."""

        source: Annotated[Positional[str], arg(help=a_model("a file, a folder, a run, or hf:owner/name[@revision]"))]
        destination: Positional[Path]  # a file or folder to make
        to: Literal["vitral", "timm", "transformers", "torchvision", "npz", "vit-pytorch"] = "vitral"
        heads: int | None = None  # where the tensors do not tell
        image_size: tuple[int, int] | None = None  # likewise

    chosen = parse(Convert, words, "convert")
    from vitral import weights

    for note in weights.convert(
        chosen.source, chosen.destination, to=chosen.to, heads=chosen.heads, image_size=chosen.image_size
    ):
        print(note)
    print(f"{chosen.destination}: written for {chosen.to}")
    return 0
