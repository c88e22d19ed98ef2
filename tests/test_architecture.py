"""Imports run one way, hardware is named in one file, and `import vitral` stays quick."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitral

SOURCE = Path(vitral.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# From the top down. A module may import from its own layer and from those below. A new file belongs in one of them.
LAYERS = [
    ["__init__", "__main__", "cli"],
    ["api", "api_train", "api_ship"],
    ["serve", "reporting"],
    ["training", "doctor", "explain", "export", "evaluation", "inference", "distributed"],
    ["kernels", "runs", "weights", "analysis", "recipes"],
    ["data", "bundled"],
    ["models", "device"],
    ["utils", "errors"],
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
UPWARD = {("vit", "presets")}  # ViT.from_preset, the one line that everybody wants to write


def module_of(file: Path) -> str:
    """vitral/data/loader.py → data.loader, vitral/data/__init__.py → data, vitral/__init__.py → __init__"""
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def modules_named(node: ast.AST) -> Iterator[str]:
    """The modules of ours that an import statement names, without the package's own name."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "vitral":
                yield alias.name.partition(".")[2] or "__init__"
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "a relative import: say vitral.… instead"
        if node.module == "vitral":
            yield from (alias.name for alias in node.names if alias.name != "__version__")
        elif node.module is not None and node.module.startswith("vitral."):
            yield node.module.removeprefix("vitral.")


def imports(file: Path) -> list[tuple[int, str]]:
    """Line and module of every import of ours, inside functions too."""
    tree = ast.parse(file.read_text())
    return [(node.lineno, name) for node in ast.walk(tree) if hasattr(node, "lineno") for name in modules_named(node)]


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_a_module_imports_from_its_own_layer_and_those_below(file: Path) -> None:
    room = module_of(file).split(".")[0]
    assert room in LEVEL, f"{room} stands in no layer: give it one in LAYERS"
    upward = [
        f"{file.relative_to(SOURCE)}:{line} imports vitral.{name}"
        for line, name in imports(file)
        if LEVEL[name.split(".")[0]] < LEVEL[room] and (room, name) not in UPWARD
    ]
    assert not upward


ARCHITECTURE = SOURCE.parent.parent / "docs" / "architecture.md"


@pytest.mark.skipif(not ARCHITECTURE.is_file(), reason="vitral is installed without its docs")
def test_every_file_has_its_line_in_the_map() -> None:
    """docs/architecture.md: a file of a room stands between that room's name and the next one's."""
    drawn = ARCHITECTURE.read_text(encoding="utf-8").partition("\nImports run one way")[0]
    named: set[str] = set()
    for line in drawn.partition("src/vitral/\n")[2].splitlines():
        if line[6:7].strip():
            room = word if (word := line.split()[0]).endswith("/") else ""
        named |= {room + name for name in re.findall(r"\b\w+\.py\b", line)}
    there = {str(file.relative_to(SOURCE)) for file in FILES if file.name != "__init__.py"}
    assert {name for name in named ^ there if not name.startswith("commands/")} == set()


def test_the_one_import_upwards_is_inside_from_preset() -> None:
    tree = ast.parse((SOURCE / "vit.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "from_preset"]
    inside = [name for node in ast.walk(functions[0]) for name in modules_named(node)]
    assert inside == ["presets"]
    assert [name for _, name in imports(SOURCE / "vit.py")] == inside, "vit.py imports nothing else of ours"


def test_the_test_of_layers_sees_what_it_should() -> None:
    text = (
        "import vitral\nimport vitral.runs.run\nfrom vitral import cli, __version__\nfrom vitral.data.loader import x\n"
    )
    names = [name for node in ast.walk(ast.parse(text)) for name in modules_named(node)]
    assert names == ["__init__", "runs.run", "cli", "data.loader"]


def docstrings(tree: ast.Module) -> set[int]:
    bodies = (node.body for node in ast.walk(tree) if hasattr(node, "body") and isinstance(node.body, list))
    firsts = (body[0] for body in bodies if body and isinstance(body[0], ast.Expr))
    return {id(first.value) for first in firsts}


@pytest.mark.parametrize("file", [file for file in FILES if file.name != "hardware.py"], ids=module_of)
def test_only_hardware_says_cuda(file: Path) -> None:
    tree = ast.parse(file.read_text())
    prose = docstrings(tree)
    said = [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "cuda")
        or (isinstance(node, ast.Constant) and id(node) not in prose and "cuda" in str(node.value).lower())
    ]
    assert not said


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def seconds(*arguments: str) -> float:
    """Of a processor, in the quickest of several runs: what a person waits for on a machine with nothing else to do."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(spent)


def test_importing_vitral_imports_neither_torch_nor_numpy() -> None:
    heavy = python(
        "import sys, vitral; print(*{'torch', 'numpy', 'matplotlib', 'PIL', 'tyro', 'rich'} & {*sys.modules})"
    )
    assert heavy.split() == []


def test_help_imports_no_torch() -> None:
    code = "import sys; from vitral.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert "usage: vitral" in python(code)


def test_importing_vitral_takes_less_than_a_tenth_of_a_second() -> None:
    assert seconds("-c", "import vitral") - seconds("-c", "") < 0.1


def test_help_answers_in_less_than_three_tenths_of_a_second() -> None:
    assert seconds("-m", "vitral", "--help") < 0.3


def test_every_public_name_is_there() -> None:
    for name in vitral.__all__:
        assert getattr(vitral, name) is not None
    assert {*vitral.__all__} <= {*dir(vitral)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vitral.nothing
