"""Fixtures of trainings on two ranks, which each module runs once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.rank_jobs import SingleProcess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent of the run folders of all jobs."""
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def single_process(tmp_path_factory: pytest.TempPathFactory) -> SingleProcess:
    """The same trainings in one process."""
    from support.rank_jobs import SingleProcess  # skips a module without Triton, which must not happen here

    return SingleProcess(tmp_path_factory.mktemp("single"))
