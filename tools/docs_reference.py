"""mkdocs hook: write the reference pages for the command line, the recipe fields and the HTTP API from the source."""

from __future__ import annotations

import html
from collections.abc import Iterator
from inspect import cleandoc, getdoc
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from vitral.cli.config_fields import read_config_fields
from vitral.cli.help import flag_text, metavar, spelling
from vitral.cli.main import COMMAND_GROUPS, load_command
from vitral.cli.parsing import Command, CommandGroup, Flag, flags_of


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    pages = {"cli": command_line(), "recipes": recipe_fields(), "http": http_api()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def command_line() -> str:
    """Every command with every argument and flag."""
    lines = ["# Command line", "", "Every command prints this with `--help`. Exit status: 0 success, 1 problems were"]
    lines += ["reported, 2 an error that you can fix, 130 interrupted. The how-to guides show the commands in use.", ""]
    for group, commands in COMMAND_GROUPS.items():
        lines += [f"## {group}", ""]
        for name, arguments, summary in commands:
            lines += [f"### vitral {name}", "", f"`vitral {name} {arguments}`".replace(" `", "`"), ""]
            lines += [f"{summary[0].upper()}{summary[1:]}.", ""]
            command = load_command(name)
            if isinstance(command, CommandGroup):
                for subcommand, subsummary in command.commands.values():
                    lines += [f"#### vitral {subcommand.name}", "", f"{subsummary[0].upper()}{subsummary[1:]}.", ""]
                    lines += flag_tables(subcommand)
            else:
                lines += flag_tables(command)
    return "\n".join(lines)


def flag_tables(command: Command[Any]) -> Iterator[str]:
    """The command's description, then one table per group of flags."""
    description = cleandoc(getdoc(command.args) or "").partition("\n")[2].strip()
    if description:
        yield from (description, "")
    groups: dict[str, list[Flag]] = {}
    for flag in flags_of(command.args):
        groups.setdefault("Arguments" if flag.is_positional else flag.group, []).append(flag)
    for group, flags in groups.items():
        yield from (f"**{group}**", "", "| flag | meaning |", "|---|---|")
        yield from (row(f"`{spelling(flag)}`", flag_text(flag)) for flag in flags)
        yield ""


def recipe_fields() -> str:
    """Every field of a recipe, as written in TOML and as a flag."""
    lines = [
        "# Recipe fields",
        "",
        "A recipe is a TOML file; every field is also a flag of `vitral train`: `optim.lr` is",
    ]
    lines += ["`--optim.lr`, `batch_size` is `--batch-size`. `vitral recipes show NAME` prints a complete recipe.", ""]
    lines += ["| field | value | meaning |", "|---|---|---|"]
    for field in read_config_fields("vitral.recipes.schema", "Recipe"):
        flag = Flag(dest=field.path, type=field.type, default=field.default, help=field.help)
        lines.append(row(f"`{field.path}`", "true|false" if flag.is_switch else metavar(flag), flag_text(flag)))
    return "\n".join([*lines, ""])


def http_api() -> str:
    """Every endpoint and its schemas, from the server's OpenAPI document."""
    from vitral.serve.app import create_app
    from vitral.serve.limits import Limits
    from vitral.serve.middleware import ServerState

    app: Any = create_app([], ServerState(limits=Limits())).app
    document: dict[str, Any] = app.openapi()
    lines = ["# HTTP API", "", document["info"].get("description", ""), ""]
    lines += ["The server also publishes this description as `/openapi.json` and `/docs`.", ""]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += [
                f"## {method.upper()} {path}",
                "",
                operation.get("description") or operation.get("summary", ""),
                "",
            ]
            lines += ["| status | meaning |", "|---|---|"]
            lines += [row(status, r.get("description", "")) for status, r in operation["responses"].items()]
            lines.append("")
    lines += ["## Schemas", ""]
    for name, schema in document.get("components", {}).get("schemas", {}).items():
        lines += [
            f"### {name}",
            "",
            schema.get("description", "").replace("[", "&#91;"),
            "",
            "| field | type | meaning |",
            "|---|---|---|",
        ]
        for field, about in schema.get("properties", {}).items():
            lines.append(row(f"`{field}`", schema_type(about), about.get("description", "")))
        lines.append("")
    return "\n".join(lines)


def schema_type(schema: dict[str, Any]) -> str:
    """A JSON schema as a short type: `string`, `array of Label`, `number or null`."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(schema_type(option) for option in schema["anyOf"])
    if schema.get("type") == "array":
        return f"array of {schema_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def row(*cells: str) -> str:
    """A Markdown table row. Cells that are not code are escaped; in code, a backslash before | would be shown."""
    escaped = (
        cell if cell.startswith("`") else html.escape(cell, quote=False).replace("[", "&#91;").replace("|", "&#124;")
        for cell in cells
    )
    return "| " + " | ".join(cell.replace("\n", " ") for cell in escaped) + " |"
