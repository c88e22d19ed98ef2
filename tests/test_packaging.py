"""A wheel, installed into an environment that has nothing else, trains a ViT."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from PIL import Image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", out, ROOT], check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_the_package_and_its_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    inside = [path for path in (ROOT / "src/vitral").rglob("*.*") if path.is_file() and path.suffix != ".pyc"]
    sources = {str(path.relative_to(ROOT / "src")) for path in inside}
    assert sources <= set(names)
    assert "vitral/py.typed" in names
    assert "vitral/bundled/mnist/model/weights.safetensors" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_in_a_clean_environment_runs_the_demo(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    # Most modules are never imported: Python compiles the others when it needs them.
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", wheel], check=True, timeout=600)
    vitral = tmp_path / "env" / "bin" / "vitral"
    Image.new("L", (28, 28)).save(tmp_path / "black.png")
    command: list[str | Path] = [vitral, "predict", "mnist", "black.png"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("black.png"), done.stderr
    done = subprocess.run([vitral, "demo"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Test accuracy" in done.stdout
    assert "with the bundled model mnist" in done.stdout
    assert len(list(tmp_path.glob("runs/*/figures/attention.png"))) == 1
