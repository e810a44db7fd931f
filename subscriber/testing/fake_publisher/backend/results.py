"""The result of a query, and the table by which queries are recognized."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from subscriber.testing.fake_publisher.backend.wire import Field

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session

__all__ = [
    "BOOL",
    "INT2",
    "INT2_VECTOR",
    "INT4",
    "INT8",
    "NAME",
    "NAME_ARRAY",
    "OID",
    "TEXT",
    "CopyResult",
    "Handler",
    "KnownQuery",
    "Result",
    "known",
    "literals",
    "normalized",
    "result",
]

BOOL: Final = 16
INT8: Final = 20
INT2: Final = 21
INT2_VECTOR: Final = 22
INT4: Final = 23
NAME: Final = 19
TEXT: Final = 25
OID: Final = 26
NAME_ARRAY: Final = 1003
_SPACE: Final = re.compile(r"\s+")
_LITERAL: Final = re.compile(r"(\bE)?'((?:[^']|'')*)'")
_QUOTED: Final = re.compile(r"('(?:[^']|'')*'|\"(?:[^\"]|\"\")*\")")


@dataclass(frozen=True, slots=True)
class Result:
    """Rows, or only a command tag.

    Attributes:
        tag: of CommandComplete.
        fields: of the rows; None: the statement returns no rows.
        rows: values as text.
    """

    tag: str
    fields: tuple[Field, ...] | None = None
    rows: Sequence[Sequence[bytes | None]] = ()


@dataclass(frozen=True, slots=True)
class CopyResult:
    """COPY … TO STDOUT: ``lines`` are the CopyData messages."""

    columns: int
    binary: bool
    lines: Iterable[bytes]
    rows: int


Handler = Callable[["Session", Mapping[str, str]], Result | CopyResult | Awaitable[Result]]


@dataclass(frozen=True, slots=True)
class KnownQuery:
    """A query that a client is known to send.

    Attributes:
        pattern: of its text.
        handler: answers it.
        described: its answer without rows, if the handler changes something: a client may ask only for the columns.
    """

    pattern: re.Pattern[str]
    handler: Handler
    described: Result | None = None

    def match(self, text: str) -> Mapping[str, str] | None:
        """The parameters of a text in normal form, or None."""
        found = self.pattern.fullmatch(text)
        return None if found is None else found.groupdict("")


def normalized(text: str) -> str:
    """The text of a statement with single spaces, outside quotes, and no space inside parentheses at their ends."""
    parts = _QUOTED.split(text.strip())
    for place in range(0, len(parts), 2):
        part = _SPACE.sub(" ", parts[place])
        parts[place] = part.replace("( ", "(").replace(" )", ")")
    return "".join(parts).strip()


def known(template: str, handler: Handler, described: Result | None = None) -> KnownQuery:
    """A query by its text. ``{name}`` stands for any text, in quotes for a literal, and ``...`` for a part that does not matter here."""
    pattern = re.escape(normalized(template))
    pattern = pattern.replace(re.escape("..."), ".*?")
    pattern = re.sub(r"'\\\{(\w+)\\\}'", r"'(?P<\1>(?:[^']|'')*)'", pattern)
    pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.*?)", pattern)
    return KnownQuery(re.compile(pattern, re.DOTALL), handler, described)


def literals(text: str) -> list[str]:
    """The literals in a text."""
    found = ((escapes, quoted.replace("''", "'")) for escapes, quoted in _LITERAL.findall(text))
    return [quoted.replace("\\\\", "\\") if escapes else quoted for escapes, quoted in found]


def result(fields: Mapping[str, int], rows: Iterable[Sequence[object]], tag: str | None = None) -> Result:
    """A result from Python values.

    Args:
        fields: names and type oids.
        rows: of str, int, bool or None.
        tag: of the command, ``SELECT n`` by default.
    """
    found = [tuple(_value(value) for value in row) for row in rows]
    return Result(tag or f"SELECT {len(found)}", tuple(Field(name, oid) for name, oid in fields.items()), found)


def _value(value: object) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return b"t" if value else b"f"
    return str(value).encode("utf-8", "surrogateescape")
