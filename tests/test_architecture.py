"""Imports go one way through the packages, and `import vitral` stays fast."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import vitral

SOURCE = Path(vitral.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# From top to bottom. A package may import from its own layer and from those below it.
LAYERS = [
    ["__init__", "__main__", "cli"],
    ["api"],
    ["serve"],
    ["explorer"],
    ["reporting"],
    ["doctor"],
    ["training"],
    ["tasks"],
    ["evaluation", "explain", "export"],
    ["inference"],
    ["weights"],
    ["runs"],
    ["analysis", "bundled", "kernels", "recipes"],
    ["ssl"],
    ["data"],
    ["device", "models"],
    ["distributed"],
    ["utils"],
    ["errors"],
]
LEVELS = {package: level for level, packages in enumerate(LAYERS) for package in packages}
UPWARD_IMPORTS = {  # inside methods that only exist for convenience
    ("inference/predictor.py", "evaluation.metrics"),  # Predictor.evaluate
    ("inference/predictor.py", "explain.api"),  # Predictor.explain
    ("explain/api.py", "reporting.figures.heatmaps"),  # Explanation.save
}


def module_name(file: Path) -> str:
    """vitral/data/loader.py → data.loader, vitral/data/__init__.py → data, vitral/__init__.py → __init__"""
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def imported_modules(node: ast.AST) -> Iterator[str]:
    """The vitral modules that an import statement names, without the leading "vitral."."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "vitral":
                yield alias.name.partition(".")[2] or "__init__"
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports are not used"
        if node.module == "vitral":
            yield from (alias.name for alias in node.names if alias.name != "__version__")
        elif node.module is not None and node.module.startswith("vitral."):
            yield node.module.removeprefix("vitral.")


@cache
def nodes(file: Path) -> list[Any]:
    """Every node of the syntax tree of a file."""
    return list(ast.walk(ast.parse(file.read_text())))


def imports(file: Path) -> list[tuple[int, str]]:
    """Line and module of every import of a vitral module, also inside functions."""
    return [
        (node.lineno, name)
        for node in nodes(file)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported_modules(node)
    ]


def files_outside(*prefixes: str) -> list[tuple[str, Path]]:
    """Path below SOURCE, and file, of the modules whose path has none of the prefixes."""
    named = [(file.relative_to(SOURCE).as_posix(), file) for file in FILES]
    return [(path, file) for path, file in named if not path.startswith(prefixes)]


def test_every_package_is_in_a_layer() -> None:
    assert {module_name(file).split(".")[0] for file in FILES} <= {*LEVELS}, "add the package to LAYERS"


def test_modules_import_only_from_their_own_layer_and_below() -> None:
    upward = [
        f"{path}:{line} imports vitral.{name}"
        for path, file in files_outside()
        for line, name in imports(file)
        if LEVELS[name.split(".")[0]] < LEVELS[module_name(file).split(".")[0]]
        if (path, name) not in UPWARD_IMPORTS
    ]
    assert not upward


def test_vit_imports_nothing_from_vitral_except_presets_in_from_preset() -> None:
    assert [name for _, name in imports(SOURCE / "models" / "vit.py")] == ["models.presets"]


def test_imported_modules_covers_all_forms_of_import() -> None:
    source = (
        "import vitral\nimport vitral.runs.run\nfrom vitral import cli, __version__\nfrom vitral.data.loader import x\n"
    )
    names = [name for node in ast.walk(ast.parse(source)) for name in imported_modules(node)]
    assert names == ["__init__", "runs.run", "cli", "data.loader"]


DEVICE_CODE = ("device/", "kernels/", "distributed/world.py", "cli/options.py")  # the last repeats names of devices


def test_torch_cuda_is_used_only_in_device_code() -> None:
    uses = [
        f"{path}:{node.lineno}"
        for path, file in files_outside(*DEVICE_CODE)
        for node in nodes(file)
        if (isinstance(node, ast.Attribute) and node.attr == "cuda")
        or (isinstance(node, ast.Constant) and node.value == "cuda")
    ]
    assert not uses


# Messages between vitral's own processes, and files with a known checksum.
PLAIN_JSON = (
    "utils/json_toml.py",
    "data/files/decode_process.py",
    "data/files/decode_pool.py",
    "data/registry/convert.py",
)


def test_json_is_written_and_read_with_the_helpers_that_are_strict_and_bounded() -> None:
    calls = [
        f"{path}:{node.lineno} {node.value.id}.{node.attr}"
        for path, file in files_outside(*PLAIN_JSON)
        for node in nodes(file)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "json" and node.attr in {"dumps", "dump", "loads", "load"}
    ]
    assert not calls, "use vitral.utils.json_toml"


def run_python(code: str) -> str:
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout


def cpu_seconds(*arguments: str) -> float:
    """The least CPU time of several runs, which other programs on the machine hardly affect."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_import_vitral_does_not_import_torch_or_numpy() -> None:
    heavy = run_python("import sys, vitral; print(*{'torch', 'numpy', 'matplotlib', 'PIL', 'rich'} & {*sys.modules})")
    assert heavy.split() == []


def test_the_api_does_not_import_what_only_figures_and_compilation_need() -> None:
    late = run_python("import sys, vitral.api; print(*{'matplotlib', 'scipy', 'torch._dynamo'} & {*sys.modules})")
    assert late.split() == []


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from vitral.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as exit:\n    assert not exit.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert "vitral" in run_python(code)


def test_import_vitral_takes_less_than_0_1_s() -> None:
    assert cpu_seconds("-c", "import vitral") - cpu_seconds("-c", "") < 0.1


def test_public_names_exist() -> None:
    for name in vitral.__all__:
        assert getattr(vitral, name) is not None
    assert {*vitral.__all__} <= {*dir(vitral)}
    with pytest.raises(AttributeError, match="no attribute 'nonexistent'"):
        _ = vitral.nonexistent
