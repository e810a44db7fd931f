"""Divide the text of a simple query into its statements."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["split_statements"]

_PIECE: Final = re.compile(r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | --[^\n]* | /\*.*?\*/ | ; | [^'";/-]+ | .""", re.VERBOSE | re.DOTALL)


def split_statements(text: str) -> list[str]:
    """The statements, without comments and empty ones."""
    statements: list[str] = []
    current: list[str] = []
    for piece in _PIECE.findall(text):
        if piece == ";":
            statements.append("".join(current))
            current = []
        elif piece.startswith(("--", "/*")):
            current.append(" ")
        else:
            current.append(piece)
    statements.append("".join(current))
    return [statement.strip() for statement in statements if statement.strip()]
