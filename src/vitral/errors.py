"""The one exception for "you can fix this", and what goes into its sentences: names, and nearest ones."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Sequence


class VitralError(Exception):
    """Something the person at the keyboard can fix: what happened, and what to do next.

    The command line prints it in two lines and exits with 2. A traceback, then, always means a bug in vitral.
    """

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}\n{hint}" if hint else what)
        self.what = what
        self.hint = hint


def reason(error: Exception) -> str:
    """What the system says, without number and file name, which stand elsewhere in the sentence."""
    if isinstance(error, UnicodeDecodeError):
        return "it is no text in UTF-8"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def typed(path: object) -> str:
    """A path as a person types it in a shell, for commands to copy: in quotes where it needs them."""
    return shlex.quote(str(path))


def few(names: Sequence[str], most: int = 6) -> str:
    """The first of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean cifar10?' for 'cifar01'; nothing when no known name is close."""
    close = difflib.get_close_matches(name.lower(), {word.lower(): word for word in known}, n=1, cutoff=0.6)
    by_lower = {word.lower(): word for word in known}
    return f" Did you mean {by_lower[close[0]]}?" if close else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> VitralError:
    """The error for a name that is not in a table: the nearest name, then the whole table."""
    names = list(known)
    return VitralError(f"no {kind} named {name!r}.{nearest(name, names)}", f"Known: {', '.join(names)}")
