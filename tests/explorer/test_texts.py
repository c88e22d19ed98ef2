"""The page's texts: both languages complete, with the same placeholders."""

from __future__ import annotations

import re

import pytest

from vitral.explorer.write import SITE_DIR

ENTRY = re.compile(r'^  "?([\w-]+)"?: "((?:[^"\\]|\\.)*)",$', re.MULTILINE)
# Particles with two forms: the right one depends on the word before, which a placeholder does not tell.
PARTICLE = re.compile(r"\}(은|는|이|가|을|를|과|와|로|으로|이다|이라)(?![가-힣])")


def texts(language: str) -> dict[str, str]:
    return dict(ENTRY.findall((SITE_DIR / "ui" / f"texts_{language}.js").read_text(encoding="utf-8")))


def test_both_languages_have_the_same_texts():
    english, korean = texts("en"), texts("ko")
    assert len(english) > 200
    assert english.keys() == korean.keys()
    for key, text in english.items():
        assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", korean[key])), key


@pytest.mark.parametrize("language", ["en", "ko"])
def test_every_text_is_on_its_own_line(language):
    content = (SITE_DIR / "ui" / f"texts_{language}.js").read_text(encoding="utf-8")
    lines = [line for line in content.splitlines() if line.startswith("  ")]
    assert len(lines) == len(texts(language))


def test_no_korean_particle_follows_a_placeholder():
    assert [text for text in texts("ko").values() if PARTICLE.search(text)] == []


def test_every_named_text_exists():
    english = texts("en")
    sources = [path.read_text(encoding="utf-8") for path in (SITE_DIR / "ui").glob("*.js")]
    page = (SITE_DIR / "index.html").read_text(encoding="utf-8")
    named = {key for source in sources for key in re.findall(r'(?<![\w.])t\("([\w-]+)"', source)}
    named |= set(re.findall(r'data-i18n(?:-label)?="([\w-]+)"', page))
    assert len(named) > 100
    assert named <= english.keys()
