"""`VitralError`, the one exception for errors that the user can fix, and helpers for its messages."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from unicodedata import category

SUBSTITUTION_COST = 1.2  # more than one: in a name of three letters, another letter makes another word
MAX_NAME_LENGTH = 100  # longer names are not compared


class VitralError(Exception):
    """An error that the user can fix: what is wrong, and what to do.

    The command line prints it in two lines and exits with status 2. Any other traceback is a bug in vitral.
    """

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}\n{hint}" if hint else what)
        self.what = what
        self.hint = hint


class Interrupted(VitralError):
    """Work was stopped by Ctrl-C or SIGTERM after its progress was saved; the hint says how to continue.

    The command line exits with status 130.
    """


def error_reason(error: Exception) -> str:
    """The cause of an error without errno and file name, which the surrounding message already names."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def one_line(text: str, limit: int = 1000) -> str:
    """Text for one line of a terminal: control characters escaped, the middle of a very long text left out."""
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
    return "".join(c.encode("unicode_escape").decode() if is_control(c) else c for c in text)


def short_repr(value: object, limit: int = 120) -> str:
    """`repr(value)` for a message, shortened."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def is_control(character: str) -> bool:
    """Whether a character moves the cursor, changes the line or the direction of text, instead of being printed."""
    return category(character) in ("Cc", "Cf", "Zl", "Zp")


def shell_quote(path: object) -> str:
    """A path as it is typed in a shell, quoted where necessary, for commands that users copy."""
    return shlex.quote(str(path))


def truncate_list(names: Sequence[str], limit: int = 6) -> str:
    """The first `limit` names, comma-separated, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit:,} more" if len(names) > limit else "")


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """The end of a message about a misspelled name: ". Did you mean 'cifar10'?"; empty if no choice is similar."""
    match = nearest_name(name, choices)
    return f". Did you mean '{match}'?" if match is not None else ""


def nearest_name(name: str, choices: Iterable[str]) -> str | None:
    """The choice that `name` is probably a misspelling of, upper and lower case being equal; None if there is none.

    At most three letters may differ, and fewer in short names, where another letter makes another word.
    """
    typed, best, best_cost = name.lower(), None, float("inf")
    for choice in choices:
        longest = max(len(typed), len(choice))
        limit = min(max(1.0, 0.3 * longest), 3.0)
        if abs(len(typed) - len(choice)) <= limit and longest < MAX_NAME_LENGTH:
            cost = edit_distance(typed, choice.lower())
            if cost <= limit and cost < best_cost:
                best, best_cost = choice, cost
    return best


def edit_distance(a: str, b: str) -> float:
    """Damerau-Levenshtein distance: inserting, deleting or swapping costs 1, replacing costs SUBSTITUTION_COST."""
    before: list[float] = []
    row: list[float] = list(range(len(b) + 1))
    for i, letter in enumerate(a, start=1):
        above, row = row, [float(i)]
        for j, other in enumerate(b, start=1):
            cost = above[j - 1] + (0 if letter == other else SUBSTITUTION_COST)
            cost = min(cost, above[j] + 1, row[j - 1] + 1)
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before = above
    return row[-1]


def unknown_name_error(kind: str, name: str, choices: Iterable[str]) -> VitralError:
    """The error for a name that does not exist: the most similar name, then all of them."""
    names = list(choices)
    return VitralError(f"no {kind} named {name!r}{did_you_mean(name, names)}", f"Available: {', '.join(names)}")
