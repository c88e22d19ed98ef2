"""JSON files in the cache that carry a checksum of their content, so that damage is detected when they are read."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitral.utils.atomic import atomic_write
from vitral.utils.json_toml import dump_json, read_json_object

CHECKSUM = "checksum"  # the key that is added to the content


def write_checked_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with its checksum. Creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, dump_json({**content, CHECKSUM: _checksum(content)}))


def read_checked_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises OSError if it cannot be read and ValueError if it is damaged."""
    content = read_json_object(path)
    if content.pop(CHECKSUM, None) != _checksum(content):
        raise ValueError("wrong checksum")
    return content


def read_cached_json(path: Path) -> dict[str, Any] | None:
    """Read a file that can be computed again; None if it does not exist. A damaged file is reported and deleted."""
    try:
        return read_checked_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        warn_rebuilt(path, error)
        with suppress(OSError):  # of a read-only cache
            path.unlink(missing_ok=True)
        return None


def warn_rebuilt(path: Path, reason: object) -> None:
    print(f"warning: damaged cache file {path} ({reason}); it is written again", file=sys.stderr)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(dump_json(content, sort_keys=True).encode()).hexdigest()[:32]
