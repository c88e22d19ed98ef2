"""The texts of the walk, from en.toml and ko.toml."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any, Literal, get_args

Lang = Literal["en", "ko"]


def _load(lang: str) -> dict[str, Any]:
    return tomllib.loads((files("vitral.reporting.walk") / f"{lang}.toml").read_text(encoding="utf-8"))


_FILES = {lang: _load(lang) for lang in get_args(Lang)}
STEP_TEXTS: dict[str, dict[str, dict[str, str]]] = {lang: content["steps"] for lang, content in _FILES.items()}
CAPTIONS: dict[str, dict[str, str]] = {lang: content["captions"] for lang, content in _FILES.items()}
PAGE_TEXTS: dict[str, dict[str, str]] = {lang: content["page"] for lang, content in _FILES.items()}
