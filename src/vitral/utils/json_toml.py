"""JSON and TOML in and out, with bounds. What is written is strict JSON, which has no NaN and no infinity.

Files may be damaged or written by somebody else. Whatever is wrong with their content is a ValueError: not UTF-8, not
JSON, nested too deeply, a number that no 64-bit integer holds, or too large to read.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_DEPTH = 100  # of nested lists and objects; functions that recurse over a parsed value stay far below Python's limit
MAX_DIGITS = 19  # of an integer: 64 bits
MAX_FILE_BYTES = 256 * 2**20
MAX_TOML_BYTES = 2**20  # of files that people write; tomllib is slow


def dump_json(value: Any, **options: Any) -> str:
    """Strict JSON. NaN and infinite values become null. `options` are those of `json.dumps`."""
    return json.dumps(_with_nulls(value), allow_nan=False, **options)


def _with_nulls(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _with_nulls(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(item) for item in value]
    return value


def parse_json(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text. NaN and Infinity, which older versions of vitral wrote, are accepted."""
    try:
        value = json.loads(text, parse_int=_parse_int)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    if any(line.partition("=")[0].count(".") > MAX_DEPTH for line in text.splitlines()):
        raise _too_deep()  # a dotted key; tomllib takes quadratic time for it
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python does not convert thousands of digits
        raise _too_long() from None
    _check_depth(values)
    return values


def read_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """The content of a file of at most `max_bytes`, by default `MAX_FILE_BYTES`."""
    max_bytes = MAX_FILE_BYTES if max_bytes is None else max_bytes
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"larger than {max_bytes // 2**20} MiB")
    return content


def read_text(path: Path) -> str:
    """The content of a UTF-8 file of at most `MAX_FILE_BYTES`."""
    return read_bytes(path).decode()


def read_json(path: Path) -> Any:
    return parse_json(read_text(path))


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object, for texts that are described by their field names."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    return parse_json_object(read_text(path))


def read_toml(path: Path) -> dict[str, Any]:
    return parse_toml(read_bytes(path, MAX_TOML_BYTES).decode())


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS + 1:  # and a sign
        raise _too_long()
    return int(digits)


def _check_depth(value: Any) -> None:
    """Raise ValueError for containers that are nested too deeply, and for long integers, which TOML allows."""
    items = [value]
    for _ in range(MAX_DEPTH + 1):
        if any(isinstance(item, int) and abs(item) >= 10**MAX_DIGITS for item in items):
            raise _too_long()
        containers = [item.values() if isinstance(item, dict) else item for item in items if _is_container(item)]
        if not containers:
            return
        items = [item for container in containers for item in container]
    raise _too_deep()


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list)


def _too_deep() -> ValueError:
    return ValueError(f"nested more than {MAX_DEPTH} levels deep")


def _too_long() -> ValueError:
    return ValueError(f"a number has more than {MAX_DIGITS} digits")
