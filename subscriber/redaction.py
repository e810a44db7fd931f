"""Remove passwords from text that a person or another program gets to read.

Our own errors and logs hold none (:mod:`subscriber.errors`). What is redacted is text that comes from elsewhere: connection strings, a
configuration, the environment, log files.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

__all__ = ["HIDDEN", "redacted", "secrets_in"]

HIDDEN: Final = "********"

_SHORT: Final = 2
"""A secret of so few characters is part of many words."""

_URL: Final = re.compile(r"(://[^/?#\s:@]*:)[^/?#\s]*@")
_WORD: Final = r"[\w.-]*(?:password|passwd|passphrase|secret|token|credential|access_?key|account_?key|private_?key)[\w.-]*"
_PAIR: Final = re.compile(rf"""(["']?\b{_WORD}["']?\s*[=:]\s*)('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s&;,'"]+)""", re.IGNORECASE)


def redacted(text: str, *secrets: str) -> str:
    """Replace passwords in URLs, values of keys such as ``password=…``, and known secrets.

    Args:
        text: any text.
        secrets: values that must not appear, wherever they are.
    """
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _PAIR.sub(rf"\1{HIDDEN}", _URL.sub(rf"\1{HIDDEN}@", text))


def secrets_in(text: str) -> set[str]:
    """The passwords that :func:`redacted` would replace in a connection string, as a server would get them."""
    found = {match[1] for match in re.finditer(r"://[^/?#\s:@]*:([^/?#\s]*)@", text)} | {match[2] for match in _PAIR.finditer(text)}
    found |= {each[1:-1].replace("\\'", "'").replace("\\\\", "\\") for each in found if each[:1] in {"'", '"'}}
    return {secret for each in found for secret in (each, unquote(each)) if len(secret) > _SHORT}
