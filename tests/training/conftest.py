"""A small training run of the command line, and a copy of it that can be resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.common import skip_figures
from support.training import TRAIN_COMMAND, run_vitral
from vitral.runs.run import Run


@pytest.fixture(scope="session")
def reference_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of TRAIN_COMMAND, never interrupted."""
    path = tmp_path_factory.mktemp("reference") / "run"
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        run_vitral(*TRAIN_COMMAND, "--out", path)
    return Run.open(path)


@pytest.fixture
def unfinished_run(tmp_path: Path, reference_run: Run) -> Path:
    """A copy of the reference run as it was before its model was exported."""
    path = tmp_path / "unfinished"
    (path / "checkpoints").mkdir(parents=True)
    names = ["recipe.toml", "environment.json", "metrics.jsonl", "checkpoints/best.safetensors"]
    names += [f"checkpoints/{file.name}" for file in reference_run.checkpoint_dir.glob("step-*.pt")]
    for name in names:
        (path / name).write_bytes((reference_run.path / name).read_bytes())
    return path
