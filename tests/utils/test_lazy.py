"""Modules that are imported in advance, in another thread."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vitral.utils.lazy import import_meanwhile


def test_a_module_is_imported_when_the_context_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(0.2)\nvalue = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    with import_meanwhile("slow_module"):
        pass
    assert sys.modules.pop("slow_module").value == 3


def test_a_module_that_cannot_be_imported_is_ignored() -> None:
    with import_meanwhile("vitral.no_such_module"):
        pass


def test_an_error_does_not_wait_for_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless_module.py").write_text("import threading\nthreading.Event().wait(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="no images"), import_meanwhile("endless_module"):
        raise ValueError("no images")
