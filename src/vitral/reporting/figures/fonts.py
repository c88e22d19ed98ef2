"""Fallback fonts for characters that matplotlib's default font lacks, such as Korean class names."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text

UNUSUAL_STYLES = ("bold", "black", "thin", "italic", "oblique", "mono", "emoji", "lastresort")


def add_fallback_fonts(figure: Figure) -> None:
    for axes in figure.axes:  # tick labels are created on access
        axes.get_xticklabels(), axes.get_yticklabels()
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        characters = frozenset(c for c in text.get_text() if ord(c) > 0x7F and c.isprintable())
        if characters and (families := fallback_families(characters)):
            text.set_fontfamily([*text.get_fontfamily(), *families])


@contextmanager
def suppress_font_warnings() -> Iterator[None]:
    """Silence warnings about glyphs that no installed font has and about fonts without a bold face."""
    log = logging.getLogger("matplotlib.font_manager")
    level = log.level
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)


@cache
def fallback_families(characters: frozenset[str]) -> tuple[str, ...]:
    """Font families that provide the characters missing from the default font.

    Searches the system's fonts rather than matplotlib's list, which is cached and may be outdated.
    """
    missing = characters - supported_characters(font_manager.findfont(FontProperties()), characters)
    families: list[str] = []
    paths = sorted(font_manager.findSystemFonts(), key=font_preference) if missing else []
    for path in paths:
        if supported := supported_characters(path, missing):
            prefix = Path(path).stem.split("-")[0]
            for face in (path, *(other for other in paths if other != path and Path(other).stem.startswith(prefix))):
                font_manager.fontManager.addfont(face)  # also the bold face of the family
            families.append(font_manager.get_font(path).family_name)
            missing -= supported
        if not missing:
            break
    return tuple(families)


def supported_characters(path: str, characters: frozenset[str]) -> frozenset[str]:
    try:
        font = font_manager.get_font(path)
    except (OSError, RuntimeError):  # a damaged file, or a font format that matplotlib does not read
        return frozenset()
    return frozenset(c for c in characters if font.get_char_index(ord(c)))


def font_preference(path: str) -> tuple[bool, bool, str]:
    """Sort key: regular sans-serif fonts first."""
    name = Path(path).stem.lower()
    return any(style in name for style in UNUSUAL_STYLES), not ("sans" in name or "gothic" in name), path
