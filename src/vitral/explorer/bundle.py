"""Join ES modules into one classic script, which browsers also load from file://.

Supported, and all that `site/` uses: `import { a, b } from "./x.js";` and `export function`, `const`, `let`, `class` or
`async function`. Every module becomes a function scope, so top-level names may repeat.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"(\.[^"]+)";?[ \t]*$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async function|function|const|let|class)\b)", re.MULTILINE)
EXPORTED_NAME = re.compile(r"^export (?:async function|function|const|let|class)\s+([\w$]+)", re.MULTILINE)
UNSUPPORTED = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)


def bundle_modules(
    entry: Path, replaced: Mapping[Path, str] | None = None, folders: Mapping[Path, Path] | None = None
) -> str:
    """The module `entry` and all that it imports as one script.

    `replaced` maps modules to the text to use instead of their file, `folders` maps folders to those that hold their
    modules instead. All paths are resolved.
    """
    order: list[Path] = []
    texts: dict[Path, str] = {}

    def resolve(importer: Path, target: str) -> Path:
        path = (importer.parent / target).resolve()
        return (folders or {}).get(path.parent, path.parent) / path.name

    def visit(path: Path, importers: tuple[Path, ...]) -> None:
        if path in importers:
            raise ValueError(f"circular import: {' -> '.join(p.name for p in (*importers, path))}")
        if path in texts:
            return
        text = (replaced or {}).get(path) or path.read_text(encoding="utf-8")
        for _, target in IMPORT.findall(text):
            visit(resolve(path, target), (*importers, path))
        texts[path] = text
        order.append(path)

    visit(entry.resolve(), ())
    numbers = {path: index for index, path in enumerate(order)}

    def scope(path: Path) -> str:
        return _module_scope(path, texts[path], numbers[path], lambda target: numbers[resolve(path, target)])

    scopes = [scope(path) for path in order]
    return "(() => {\n" + "\n".join(scopes) + "\n})();\n"


def _module_scope(path: Path, text: str, number: int, number_of: Callable[[str], int]) -> str:
    """One module as a function that returns its exported names. `number_of` maps an import path to a module number."""

    def bind_imports(match: re.Match[str]) -> str:
        names = " ".join(match[1].split())
        return f"const {{ {names} }} = $m{number_of(match[2])};"

    names = EXPORTED_NAME.findall(text)
    body = EXPORT.sub("", IMPORT.sub(bind_imports, text))
    if leftover := UNSUPPORTED.search(body):
        raise ValueError(f"{path.name}: cannot bundle {leftover[0]!r}")
    header = f"// {path.parent.name}/{path.name}"
    return f"{header}\nconst $m{number} = (() => {{\n{body}\nreturn {{ {', '.join(names)} }};\n}})();"
