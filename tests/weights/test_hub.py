"""hf:owner/name, against a cache made by hand: no test reaches the hub."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from support.processes import Process
from support.references import as_checkpoint, randomize_weights
from vitral import weights
from vitral.errors import VitralError
from vitral.models.vit import ViT, ViTConfig

COMMIT = "0123456789abcdef0123456789abcdef01234567"
READ = """
import sys
from vitral import weights
from vitral.errors import VitralError
for source in sys.argv[1:]:
    try:
        print(*weights.read(source).notes, sep="\\n")
    except VitralError as error:
        print("ERROR", error)
"""


def asked(*sources: str, **environment: str) -> str:
    """What reading these says, in a process with this environment: huggingface_hub reads it when imported."""
    script = Path(environment["HF_HOME"]) / "read.py"
    script.write_text(READ)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE"))}
    process = Process(*sources, script=script, environment=clean | environment)
    said, complaint = process.communicate(120)
    assert process.returncode == 0, complaint
    return said.strip()


def cached(home: Path) -> None:
    """A model as huggingface_hub keeps it."""
    repository = home / "hub" / "models--someone--small-vit"
    snapshot = repository / "snapshots" / COMMIT
    sizes = {"image_size": (32, 32), "patch_size": 8, "width": 48, "depth": 2, "heads": 4, "classes": 7}
    weights.write(as_checkpoint(randomize_weights(ViT(ViTConfig(**sizes)))), snapshot, to="transformers")
    (repository / "refs").mkdir()
    for reference in ("main", "v1"):
        (repository / "refs" / reference).write_text(COMMIT)


def test_a_model_in_the_cache_is_read_offline_at_any_revision(tmp_path: Path) -> None:
    cached(tmp_path)
    said = asked("hf:someone/small-vit", "hf:someone/small-vit@v1", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert said.count("transformers: patches of 8") == 2
    assert said.count("heads: 4, from config.json") == 2


def test_offline_without_the_model_is_two_lines(tmp_path: Path) -> None:
    said = asked("hf:someone/absent", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1").splitlines()
    assert said[0] == "ERROR hf:someone/absent: not in the cache, and the hub was not reached"
    assert "no network?" in said[1]
    assert len(said) == 2


def test_a_hub_that_nobody_reaches_is_two_lines(tmp_path: Path) -> None:
    said = asked("hf:someone/absent", HF_HOME=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9").splitlines()
    assert said[0] == "ERROR hf:someone/absent: not in the cache, and the hub was not reached"
    assert "no network?" in said[1]
    assert len(said) == 2


def test_without_huggingface_hub_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(VitralError, match="needs huggingface_hub") as error:
        weights.read("hf:someone/small-vit")
    assert error.value.hint == "pip install 'vitral[hub]'"


@pytest.mark.parametrize("source", ["hf:", "hf:name", "hf:a/b/c", "hf:../x"])
def test_a_name_that_cannot_be_one_is_refused(source: str) -> None:
    with pytest.raises(VitralError, match="hf:"):
        weights.read(source)
