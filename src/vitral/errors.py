"""`VitralError`, the one exception for errors that the user can fix, and helpers for its messages."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Sequence
from unicodedata import category

CONTROL_CATEGORIES = ("Cc", "Cf", "Zl", "Zp")  # control and formatting characters, line and paragraph separators


class VitralError(Exception):
    """An error that the user can fix: what is wrong, and what to do.

    The command line prints it in two lines and exits with status 2. Any other traceback is a bug in vitral.
    """

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}\n{hint}" if hint else what)
        self.what = what
        self.hint = hint


def error_reason(error: Exception) -> str:
    """The cause of an error without errno and file name, which the surrounding message already names."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def one_line(text: str, limit: int = 1000) -> str:
    """Text for one line of a terminal: control characters escaped, the middle of a very long text left out."""
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
    return "".join(c.encode("unicode_escape").decode() if category(c) in CONTROL_CATEGORIES else c for c in text)


def shell_quote(path: object) -> str:
    """A path as it is typed in a shell, quoted where necessary, for commands that users copy."""
    return shlex.quote(str(path))


def truncate_list(names: Sequence[str], limit: int = 6) -> str:
    """The first `limit` names, comma-separated, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit:,} more" if len(names) > limit else "")


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """ " Did you mean 'cifar10'?" for "cifar01"; an empty string if no choice is similar."""
    by_lower = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean '{by_lower[matches[0]]}'?" if matches else ""


def unknown_name_error(kind: str, name: str, choices: Iterable[str]) -> VitralError:
    """The error for a name that does not exist: the most similar name, then all of them."""
    names = list(choices)
    return VitralError(f"no {kind} named {name!r}.{did_you_mean(name, names)}", f"Available: {', '.join(names)}")
