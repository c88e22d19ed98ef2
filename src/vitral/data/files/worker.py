"""A worker process: reads lines that name files, decodes them into rows of a shared buffer, answers what went wrong.

    python -m vitral.data.files.worker FD OFFSET N C H W INTERPOLATION QUICK

    ← {"rows": [7, 8], "sources": [["a.jpg", 0, -1], ["shard.tar", 1536, 20481]]}
    → {"troubles": {"8": "shard.tar: broken or truncated (…)"}}

It ends when its input does, so a training that is killed leaves none behind. It imports torch only for many
large pictures (QUICK), so that it starts at once.
"""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitral.data.decode import NotAnImage, decode
from vitral.data.files.remote import is_url, read_range
from vitral.data.resize_crop import pixels
from vitral.errors import VitralError


def read_source(where: str, offset: int, size: int) -> Path | bytes:
    """A file as it is; a part of a shard, here or elsewhere, as bytes."""
    if size < 0:
        return Path(where)
    if is_url(where):
        return read_range(where, offset, size)
    with Path(where).open("rb") as file:
        file.seek(offset)
        return file.read(size)


def fill(
    target: np.ndarray[Any, Any],
    rows: Sequence[int],
    sources: Sequence[tuple[str, int, int]],
    interpolation: str,
    quick: bool,
) -> dict[int, str]:
    """Decode each source into its row of `target`, N C H W; returns what was wrong, by row."""
    channels, *size = target.shape[1:]
    troubles: dict[int, str] = {}
    for row, (where, offset, length) in zip(rows, sources, strict=True):
        try:
            picture = decode(read_source(where, offset, length), at_least=(size[0], size[1]))
            target[row] = pixels(picture, (size[0], size[1]), channels, 1.0, interpolation, quick=quick)
        except NotAnImage as error:
            troubles[row] = error.what.replace("the image", f"{where} at byte {offset}")
        except VitralError as error:
            troubles[row] = error.what
        except OSError as error:
            troubles[row] = f"{where} at byte {offset}: {error.strerror or error}"
    return troubles


def main(words: Sequence[str]) -> None:
    fd, offset, *shape = map(int, words[:6])
    target = np.frombuffer(mmap.mmap(fd, 0), dtype=np.uint8, offset=offset).reshape(shape)
    for line in sys.stdin:
        task = json.loads(line)
        print(
            json.dumps({"troubles": fill(target, task["rows"], task["sources"], words[6], words[7] == "quick")}),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
