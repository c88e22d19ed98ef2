"""hf:owner/name with a prepared cache; no test connects to the hub."""

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
READ_SCRIPT = """
import sys
from vitral import weights
from vitral.errors import VitralError
for source in sys.argv[1:]:
    try:
        print(*weights.read(source).notes, sep="\\n")
    except VitralError as error:
        print("ERROR", error)
"""


def read_in_process(*sources: str, **environment: str) -> str:
    """Notes or error of each source, read in a new process, because huggingface_hub reads the environment on import."""
    script = Path(environment["HF_HOME"]) / "read.py"
    script.write_text(READ_SCRIPT)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE"))}
    process = Process(*sources, script=script, environment=inherited | environment)
    out, err = process.communicate(120)
    assert process.returncode == 0, err
    return out.strip()


def fill_cache(home: Path) -> None:
    """Write a model as huggingface_hub caches it."""
    repository = home / "hub" / "models--someone--small-vit"
    snapshot = repository / "snapshots" / COMMIT
    config = ViTConfig(image_size=(32, 32), patch_size=8, width=48, depth=2, heads=4, num_classes=7)
    weights.write(as_checkpoint(randomize_weights(ViT(config))), snapshot, to="transformers")
    (repository / "refs").mkdir()
    for reference in ("main", "v1"):
        (repository / "refs" / reference).write_text(COMMIT)


def test_cached_model_is_read_offline_at_any_revision(tmp_path: Path) -> None:
    fill_cache(tmp_path)
    notes = read_in_process(
        "hf:someone/small-vit", "hf:someone/small-vit@v1", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1"
    )
    assert notes.count("transformers: patch size 8") == 2
    assert notes.count("heads: 4, from config.json") == 2


def test_missing_model_offline_is_an_error_of_two_lines(tmp_path: Path) -> None:
    lines = read_in_process("hf:someone/absent", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1").splitlines()
    assert lines[0] == "ERROR hf:someone/absent: not in the cache, and the hub is unreachable"
    assert "Check the network connection" in lines[1]
    assert len(lines) == 2


def test_unreachable_hub_is_an_error_of_two_lines(tmp_path: Path) -> None:
    lines = read_in_process("hf:someone/absent", HF_HOME=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9").splitlines()
    assert lines[0] == "ERROR hf:someone/absent: not in the cache, and the hub is unreachable"
    assert "Check the network connection" in lines[1]
    assert len(lines) == 2


def test_missing_huggingface_hub_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(VitralError, match="requires huggingface_hub") as error:
        weights.read("hf:someone/small-vit")
    assert error.value.hint == "pip install 'vitral[hub]'"


@pytest.mark.parametrize("source", ["hf:", "hf:name", "hf:a/b/c", "hf:../x"])
def test_invalid_name_is_refused(source: str) -> None:
    with pytest.raises(VitralError, match="hf:"):
        weights.read(source)
