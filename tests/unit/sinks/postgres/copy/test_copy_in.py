"""COPY FROM STDIN: the table, columns and format that asyncpg is given, and the pieces of the data."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from subscriber.interfaces import CopyFormat, TableName
from subscriber.sinks.postgres.copy.copy_in import CopyIn


class RecordingConnection:
    """Stands for asyncpg's connection, which makes COPY statements from these arguments: it records them and reads the data."""

    def __init__(self) -> None:
        self.copied: list[tuple[str, str, list[str], str]] = []
        self.data: list[bytes] = []

    async def copy_to_table(
        self, table_name: str, *, source: AsyncIterator[bytes], columns: list[str], schema_name: str, format: str
    ) -> None:
        self.copied.append((schema_name, table_name, columns, format))
        self.data += [piece async for piece in source]

    def add_termination_listener(self, _callback: object) -> None:
        pass

    def remove_termination_listener(self, _callback: object) -> None:
        pass


async def copied(copy_format: CopyFormat, table: TableName, columns: list[str], *chunks: bytes) -> RecordingConnection:
    async def data() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    connection = RecordingConnection()
    with CopyIn(cast("Any", connection), table, columns) as copy:
        await copy.copy(copy_format, data())
    return connection


@pytest.mark.parametrize(("copy_format", "name"), [(CopyFormat.TEXT, "text"), (CopyFormat.BINARY, "binary")])
async def test_arguments(copy_format: CopyFormat, name: str) -> None:
    connection = await copied(copy_format, TableName("S.s", 'T "t"'), ["v", "id"], b"x\t1\n", b"y\t2\n")
    # asyncpg quotes the names
    assert connection.copied == [("S.s", 'T "t"', ["v", "id"], name)]
    assert connection.data == [b"x\t1\n", b"y\t2\n"]


async def test_large_rows_are_sent_in_pieces() -> None:
    connection = await copied(CopyFormat.TEXT, TableName("public", "t"), ["v"], b"x" * 600_000)
    assert [len(piece) for piece in connection.data] == [262_144, 262_144, 75_712]
