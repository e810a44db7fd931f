"""Replace rows of the target by those of the publisher: see :meth:`subscriber.interfaces.RepairingSink.repair`.

They are replaced as in a reconciliation, but in the apply session, between two batches. So no other session of the subscription changes the
rows meanwhile, and foreign keys do not fire.

A prepared transaction, or one that is applied while it is streamed, may have locked the rows. It ends only when apply continues. So repair
waits for a lock for one second only. Then it fails, and changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from subscriber.errors import TargetUnavailable
from subscriber.interfaces import CopyFormat, PublishedTable, ReplacedKeys, TableName
from subscriber.protocol.quoting import quote_identifier
from subscriber.sinks.postgres.apply.change_sql import set_role
from subscriber.sinks.postgres.catalog.session_rows import SessionRows
from subscriber.sinks.postgres.copy.replaced_rows import ReplacedRows
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.session.firing import first_firing
from subscriber.sinks.postgres.session.postgres_errors import translated
from subscriber.sinks.postgres.session.queries import run_query
from subscriber.sinks.postgres.tables.relation_mapping import described_relation, map_relation, qualified_name
from subscriber.sinks.postgres.tables.table_reader import read_table

__all__ = ["repair_rows"]

_LOCKED: Final = "55P03"
_LOCK_TIMEOUT: Final = "1s"

Row = Sequence[str | None]


async def repair_rows(
    session: ApplySession,
    reader: CatalogReader,
    table: PublishedTable,
    *,
    oid: int,
    key: Sequence[str],
    keys: Sequence[Row],
    rows: Sequence[Row],
    as_owner: bool,
) -> None:
    """Replace rows in one transaction.

    Args:
        session: applies; no transaction is open.
        reader: reads the catalogs.
        table: as published.
        oid: of the subscription.
        key: columns that identify a row.
        keys: values of these columns.
        rows: the publisher's rows with these keys.
        as_owner: whether changes are made as the table's owner.

    Raises:
        ApplyError, RelationError, TargetError, TargetUnavailable
    """
    target = await read_table(reader, table.name, as_owner=as_owner)
    map_relation(described_relation(table), target)
    if (fires := await first_firing(session.fetch, [target.name], lambda _: "%s")) is not None:
        raise fires.fires_for_replaced(target.name)

    async def read() -> Sequence[Row]:
        return rows

    writing = _Session(session, table)
    try:
        async with session.transaction():
            await SessionRows(session, oid).require_alone([table.name])
            await session.fetch(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
            await session.fetch(set_role(target.role).sql.decode())
            replaced = ReplacedRows(writing, writing, target, table.columns, kept="")
            await replaced.replace([ReplacedKeys(tuple(key), keys, read)], CopyFormat.TEXT)
    except TargetUnavailable as error:
        if error.sqlstate != _LOCKED:
            raise
        raise TargetUnavailable(
            f'rows of table "{table.name}" that must be repaired are locked in the target',
            hint="try again when the transaction that changes them has ended; it may be a prepared or a streamed one of the publisher",
        ) from error


class _Session:
    """The apply session, for :class:`ReplacedRows`."""

    def __init__(self, session: ApplySession, table: PublishedTable) -> None:
        self._connection = session.connection
        self._table = table

    async def fetch(self, query: str, /, *values: object) -> Sequence[Sequence[Any]]:
        return await run_query(self._connection, query, *values)

    async def execute(self, query: str, /, *values: object) -> object:
        return await run_query(self._connection, query, *values)

    async def copy(self, copy_format: CopyFormat, data: AsyncIterator[bytes], *, into: TableName | None = None) -> None:
        columns = ", ".join(map(quote_identifier, self._table.columns))
        statement = f"COPY {qualified_name(into or self._table.name)} ({columns}) FROM STDIN WITH (FORMAT {copy_format.value})"
        with translated():
            async with self._connection.cursor().copy(statement.encode()) as copy:
                async for piece in data:
                    await copy.write(piece)
