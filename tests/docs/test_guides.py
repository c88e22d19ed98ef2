"""Every command and code block of the tutorial and the how-to guides runs, with fewer epochs and smaller models."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from support.common import skip_figures
from vitral.cli import main as cli
from vitral.evaluation.data import EvalTarget
from vitral.evaluation.report import EvaluationReport
from vitral.reporting.figures.images import save_image
from vitral.reporting.run_report import example_name
from vitral.runs.run import Run

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "how-to").glob("*.md"))]
BLOCK = re.compile(r"(?P<marker><!-- test: [^\n]* -->\n)?```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL)
SMALL_MODEL = ["--model.width", "32", "--model.depth", "2", "--model.heads", "2"]  # for training from scratch
FASTER = {
    "distill": ["--epochs", "1", "--batch-size", "4", *SMALL_MODEL],
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
    if "--resume" in words:
        return words
    if words[0] == "probe" and "--against" in words:
        return [*words, "--seeds", "1", "--epochs", "1", "--fractions", "1"]
    from_scratch = words[0] == "train" and not {"--init-from", "--preset"} & set(words)
    return [*words, *FASTER.get(words[0], []), *(SMALL_MODEL if from_scratch else [])]


def run_shell_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a vitral command in this process; `> FILE` redirects its output."""
    line, _, out = line.partition(" > ")
    words = shlex.split(line)
    assert words[0] == "vitral", f"{line!r} is not a vitral command; mark the block as skipped"
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main(faster(words[1:]))
    printed = capsys.readouterr()
    assert not stop.value.code, f"{line}\n{printed.err}"
    if out:
        Path(out).write_text(printed.out, encoding="utf-8")


def write_example(run: Run, target: EvalTarget, evaluation: EvaluationReport, logits: Tensor) -> None:
    """The one figure of a run that the pages use as an input; a test of the README draws all of them."""
    name = example_name(target.predictor.model_config.preprocessing)
    save_image(target.split.images[0], run.figure_dir / name)


@pytest.mark.slow  # the README tests cover the most important commands in less time
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
    monkeypatch.setattr("vitral.doctor.estimates.BENCHMARK_SECONDS", 0.0)
    skip_figures(monkeypatch)
    monkeypatch.setattr("vitral.reporting.run_report.write_figures", write_example)
    for block in blocks_of(page):
        if block.skipped:
            continue
        if block.language == "python":
            exec(compile(block.text, page.name, "exec"), {})
            continue
        assert block.language == "sh", f"{page.name}: {block.language} blocks cannot be tested"
        for line in block.commands():
            run_shell_line(line, capsys)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_has_a_block_that_runs(page: Path) -> None:
    assert any(not block.skipped for block in blocks_of(page)) or page.stem in ("scale-out", "serve")
