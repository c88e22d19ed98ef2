"""Completion scripts for bash, zsh and fish, generated from the flags of every command.

The scripts are static: completing does not start Python. Arguments and flags that take files or models complete file
names; flags with a fixed set of values complete these values.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitral import bundled
from vitral.cli.main import COMMAND_GROUPS, COMMANDS, load_command
from vitral.cli.parsing import Command, CommandGroup, Flag

MODEL_ARGUMENTS = ("model", "models", "first", "second", "source")
SUMMARIES = {name: summary for commands in COMMAND_GROUPS.values() for name, _, summary in commands}
PATH_FLAGS = ("data", "faithfulness", "init_from", "model", "ood", "recipe")  # strings that may be paths


def completion_script(shell: str) -> str:
    return {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[shell]()


def leaf_commands() -> Iterator[Command[Any]]:
    """Every command that takes flags: `train`, `data pack`, ..."""
    for name in COMMANDS:
        command = load_command(name)
        if isinstance(command, CommandGroup):
            yield from (subcommand for subcommand, _ in command.commands.values())
        else:
            yield command


def subcommands() -> dict[str, list[str]]:
    loaded = {name: load_command(name) for name in COMMANDS}
    return {name: list(group.commands) for name, group in loaded.items() if isinstance(group, CommandGroup)}


def flag_names(command: Command[Any]) -> list[str]:
    """All spellings of a command's flags, `--no-x` included."""
    flags = [flag for flag in command.flags if not flag.is_positional]
    negatives = [flag.negative_name for flag in flags if flag.has_negative]
    return [*(flag.name for flag in flags), *negatives, "--help"]


def argument_words(command: Command[Any]) -> list[str]:
    """Completions of positional arguments in addition to file names: choices and bundled models."""
    arguments = [flag for flag in command.flags if flag.is_positional]
    words = [choice for flag in arguments for choice in flag.choices]
    if any(flag.dest in MODEL_ARGUMENTS for flag in arguments):
        words += bundled.model_names()
    return words


def bash_script() -> str:
    lines = [
        "# bash completion for vitral:  source <(vitral completion bash)",
        "_vitral() {",
        '    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}"',
        '    local command="${COMP_WORDS[1]}" words="" flags="" values=""',
        "    if [[ $COMP_CWORD -eq 1 ]]; then",
        f'        COMPREPLY=($(compgen -W "{" ".join(COMMANDS)} --help --version" -- "$cur"))',
        "        return",
        "    fi",
        '    case "$command" in',
    ]
    for name, choices in subcommands().items():
        lines += [
            f"        {name})",
            "            if [[ $COMP_CWORD -eq 2 ]]; then",
            f'                COMPREPLY=($(compgen -W "{" ".join(choices)} --help" -- "$cur"))',
            "                return",
            "            fi",
            '            command="$command ${COMP_WORDS[2]}";;',
        ]
    lines += ["    esac", '    case "$command" in']
    for command in leaf_commands():
        lines.append(f'        "{command.name}")')
        lines.append(f'            flags="{" ".join(flag_names(command))}"')
        lines.append(f'            words="{" ".join(argument_words(command))}"')
        choices = [
            f'                {flag.name}) values="{" ".join(flag.choices)}";;' for flag in choice_flags(command)
        ]
        if choices:
            lines += ['            case "$prev" in', *choices, "            esac"]
        lines[-1] += ";;" if not choices else "\n            ;;"
    lines += [
        "    esac",
        '    if [[ -n "$values" ]]; then',
        '        COMPREPLY=($(compgen -W "$values" -- "$cur"))',
        '    elif [[ "$cur" == -* ]]; then',
        '        COMPREPLY=($(compgen -W "$flags" -- "$cur"))',
        "    else",
        '        COMPREPLY=($(compgen -W "$words" -- "$cur") $(compgen -f -- "$cur"))',
        "    fi",
        "}",
        "complete -o filenames -F _vitral vitral",
    ]
    return "\n".join(lines) + "\n"


def choice_flags(command: Command[Any]) -> list[Flag]:
    return [flag for flag in command.flags if flag.choices and not flag.is_positional]


