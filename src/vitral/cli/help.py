"""Help texts: the list of commands, and the flags of one command."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitral.cli.config_fields import NO_DEFAULT
from vitral.cli.parsing import Command, CommandGroup, Flag, HelpDefaults

COLUMN = 30  # where help texts begin
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


def command_help(command: Command[Any], defaults: HelpDefaults | None = None) -> str:
    """Usage, description, arguments and grouped flags of a command. `defaults` replace those of some flags."""
    flags = command.flags
    if defaults is not None:
        flags = [replace(flag, default=defaults.values.get(flag.dest, flag.default)) for flag in flags]
    arguments = [flag for flag in flags if flag.is_positional]
    usage = " ".join(
        ["usage: vitral", command.name]
        + [flag.name if flag.is_required or flag.is_variadic else f"[{flag.name}]" for flag in arguments]
        + [f"{flag.name} {metavar(flag)}" for flag in flags if flag.is_required and not flag.is_positional]
        + ["[FLAGS]"] * any(not flag.is_positional for flag in flags)
    )
    groups: dict[str, list[Flag]] = {"Arguments": arguments} if arguments else {}
    for flag in flags:
        if not flag.is_positional:
            groups.setdefault(flag.group, []).append(flag)
    sections = [usage, wrap_paragraphs(inspect.getdoc(command.args) or "")]
    if defaults is not None:
        sections.append(wrap_paragraphs(defaults.note))
    for title, members in groups.items():
        show_switches = defaults is not None and defaults.show_switches
        rows = {spelling(flag): flag_text(flag, show_switches) for flag in members}
        if title == list(groups)[-1]:
            rows["-h, --help"] = "show this help"
        sections.append(f"{title}\n{format_rows(rows)}")
    return "\n\n".join(sections) + "\n"


def group_help(group: CommandGroup) -> str:
    """Usage and subcommands of a command such as `vitral data`."""
    rows = {}
    for name, (command, summary) in group.commands.items():
        names = [flag.name for flag in command.flags if flag.is_positional]
        rows[" ".join([name, *names])] = summary + (" (default)" if name == group.default else "")
    return f"usage: vitral {group.name} COMMAND\n\n{group.description}\n\nCommands\n{format_rows(rows)}\n"


def main_help(version: str, groups: Mapping[str, Sequence[tuple[str, str, str]]], footer: str) -> str:
    """The list of all commands, grouped by task."""
    sections = [
        f"vitral {version}: train, evaluate, explain and deploy Vision Transformers",
        "usage: vitral COMMAND [ARGUMENTS] [FLAGS]\n       vitral COMMAND --help",
    ]
    for title, commands in groups.items():
        rows = {f"{name} {arguments}".strip(): summary for name, arguments, summary in commands}
        sections.append(f"{title}\n{format_rows(rows)}")
    return "\n\n".join([*sections, footer]) + "\n"


def spelling(flag: Flag) -> str:
    """`--top INT`, `--code, --no-code`, `MODEL`."""
    if flag.is_positional:
        return flag.name
    if flag.is_switch:
        return f"{flag.name}, {flag.negative_name}" if flag.has_negative else flag.name
    return f"{flag.name} {metavar(flag)}"


def metavar(flag: Flag) -> str:
    name = "|".join(flag.choices) or "|".join([METAVARS[flag.item_type], *flag.keywords])
    if not flag.is_tuple or flag.repeatable:
        return name
    if flag.is_variadic:
        return f"{name} ..."
    return "HEIGHT WIDTH" if flag.dest.endswith("image_size") else f"{name} {name}"


def flag_text(flag: Flag, show_switches: bool = False) -> str:
    """The help text, with the default unless it is absent, empty or explained in the text."""
    is_empty = flag.default is NO_DEFAULT or flag.default is None or flag.default in ("", ())
    if is_empty or "default" in flag.help:
        return flag.help
    if flag.is_switch:
        return f"{flag.help} (default: on)" if show_switches and flag.default else flag.help
    values = flag.default if isinstance(flag.default, tuple) else (flag.default,)
    return f"{flag.help} (default: {' '.join(map(str, values))})".lstrip()


def format_rows(rows: Mapping[str, str]) -> str:
    """Two columns, wrapped to the terminal; a long left side gets a line of its own."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    lines = []
    for left, text in rows.items():
        wrapped = wrap(text, max(width - COLUMN, 30)) or [""]
        if len(left) + 4 > COLUMN:
            lines.append(f"  {left}")
            left = ""
        lines.append(f"  {left:<{COLUMN - 2}}{wrapped[0]}")
        lines += [" " * COLUMN + line for line in wrapped[1:]]
    return "\n".join(line.rstrip() for line in lines)


def wrap_paragraphs(text: str) -> str:
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    return "\n\n".join(
        paragraph if paragraph.startswith("  ") else "\n".join(wrap(" ".join(paragraph.split()), width))
        for paragraph in text.split("\n\n")
    )


def wrap(text: str, width: int) -> list[str]:
    """The lines of a paragraph. Flags such as --init-from and names of recipes are not divided at their hyphens."""
    return textwrap.wrap(text, width, break_on_hyphens=False)
