"""Exported snapshots, and reading tables under them.

``ExportedSnapshot`` creates a slot on a walsender connection of its own and keeps that idle. The exported snapshot holds exactly what was
committed before the slot's consistent point, and exists until the connection runs another command. Until then any number of
``SnapshotReader`` sessions may import it. A session that has imported it keeps it after the walsender is gone.

Source: PostgreSQL manual, CREATE_REPLICATION_SLOT; SET TRANSACTION; COPY.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Final, Self

import psycopg
from psycopg import pq

from subscriber.errors import PublisherError, PublisherUnavailable, SubscriberError
from subscriber.interfaces import CopyFormat
from subscriber.interfaces.conditions import SETTING_NAME
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.quoting import quote_literal
from subscriber.waits import moved
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.copy_data import drain
from subscriber.walreceiver.publisher_errors import connection_lost, result_error
from subscriber.walreceiver.session import Row, Session

__all__ = ["ExportedSnapshot", "SnapshotReader"]

_CHUNK_BYTES: Final = 128 * 1024
# errors of SET TRANSACTION SNAPSHOT: no such file (from 16 on, and before), its process is not running anymore
_GONE: Final = frozenset({"42704", "22023", "55000"})


class SnapshotReader(Session):
    """An ordinary session in a REPEATABLE READ READ ONLY transaction under an exported snapshot."""

    _has_savepoint = False

    @classmethod
    async def open(cls, conninfo: str, snapshot_name: str, *, application_name: str) -> Self:
        """Connect and import the snapshot.

        Raises:
            PublisherError: as :meth:`Session.connect`.
            PublisherUnavailable: also if the snapshot does not exist any more, because the session that exported it is gone.
        """
        reader = await cls.connect(conninfo, application_name=application_name)
        try:
            await reader.execute("BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                await reader.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(snapshot_name)}")
            except PublisherError as error:
                if error.sqlstate in _GONE:
                    raise PublisherUnavailable(f"the session that exported the snapshot was lost: {error}") from error
                raise
        except BaseException:
            await reader.close()
            raise
        reader.reads_rows = True
        return reader

    async def read(self, query: str, *values: str) -> list[Row]:
        """Run a query as :meth:`execute`, and release its locks on tables: a TRUNCATE must not wait for the end of the transaction.

        Raises:
            PublisherError: or a subclass. The transaction continues unless the session was lost.
        """
        if not self._has_savepoint:
            self._has_savepoint = True
            await self.execute("SAVEPOINT clean")
        try:
            return await self.execute(query, *values)
        finally:
            if self.pgconn.transaction_status in {pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR}:
                await self.execute("ROLLBACK TO SAVEPOINT clean")

    async def set_values(self, values: Sequence[str]) -> None:
        """Store the values of a :class:`subscriber.interfaces.Condition` as settings, for the COPY statements that follow.

        Raises:
            PublisherError: or a subclass.
        """
        names = (SETTING_NAME.format(number) for number in range(1, len(values) + 1))
        if values:
            settings = (f"pg_catalog.set_config('{name}', ${number}, true)" for number, name in enumerate(names, 1))
            await self.execute(f"SELECT {', '.join(settings)}", *values)

    async def copy_out(
        self, query: str, copy_format: CopyFormat = CopyFormat.TEXT, rows: Callable[[int], None] | None = None
    ) -> AsyncGenerator[bytes]:
        """Run ``COPY … TO STDOUT`` and yield its data as received, joined to chunks of about 128 kB.

        If the data is not read to its end, the session can only be closed.

        Args:
            query: the COPY statement.
            copy_format: the format of the statement, needed to count rows.
            rows: called after each chunk with the number of rows in it.

        Raises:
            PublisherError: or a subclass.
        """
        result = await self.query(query)
        if result.status != pq.ExecStatus.COPY_OUT:
            raise PublisherError("the publisher did not start the copy")
        reported = read = 0
        # the binary format has a trailer after the last row
        extra = 1 if copy_format is CopyFormat.BINARY else 0
        ended = False
        while not ended:
            messages, ended = await self._copy_data()
            if rows is not None:
                read += len(messages)
                counted = max(read - extra, 0)
                rows(counted - reported)
                reported = counted
            if messages:
                messages[:] = [b"".join(messages)]
                # not kept while the reader works on it
                yield messages.pop()
        while (last := await self._finish_copy()) is not None:
            if last.status == pq.ExecStatus.FATAL_ERROR:
                raise result_error(last, rows=True)

    async def _finish_copy(self) -> pq.abc.PGresult | None:
        try:
            return await self.result()
        except psycopg.Error as error:
            raise connection_lost(error) from error

    async def _copy_data(self) -> tuple[list[bytes], bool]:
        """Return messages of about one chunk, and whether the data has ended."""
        messages: list[bytes] = []
        missing = _CHUNK_BYTES
        moved()
        try:
            while True:
                # a busy publisher has sent more by now, and to wait for the socket costs as much as a hundred rows: so it reads once first
                ended, size = drain(self.pgconn, messages, missing, 1)
                missing -= size
                if ended or missing <= 0:
                    return messages, ended
                await self.more()
        except psycopg.Error as error:
            raise connection_lost(error) from error


class ExportedSnapshot:
    """A new slot and its snapshot.

    Attributes:
        slot_name: the slot's.
        consistent_point: the snapshot holds what was committed before this LSN; the slot sends the rest.
        snapshot_name: for SET TRANSACTION SNAPSHOT.
    """

    def __init__(self, conninfo: str, application_name: str, slot_name: str, consistent_point: Lsn, snapshot_name: str) -> None:
        self._conninfo = conninfo
        self._application_name = application_name
        self.slot_name = slot_name
        self.consistent_point = consistent_point
        self.snapshot_name = snapshot_name

    @classmethod
    @contextlib.asynccontextmanager
    async def create(
        cls,
        conninfo: str,
        slot_name: str,
        *,
        application_name: str,
        two_phase: bool = False,
        failover: bool = False,
        temporary: bool = False,
        system_identifier: str | None = None,
        replace: bool = False,
    ) -> AsyncIterator[Self]:
        """Create the slot and keep its snapshot until the block ends. A permanent slot stays.

        If the block fails, the slot stays too. The caller decides whether it can still be used.

        Args:
            conninfo: of the publisher.
            slot_name: of the new slot.
            application_name: of the sessions.
            two_phase: see :meth:`WalReceiverConnection.create_slot`.
            failover: see there; ignored if the publisher is too old for it.
            temporary: see there.
            system_identifier: that the publisher must have; None: any.
            replace: drop a slot of this name first.

        Raises:
            PublisherError: see :meth:`WalReceiverConnection.create_slot`.
        """
        connection = await WalReceiverConnection.connect(conninfo, application_name=application_name)
        try:
            if system_identifier is not None:
                await connection.require_system(system_identifier)
            if replace:
                await connection.drop_slot(slot_name, wait=True, missing_ok=True)
            failover = failover and connection.capabilities.failover_slots
            slot = await connection.create_slot(slot_name, snapshot="export", two_phase=two_phase, failover=failover, temporary=temporary)
            if slot.snapshot_name is None:
                raise PublisherError(f'the publisher exported no snapshot for replication slot "{slot_name}"')
            yield cls(conninfo, application_name, slot_name, slot.consistent_point, slot.snapshot_name)
        finally:
            await connection.close()

    @contextlib.asynccontextmanager
    async def reader(self) -> AsyncIterator[SnapshotReader]:
        """Open a session under the snapshot.

        Raises:
            PublisherError: see :meth:`SnapshotReader.open`.
        """
        try:
            reader = await SnapshotReader.open(self._conninfo, self.snapshot_name, application_name=self._application_name)
        except SubscriberError as error:
            error.add_note(f'importing the snapshot of replication slot "{self.slot_name}"')
            raise
        try:
            yield reader
        finally:
            await reader.close()
