r"""Make text from outside safe for terminals, logs and other programs.

Names and messages of servers may hold any character. Some control a terminal (ESC, the C1 set), some change the order in which text is
displayed (the bidirectional controls), and some are invisible. Each of these is replaced by an escape in JSON notation, ``\u001b``, in
errors (:mod:`subscriber.errors`), in the command line's output and log, and in metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from unicodedata import category

__all__ = ["counted", "printable", "shortened"]

_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Control, format and surrogate characters, line and paragraph separators."""


def printable(text: str, *, keep: str = "") -> str:
    """Replace characters that are invisible or that control the display.

    Args:
        text: any text. Lone surrogates (bytes that were not UTF-8) are allowed, and replaced too.
        keep: characters to keep, such as a line feed.
    """
    if text.isprintable():
        return text
    return "".join(_escape(each) if category(each) in _HIDDEN and each not in keep else each for each in text)


def shortened(names: Sequence[str], shown: int = 10) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def counted(number: int, noun: str) -> str:
    """``1 table``, ``420,000 rows``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
