"""The documentation site builds without warnings and loads nothing from the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOADING_ATTRIBUTES = {
    ("audio", "src"), ("embed", "src"), ("iframe", "src"), ("img", "src"), ("img", "srcset"), ("link", "href"),
    ("object", "data"), ("script", "src"), ("source", "src"), ("source", "srcset"), ("use", "href"), ("video", "src"),
}  # fmt: skip
NETWORK = re.compile(r"\s*(https?:)?//")
UNLOADED_RELATIONS = {"canonical", "next", "prev"}


class LoadedFiles(HTMLParser):
    """Collects the addresses that a browser loads with a page, as opposed to links that a reader may follow."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") in UNLOADED_RELATIONS:
            return
        self.addresses += [value for name, value in attrs if (tag, name) in LOADING_ATTRIBUTES and value]
        self.addresses += re.findall(r"url\(['\"]?([^)'\"]+)", values.get("style") or "")


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does."""
    (flags,) = re.findall(r"mkdocs build(.*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", *flags.split(), "-f", str(config), "--site-dir", str(site)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("link", "works"), [("#page", True), ("#no-such-heading", False), ("none.md", False)])
def test_a_broken_link_fails_the_build(tmp_path: Path, link: str, works: bool) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n[link]({link})\n", encoding="utf-8")
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nhooks: []\nnav: [index.md]\n", encoding="utf-8")
    done = build(config, tmp_path / "site")
    assert (done.returncode == 0) is works, done.stdout + done.stderr


@pytest.mark.slow
def test_the_site_has_a_page_per_document(site: Path) -> None:
    documents = [path for path in (ROOT / "docs").rglob("*.md") if path.parts[-2] not in ("deploy", "scaling")]
    assert len(documents) >= 20
    for document in documents:
        assert (site / document.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), document


@pytest.mark.slow
def test_the_reference_shows_the_fields_of_results_with_their_comments(site: Path) -> None:
    text = (site / "reference" / "python.html").read_text(encoding="utf-8")
    assert "softmax(logits / temperature)" in text  # EvaluationReport.calibrated
    assert "95% Wilson interval" in text  # of its base, Metrics
    assert "confusion&#91;true]" in text  # brackets that are not a link


@pytest.mark.slow
def test_the_reference_shows_the_choices_of_a_flag_as_they_are_typed(site: Path) -> None:
    assert "<code>--device auto|cpu|gpu|cuda</code>" in (site / "reference" / "cli.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_pages_load_nothing_from_the_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    for page in pages:
        parser = LoadedFiles()
        text = page.read_text(encoding="utf-8")
        parser.feed(text)
        assert parser.addresses
        assert 'class="mermaid"' not in text  # the theme would load a script for it
        assert [address for address in parser.addresses if NETWORK.match(address)] == [], page


@pytest.mark.slow
def test_styles_load_nothing_from_the_network(site: Path) -> None:
    for style in site.rglob("*.css"):
        loaded = re.findall(r"(?:url\(|@import\s*)['\"]?([^)'\"]+)", style.read_text(encoding="utf-8"))
        assert [address for address in loaded if NETWORK.match(address)] == [], style


def test_links_and_loaded_files_are_distinguished() -> None:
    parser = LoadedFiles()
    parser.feed('<a href="https://a.org">a</a><img src="b.png"><link rel="canonical" href="https://c.org">')
    parser.feed('<script src="//d.org/d.js"></script><p style="background: url(https://e.org/e.png)">')
    assert parser.addresses == ["b.png", "//d.org/d.js", "https://e.org/e.png"]
