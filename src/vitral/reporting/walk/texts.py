"""What the walk says, in English and in Korean: read from walk_en.toml and walk_ko.toml beside this file."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any, Literal, get_args

Lang = Literal["en", "ko"]


def _read(lang: str) -> dict[str, Any]:
    return tomllib.loads((files("vitral.reporting.walk") / f"{lang}.toml").read_text(encoding="utf-8"))


_READ = {lang: _read(lang) for lang in get_args(Lang)}
TEXTS: dict[str, dict[str, dict[str, str]]] = {lang: read["steps"] for lang, read in _READ.items()}
CAPTIONS: dict[str, dict[str, str]] = {lang: read["captions"] for lang, read in _READ.items()}
PAGE: dict[str, dict[str, str]] = {lang: read["page"] for lang, read in _READ.items()}  # words around the steps
