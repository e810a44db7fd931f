"""Parts of a table, and what each side can say about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from subscriber.interfaces import Condition
from subscriber.protocol.quoting import quote_identifier

__all__ = ["NULL_BUCKET", "WHOLE", "Buckets", "HashBuckets", "Key", "KeyBuckets", "Part", "Sums", "TableSide", "named_row", "row_name"]

Key = tuple[str | None, ...]
"""The texts of a key's columns; empty for a table without a key."""
Sums = Mapping[int, tuple[int, int]]
"""Number of rows and sum of their hashes, by bucket."""
NULL_BUCKET: Final = -(2**63)
"""The bucket of rows without a value, in :class:`KeyBuckets`."""
_NULL: Final = "-"


@dataclass(frozen=True, slots=True)
class HashBuckets:
    """Divides rows by ``hash & mask``."""

    mask: int


@dataclass(frozen=True, slots=True)
class KeyBuckets:
    """Divides rows by ``column >> shift``, so that PostgreSQL finds the rows of a bucket through an index. The shift is 1 or more."""

    column: str
    shift: int


Buckets = HashBuckets | KeyBuckets


def row_name(hashed: int, key: Sequence[str | None]) -> str:
    """Hash and key of a row in one text: each column of the key as hexadecimal digits, or as it is if it is an integer for both sides."""
    return ":".join([str(hashed), *(_NULL if text is None else text.encode("utf-8", "surrogateescape").hex() for text in key)])


def named_row(name: str, integers: Sequence[bool]) -> tuple[int, Key]:
    """Read what :func:`row_name` or the SQL of :class:`subscriber.verification.row_sql.TableSql` has written.

    Args:
        name: the text.
        integers: which columns of the key are written as they are.
    """
    hashed, *texts = name.split(":")
    key = (
        None if text == _NULL else text if plain else bytes.fromhex(text).decode("utf-8", "surrogateescape")
        for text, plain in zip(texts, integers, strict=True)
    )
    return int(hashed), tuple(key)


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a table: those of a range of a column, or those that a condition of one side selects.

    Attributes:
        column: its values are from ``low`` to before ``high``; None: there is no such range.
        low, high: texts of values; None: no bound. NULL lies above all values, as ORDER BY sorts it.
        type: of the values: a type of pg_catalog.
        blocks: instead of a range of values, SQL of a range of blocks; empty: all rows.
    """

    column: str | None = None
    low: str | None = None
    high: str | None = None
    type: str = ""
    blocks: str = ""

    @property
    def condition(self) -> Condition:
        """The rows as a condition of PostgreSQL."""
        if self.column is None:
            return Condition((self.blocks,))
        pieces, values = [""], list[str]()
        for sign, value in ((">=", self.low), ("<", self.high)):
            if value is not None:
                pieces[-1] += f"{' AND ' if values else ''}{quote_identifier(self.column)} {sign} "
                pieces.append(f"::pg_catalog.{self.type}")
                values.append(value)
        if self.low is not None and self.high is None:
            pieces[0] = f"({pieces[0]}"
            pieces[-1] += f" OR {quote_identifier(self.column)} IS NULL)"
        return Condition(tuple(pieces), tuple(values))


WHOLE = Part()


class TableSide(Protocol):
    """A table on one side, in a snapshot. Several calls may run at once. Both sides give the same hash for the same row.

    Each method raises SubscriberError if the server rejects the query, or the session was lost. Only PostgreSQL is given
    :class:`KeyBuckets`.
    """

    async def checksum(self, part: Part) -> tuple[int, int]:
        """Return the number of rows of a part, and the sum of their hashes."""
        ...

    async def checksums(self, parts: Sequence[Part], by: Buckets, read: Callable[[int], Awaitable[None]]) -> Sums:
        """Return the same by bucket, over all parts. ``read`` is told how many rows were read."""
        ...

    async def hashes(self, parts: Sequence[Part], by: Buckets, buckets: Sequence[int]) -> Counter[str]:
        """Return hash and key (:func:`row_name`) of all rows in some buckets, with their number."""
        ...

    async def cells(self, keys: Sequence[Sequence[str]], *, values: bool) -> Mapping[Key, Sequence[Sequence[str | None]]]:
        """Return the rows with these keys: a digest of each column, and with ``values`` also the beginning of the text of each column."""
        ...

    async def values(self, hashes: Sequence[int]) -> Mapping[int, Sequence[str | None]]:
        """Return the beginning of the text of each column, of rows with these hashes."""
        ...
