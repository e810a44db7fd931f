"""A table of a database that cannot compute the checksums: its rows are read, and hashed in this process, some thousand at a time.

The text of a value is that of :func:`subscriber.verification.row_sql.client_column_sql`: PostgreSQL's own, but floats are compared by their
bits and without the sign of a zero, numbers without trailing zeros, and ``character(n)`` without trailing blanks.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final

from subscriber.interfaces import KeyedRowSource, RowSource
from subscriber.types.builtin import SQL_NAMES
from subscriber.types.numerics import float4_text, float8_text
from subscriber.verification.parts import Buckets, HashBuckets, Key, Part, Sums, row_name
from subscriber.verification.values import array_literal, normalizer

__all__ = ["ClientTable"]

_SHOWN: Final = 200

Text = Callable[[object], str | None]
Row = Sequence[str | None]


class ClientTable:
    """See :class:`subscriber.verification.parts.TableSide`.

    Args:
        source: reads the rows, with the columns in this order.
        columns: base type of each column on the publisher.
        key: the columns that identify a row.
    """

    def __init__(self, source: RowSource, columns: Mapping[str, str], key: Sequence[str]) -> None:
        self._source = source
        self._texts = [_text(base) for base in columns.values()]
        names = list(columns)
        self._key_places = [names.index(name) for name in key]

    async def _rows(self, parts: Sequence[Part]) -> AsyncIterator[list[tuple[int, Row]]]:
        """The hash and the texts of the rows of some parts, some thousand at a time."""
        for part in parts:
            low, high = (None if bound is None else int(bound) for bound in (part.low, part.high))
            async for chunk in self._source.rows(part.column, low, high):
                rows = [[text(value) for text, value in zip(self._texts, row, strict=True)] for row in chunk]
                yield [(_hash(row), row) for row in rows]

    def _key(self, row: Row) -> Key:
        return tuple(row[place] for place in self._key_places)

    async def checksum(self, part: Part) -> tuple[int, int]:
        """Count the rows of a part, and add their hashes."""
        count = total = 0
        async for rows in self._rows([part]):
            count += len(rows)
            total += sum(hashed for hashed, _ in rows)
        return count, total

    async def checksums(self, parts: Sequence[Part], by: Buckets, read: Callable[[int], Awaitable[None]]) -> Sums:
        """The same by bucket."""
        assert isinstance(by, HashBuckets)
        sums: dict[int, tuple[int, int]] = {}
        async for rows in self._rows(parts):
            for hashed, _ in rows:
                count, total = sums.get(hashed & by.mask, (0, 0))
                sums[hashed & by.mask] = count + 1, total + hashed
            await read(len(rows))
        return sums

    async def hashes(self, parts: Sequence[Part], by: Buckets, buckets: Sequence[int]) -> Counter[str]:
        """Read hash and key of the rows in some buckets."""
        assert isinstance(by, HashBuckets)
        wanted = frozenset(buckets)
        found: Counter[str] = Counter()
        async for rows in self._rows(parts):
            found.update(row_name(hashed, self._key(row)) for hashed, row in rows if hashed & by.mask in wanted)
        return found

    async def cells(self, keys: Sequence[Sequence[str]], *, values: bool) -> Mapping[Key, Sequence[Row]]:
        """Read the rows with these keys."""
        found: dict[Key, list[Row]] = {}
        if not isinstance(self._source, KeyedRowSource):
            wanted = {tuple(key) for key in keys}
            async for rows in self._rows([Part()]):
                for _, row in rows:
                    if (key := self._key(row)) in wanted:
                        found.setdefault(key, []).append(_cells(row, row, values=values))
            return found
        for driven in await self._source.rows_by_key(keys):
            texts = [text(value) for text, value in zip(self._texts, driven, strict=True)]
            found.setdefault(self._key(texts), []).append(_cells(texts, driven, values=values))
        return found

    async def values(self, hashes: Sequence[int]) -> Mapping[int, Row]:
        """Read rows with these hashes."""
        wanted = frozenset(hashes)
        found: dict[int, Row] = {}
        async for rows in self._rows([Part()]):
            found.update({hashed: [text and text[:_SHOWN] for text in row] for hashed, row in rows if hashed in wanted})
        return found


def _cells(texts: Row, shown: Sequence[object], *, values: bool) -> Row:
    digests = [None if text is None else hashlib.md5(_encoded(text), usedforsecurity=False).hexdigest() for text in texts]
    return [*digests, *(map(_shown, shown) if values else ())]


def _text(base: str) -> Text:
    plain = normalizer(SQL_NAMES.get(base, base))
    if base.startswith("_"):
        element = {"_float4": _real_text, "_float8": _double_text}.get(base)
        return lambda value: array_literal(value, element) if isinstance(value, list) else plain(value)
    match base:
        case "float4" | "float8":
            return lambda value: _without_sign_of_zero(plain(value))
        case "numeric":
            return lambda value: _without_zeros(plain(value))
        case "bpchar":
            return lambda value: None if value is None else (plain(value) or "").rstrip(" ")
        case _:
            return plain


def _real_text(value: object) -> str:
    return float4_text(struct.pack(">f", value))


def _double_text(value: object) -> str:
    return float8_text(struct.pack(">d", value))


def _without_sign_of_zero(bits: str | None) -> str | None:
    return "0" * len(bits) if bits is not None and bits.strip("0") == "8" and bits[0] == "8" else bits


def _without_zeros(text: str | None) -> str | None:
    return text.rstrip("0").rstrip(".") if text is not None and "." in text else text


def _hash(row: Row) -> int:
    whole = "\x01".join(["\x02" if text is None else text for text in row])
    return int.from_bytes(hashlib.md5(_encoded(whole), usedforsecurity=False).digest()[:8], "big", signed=True)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _shown(value: object) -> str | None:
    return None if value is None else str(value)[:_SHOWN]
