"""The known sets, and packing one's own."""

import time
from dataclasses import dataclass
from pathlib import Path

from vitral.cli.messages import understood_source
from vitral.cli.parsing import parse
from vitral.errors import VitralError, nearest, typed

ACTIONS = {"list": "nothing more", "fetch": "names of known sets", "where": "one name", "pack": "a folder"}


def run(words: list[str]) -> int:
    from vitral import data

    action, names = (words or ["list"])[0], words[1:]
    if action == "pack" and names:
        return pack(names)
    if action == "list" and not names:
        for entry in data.catalogue():
            state = (
                "no files needed"
                if entry.paths == []
                else "in the cache"
                if entry.cached
                else f"{entry.size / 1e6:.0f} MB to fetch"
            )
            print(f"{entry.name:<15}{entry.description}  ({state})")
    elif action == "fetch" and names:
        for name in names:
            found = data.fetch(name, progress=True)
            print(f"{name}: {found.source}")
    elif action == "where" and len(names) == 1:
        paths = data.where(names[0])
        if paths is None:
            raise VitralError(f"{names[0]} is not on this machine", f"vitral data fetch {names[0]}")
        print("\n".join(map(str, paths)) or f"{names[0]} comes with scikit-learn and needs no files")
    elif {"-h", "--help"} & set(words):
        print("usage: vitral data list                the known sets, and which are here")
        print("       vitral data fetch NAME …        get them now")
        print("       vitral data where NAME          the files of one")
        print("       vitral data pack FOLDER …       decode photographs once, to be read at memory speed")
    elif action in ACTIONS:
        raise VitralError(f"vitral data {action} takes {ACTIONS[action]}", "vitral data --help says more")
    else:
        raise VitralError(
            f"vitral data has no use for {action!r}.{nearest(action, ACTIONS)}", f"Known: {', '.join(ACTIONS)}"
        )
    return 0


def pack(words: list[str]) -> int:
    from tyro.conf import Positional

    @dataclass(frozen=True)
    class Pack:
        """Decode photographs once, as large as a training needs them; later epochs read them at memory speed.

        vitral train does this by itself where there is room. With --out the pack can be carried elsewhere and trained
        on without the photographs: vitral train PACK"""

        folder: Positional[str]  # a folder with class folders, a CSV list, or WebDataset shards
        out: Path | None = None  # the folder to make; default: in the cache, where training looks for it
        recipe: str | None = None  # the recipe it is for: a name or a TOML file; default: the one training would take
        init: str | None = None  # the checkpoint it is for: its image size is taken
        image_size: tuple[int, int] | None = None  # of the model, in pixels; default: the recipe's
        workers: int = 0  # processes that decode; 0: one a core
        unreadable: float | None = None  # share of broken files above which it stops; default: the recipe's

    chosen = parse(Pack, words, "data pack")
    from vitral.training import setup as plan

    asked = {
        "model.image_size": chosen.image_size,
        "data.unreadable": chosen.unreadable,
        "data.workers": chosen.workers,
    }
    changes = {name: value for name, value in asked.items() if value is not None}
    if chosen.init is not None:
        understood_source(chosen.init)
    recipe = plan.plan_for(chosen.folder, chosen.recipe, chosen.init).changed(changes)
    start = time.perf_counter()
    folder, packed = plan.pack(recipe, chosen.out, progress=True)
    seconds = time.perf_counter() - start
    splits = {"train": packed.train, "validation": packed.validation, "test": packed.test}
    counts = " · ".join(f"{len(split):,} {name}" for name, split in splits.items() if len(split))
    size = sum(file.stat().st_size for file in folder.glob("*.npy"))
    height, width = packed.train.images.shape[2:]
    print(f"{counts}, {height}×{width} pixels, {len(packed.classes):,} classes, {packed.source}")
    print(f"{folder}  {size / 2**20:,.0f} MiB in {seconds:.1f} s")
    shown = folder if chosen.out else chosen.folder
    print(f"Next:  vitral train {typed(shown)}" + (f" --init {typed(chosen.init)}" if chosen.init else ""))
    return 0
