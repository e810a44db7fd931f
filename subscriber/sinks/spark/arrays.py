"""Array literals of PostgreSQL, of one dimension. Source: manual, Arrays, Array Input and Output Syntax."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["parse_array"]

_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"([,}])', re.DOTALL)
_PLAIN: Final = re.compile(r'([^",{}\\]*)([,}])')
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)


def parse_array(text: str) -> list[str | None] | None:
    """The elements' texts; None if it is no plain list: several dimensions, or a lower bound that is not 1.

    Raises:
        ValueError: not an array literal.
    """
    if text == "{}":
        return []
    if text.startswith(("[", "{{")):
        return None
    if not text.startswith("{"):
        raise ValueError("an array literal starts with a brace")
    elements: list[str | None] = []
    position, end = 1, ""
    while end != "}":
        if match := _QUOTED.match(text, position):
            elements.append(_ESCAPE.sub(r"\1", match[1]))
        elif match := _PLAIN.match(text, position):
            elements.append(None if match[1] == "NULL" else match[1])
        else:
            raise ValueError(f"malformed array literal at offset {position}")
        position, end = match.end(), match[2]
    if position != len(text):
        raise ValueError(f"junk behind an array literal at offset {position}")
    return elements
