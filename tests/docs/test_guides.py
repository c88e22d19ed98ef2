"""Every command and code block of the tutorial and the how-to guides runs, with fewer epochs and smaller images."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from vitral.cli import main as cli

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "how-to").glob("*.md"))]
BLOCK = re.compile(r"(?P<marker><!-- test: [^\n]* -->\n)?```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL)
FASTER = {
    "train": ["--epochs", "1"],
    "bench": ["--seconds", "0.01", "--batch-sizes", "1", "--threads", "1", "--images", "64"],
}


@dataclass(frozen=True, kw_only=True)
class Block:
    language: str
    text: str
    skipped: bool

    def commands(self) -> list[str]:
        """The commands of a shell block, without comments and line continuations."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.split("  #")[0].strip() for line in lines if line.strip()]


def blocks_of(page: Path) -> list[Block]:
    return [
        Block(language=match["language"], text=match["text"], skipped=bool(match["marker"]))
        for match in BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def faster(words: list[str]) -> list[str]:
    """The same command on a scale for tests: later flags override earlier ones."""
    return words if "--resume" in words else [*words, *FASTER.get(words[0], [])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_the_page_runs(
    page: Path,
    reader_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(reader_folder, tmp_path / "reader")
    monkeypatch.chdir(tmp_path / "reader")
    monkeypatch.setattr("vitral.doctor.advice.BENCHMARK_SECONDS", 0.0)
    for block in blocks_of(page):
        if block.skipped:
            continue
        if block.language == "python":
            exec(compile(block.text, page.name, "exec"), {})
            continue
        assert block.language == "sh", (
            f"{page.name}: {block.language} blocks cannot be tested"
        )
        for command in block.commands():
            words = shlex.split(command)
            assert words[0] == "vitral", f"{page.name}: {command!r} is not a vitral command; mark the block as skipped"
            with pytest.raises(SystemExit) as stop:
                cli.main(faster(words[1:]))
            assert not stop.value.code, f"{page.name}: {command}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_has_blocks_that_run(page: Path) -> None:
    assert any(not block.skipped for block in blocks_of(page)) or page.stem in ("serve", "scale-out")