def zsh_script() -> str:
    lines = [
        "#compdef vitral",
        "# zsh completion for vitral:  vitral completion zsh > ~/.zfunc/_vitral",
        "_vitral() {",
        '    local command="${words[2]}"',
        "    if (( CURRENT == 2 )); then",
        "        local -a commands=(",
        *(f"            {_quote(f'{name}:{summary}')}" for name, summary in SUMMARIES.items()),
        "        )",
        "        _describe 'command' commands",
        "        return",
        "    fi",
        '    case "$command" in',
    ]
    for name, choices in subcommands().items():
        lines += [
            f"        {name})",
            "            if (( CURRENT == 3 )); then",
            f"                compadd -- {' '.join(choices)}",
            "                return",
            "            fi",
            '            command="$command ${words[3]}"',
            "            shift words; (( CURRENT-- ));;",
        ]
    lines += ["    esac", "    shift words; (( CURRENT-- ))", '    case "$command" in']
    for command in leaf_commands():
        lines += [f"        {_quote(command.name)})", "            _arguments \\"]
        lines += [f"                {spec} \\" for spec in _zsh_specs(command)]
        lines += ["                '*:argument:_files';;"]
    lines += [
        "    esac",
        "}",
        'if [[ "$funcstack[1]" == "_vitral" ]]; then _vitral "$@"; else compdef _vitral vitral; fi',
    ]
    return "\n".join(lines) + "\n"


def _zsh_specs(command: Command[Any]) -> Iterator[str]:
    """`'--top[number of labels per image]:value:'` for `_arguments`."""
    for flag in command.flags:
        if flag.is_positional:
            continue
        help_text = _escape(_first_sentence(flag.help), "[]:")
        if flag.is_switch:
            yield _quote(f"{flag.name}[{help_text}]")
            if flag.has_negative:
                yield _quote(f"{flag.negative_name}[{help_text}]")
        else:
            values = f"({' '.join(flag.choices)})" if flag.choices else "_files" if _takes_path(flag) else ""
            yield _quote(f"{'*' if flag.is_tuple else ''}{flag.name}[{help_text}]:value:{values}")
    yield _quote("--help[show help]")


def fish_script() -> str:
    lines = ["# fish completion for vitral:  vitral completion fish | source", "complete -c vitral -f"]
    for name, summary in SUMMARIES.items():
        lines.append(f"complete -c vitral -n __fish_use_subcommand -a {name} -d {_quote(summary, 'fish')}")
    for name, choices in subcommands().items():
        condition = f"__fish_seen_subcommand_from {name}; and not __fish_seen_subcommand_from {' '.join(choices)}"
        lines.append(f"complete -c vitral -n {_quote(condition, 'fish')} -a {_quote(' '.join(choices), 'fish')}")
    for command in leaf_commands():
        conditions = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.name.split())
        start = f"complete -c vitral -n {_quote(conditions, 'fish')}"
        lines.append(f"{start} -F")
        if words := argument_words(command):
            lines.append(f"{start} -a {_quote(' '.join(words), 'fish')}")
        for flag in command.flags:
            if flag.is_positional:
                continue
            description = f"-d {_quote(_first_sentence(flag.help), 'fish')}"
            values = f" -x -a {_quote(' '.join(flag.choices), 'fish')}" if flag.choices else ""
            requires = "" if flag.is_switch or values else " -r"
            lines.append(f"{start} -l {flag.name.removeprefix('--')}{requires}{values} {description}")
            if flag.has_negative:
                lines.append(f"{start} -l {flag.negative_name.removeprefix('--')} {description}")
    return "\n".join(lines) + "\n"


def _takes_path(flag: Flag) -> bool:
    return flag.item_type is Path or flag.dest in PATH_FLAGS


def _first_sentence(text: str) -> str:
    return text.split("; ")[0].split(" (default")[0]


def _escape(text: str, characters: str) -> str:
    return "".join(f"\\{character}" if character in characters else character for character in text)


def _quote(text: str, shell: str = "zsh") -> str:
    """A single-quoted word. fish escapes quotes in it; zsh closes and reopens the word."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'") if shell == "fish" else text.replace("'", "'\\''")
    return f"'{escaped}'"
