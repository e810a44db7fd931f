"""Values of common types: the stored value is the same for all formats."""

from __future__ import annotations

from collections.abc import AsyncIterator
from struct import pack
from typing import Final
from uuid import UUID

from subscriber.interfaces import CopyFormat, Position, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.testing.compliance.feed import START, SYSTEM, Feed
from subscriber.testing.compliance.sample_messages import Binary, Table
from subscriber.testing.compliance.scenarios import Scenarios

__all__ = ["scenarios"]

scenarios = Scenarios("types")

_COLUMNS: Final = (
    "flag bool",
    "small int2",
    "big int8",
    "label",
    "blob bytea",
    "double float8",
    "exact numeric",
    "day date",
    "stamp timestamp",
    "at timestamptz",
    "ident uuid",
    "tree jsonb",
)
_TABLE: Final = Table("specimens", "*id int4", *_COLUMNS)

_UUID: Final = "123e4567-e89b-12d3-a456-426614174000"
_ROWS: Final[tuple[tuple[str | None, ...], ...]] = (
    (
        "1", "t", "-32768", "9223372036854775807", "ä\t\n\\ '\"€😀", "\\x00ff10", "1.5", "12345.67890", "2024-02-29",
        "2024-02-29 12:34:56.789012", "2024-02-29 23:59:59+00", _UUID, '{"a": [1, null, "ü"]}',
    ),
    (
        "2", "f", "32767", "-9223372036854775808", "", "\\x", "-1e-300", "-0.00001", "1000-01-01",
        "9999-12-31 23:59:59.999999", "2000-01-01 00:00:00+00", _UUID.replace("1", "f"), '"text"',
    ),
    ("3", *[None] * len(_COLUMNS)),
)  # fmt: skip
_DAY: Final = 8825
_SECONDS: Final = _DAY * 86400


@scenarios
async def in_text(feed: Feed) -> None:
    """Inserted, and updated to each other, in the text format."""
    t = _TABLE
    await feed.create(t)
    await feed.apply(t.relation, *(t.insert(*row) for row in _ROWS))
    await feed.expect(t, *_ROWS)
    await feed.apply(*(t.update(row[0], *other[1:]) for row, other in zip(_ROWS, reversed(_ROWS), strict=True)))
    await feed.expect(t, *((row[0], *other[1:]) for row, other in zip(_ROWS, reversed(_ROWS), strict=True)))


@scenarios.needing("binary")
async def in_binary(feed: Feed) -> None:
    """The first of the rows in the binary format, then found by its binary key."""
    t = _TABLE
    first = _ROWS[0]
    await feed.create(t)
    values = (
        Binary(pack(">i", 1)),
        Binary(b"\1"),
        Binary(pack(">h", -32768)),
        Binary(pack(">q", 2**63 - 1)),
        Binary(str(first[4]).encode()),
        Binary(b"\x00\xff\x10"),
        Binary(pack(">d", 1.5)),
        Binary(pack(">hhHH3h", 3, 1, 0, 5, 1, 2345, 6789)),
        Binary(pack(">i", _DAY)),
        Binary(pack(">q", (_SECONDS + 12 * 3600 + 34 * 60 + 56) * 10**6 + 789012)),
        Binary(pack(">q", (_SECONDS + 86399) * 10**6)),
        Binary(UUID(_UUID).bytes),
        Binary(b"\1" + str(first[12]).encode()),
    )
    await feed.apply(t.relation, t.insert(*values))
    await feed.expect(t, first)
    await feed.apply(t.update(*values[:4], Binary(b"changed"), *values[5:]))
    await feed.expect(t, (*first[:4], "changed", *first[5:]))
    await feed.apply(t.delete(values[0], *[None] * len(_COLUMNS)))
    await feed.expect(t)


@scenarios
async def in_a_copy(feed: Feed) -> None:
    """Copied in the text format, and then found by their keys."""
    t = _TABLE
    await feed.begin(TableState.INIT, t)
    sink = feed.opened.open_table(t.name)
    await sink.begin()
    await sink.start_copy()
    await sink.describe(t.published)
    escapes = {"\\": "\\\\", "\t": "\\t", "\n": "\\n"}
    lines = [
        "\t".join("\\N" if value is None else "".join(escapes.get(letter, letter) for letter in value) for value in row).encode() + b"\n"
        for row in _ROWS
    ]

    async def chunks() -> AsyncIterator[bytes]:
        for line in lines:
            yield line

    await sink.copy([column.name for column in t.sent], CopyFormat.TEXT, chunks())
    copied = Position("a_sync_slot", SYSTEM, 1, Lsn(START + 0x10))
    await sink.finish_copy(copied)
    await feed.hand_over(sink, copied.lsn)
    await sink.close()
    await feed.expect(t, *_ROWS)
