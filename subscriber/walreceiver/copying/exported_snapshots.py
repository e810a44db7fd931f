"""Snapshots of the publisher for a moment that the caller chooses, exported for other sessions.

Two sessions are opened beforehand, so that :meth:`SnapshotExporter.take` needs two roundtrips only.

Source: PostgreSQL manual, Snapshot Synchronization Functions; Transaction ID and Snapshot Information Functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Self

from subscriber.errors import PublisherError
from subscriber.protocol.lsn import Lsn
from subscriber.transaction.visibility import XidSnapshot
from subscriber.walreceiver.session import Session

__all__ = ["SnapshotExporter", "TakenSnapshot"]

_TAKE: Final = """
BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY;
SELECT pg_catalog.pg_export_snapshot(), pg_catalog.pg_current_snapshot()::text, pg_catalog.pg_current_wal_insert_lsn()::text
"""
# With synchronous_commit = off a commit is visible before it is flushed, and a walsender sends only what is flushed. This transaction
# flushes everything before it. Its message is not sent: the stream does not ask for messages.
_FLUSH: Final = """
BEGIN READ WRITE; SET LOCAL synchronous_commit = local;
SELECT pg_catalog.pg_logical_emit_message(true, 'subscriber', 'snapshot'); COMMIT
"""


@dataclass(frozen=True, slots=True)
class TakenSnapshot:
    """A snapshot that other sessions can import while the exporter is open and has taken no other one.

    Attributes:
        name: for SET TRANSACTION SNAPSHOT.
        xids: the transactions that it sees.
        wal_end: each of them was committed before.
    """

    name: str
    xids: XidSnapshot
    wal_end: Lsn


class SnapshotExporter:
    """Takes snapshots. :meth:`open` creates it.

    Attributes:
        session: is in the transaction of the latest snapshot.
    """

    def __init__(self, session: Session, flusher: Session) -> None:
        self.session = session
        self._flusher = flusher
        self._taken = False

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, conninfo: str, *, application_name: str) -> AsyncIterator[Self]:
        """Connect to the publisher.

        Raises:
            PublisherError: it cannot be reached, or it is a standby.
        """
        async with await Session.connect(conninfo, application_name=application_name) as session:
            if await session.is_standby():
                raise PublisherError(
                    "the publisher is a standby: its snapshots cannot be compared with its WAL", hint="verify against the primary server"
                )
            session.reads_rows = True
            async with await session.sibling("flush") as flusher:
                yield cls(session, flusher)

    async def take(self) -> TakenSnapshot:
        """Take a snapshot in place of the one before.

        Raises:
            PublisherError: or a subclass.
        """
        if self._taken:
            await self.session.execute("ROLLBACK")
        self._taken = True
        ((name, xids, wal_end),) = await self.session.execute(_TAKE)
        await self._flusher.execute(_FLUSH)
        return TakenSnapshot(name or "", XidSnapshot.parse(xids or ""), Lsn.parse(wal_end or ""))
