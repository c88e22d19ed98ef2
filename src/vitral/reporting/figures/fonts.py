"""Letters that matplotlib's own font lacks, Korean class names say: drawn with a font of this machine that has them."""

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


def make_legible(figure: Figure) -> None:
    for axes in figure.axes:  # labels of ticks get their text when somebody asks
        axes.get_xticklabels(), axes.get_yticklabels()
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        letters = frozenset(letter for letter in text.get_text() if ord(letter) > 0x7F and letter.isprintable())
        if letters and (families := families_for(letters)):
            text.set_fontfamily([*text.get_fontfamily(), *families])


@contextmanager
def quietly() -> Iterator[None]:
    """No word about a script that no font here has, nor about a font that has no bold face."""
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
def families_for(letters: frozenset[str]) -> tuple[str, ...]:
    """The fonts to add, none where matplotlib's own is enough. The system is asked: matplotlib's list may be older."""
    left = letters - letters_in(font_manager.findfont(FontProperties()), letters)
    families: list[str] = []
    paths = sorted(font_manager.findSystemFonts(), key=plainness) if left else []
    for path in paths:
        if found := letters_in(path, left):
            alike = Path(path).stem.split("-")[0]
            for face in (path, *(other for other in paths if other != path and Path(other).stem.startswith(alike))):
                font_manager.fontManager.addfont(face)  # the bold one too
            families.append(font_manager.get_font(path).family_name)
            left -= found
        if not left:
            break
    return tuple(families)


def letters_in(path: str, letters: frozenset[str]) -> frozenset[str]:
    try:
        font = font_manager.get_font(path)
    except (OSError, RuntimeError):  # a broken file, or a kind of font that matplotlib does not read
        return frozenset()
    return frozenset(letter for letter in letters if font.get_char_index(ord(letter)))


def plainness(path: str) -> tuple[bool, bool, str]:
    """Upright, neither bold nor coloured, without serifs: such fonts first."""
    name = Path(path).stem.lower()
    fancy = any(word in name for word in ("bold", "black", "thin", "italic", "oblique", "mono", "emoji", "lastresort"))
    return fancy, not ("sans" in name or "gothic" in name), path
