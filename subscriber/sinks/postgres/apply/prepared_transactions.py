"""Apply prepared transactions of the publisher as prepared transactions of the target.

A prepared transaction has PostgreSQL's name for it: ``pg_gid_<subscription oid>_<remote xid>``. After a crash, the position may be before
the message, which is then sent again. The catalogs show what was done:

=====================  ==============  ===========================================================================
 the gid is             its row is      state
=====================  ==============  ===========================================================================
 in pg_prepared_xacts   (invisible)     PREPARE is done; COMMIT PREPARED is still to be done
 missing                visible         COMMIT PREPARED is done; the position is still to be moved
 missing                missing         PREPARE is still to be done; at COMMIT PREPARED: the transaction is lost
=====================  ==============  ===========================================================================

The row of ``subscriber.prepared_transaction`` is inserted inside the transaction, and thus becomes visible with COMMIT PREPARED. It is
deleted in the transaction that moves the position.

A transaction that is missing at COMMIT PREPARED was either rolled back in the target, and so is lost, or its PREPARE was never sent: for a
transaction without changes, PostgreSQL 15 to 17 send only COMMIT PREPARED. A second row distinguishes the two cases. It is written after
PREPARE TRANSACTION, together with the position, or when the target rejected the transaction. It is visible until it is deleted at the end.

The position moves in a separate transaction after PREPARE TRANSACTION. As part of the prepared transaction, the position's row would stay
locked until COMMIT PREPARED, and every later transaction would wait for it.

The LSN of a PREPARE does not tell whether it is done. A PREPARE from before the slot's two-phase start is sent late, right before its
COMMIT PREPARED, with its old LSN, which is less than the position (``ReorderBufferFinishPrepared``). The table above is sufficient.

If the session has a replication origin, each of these commands gets the LSN and time of its message, as every commit of the apply worker.

PREPARE TRANSACTION and COMMIT PREPARED flush the WAL with any value of synchronous_commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from subscriber import crash_points
from subscriber.errors import DataLossError, TargetError
from subscriber.interfaces import RelationGate
from subscriber.protocol.lsn import Lsn, kept_in_years
from subscriber.protocol.messages import CommitPrepared, RollbackPrepared
from subscriber.sinks.apply_counters import ChangeContext, describe
from subscriber.sinks.postgres.apply.applier import Applier
from subscriber.sinks.postgres.catalog.session_rows import SessionRows
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.prepared_errors import never_prepared
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["PreparedTransactions"]

# times of the publisher are microseconds since 2000-01-01
_XACT_SETUP: Final = """
SELECT pg_catalog.pg_replication_origin_xact_setup(
    %s::pg_lsn, '2000-01-01 00:00:00+00'::timestamptz + %s::int8 * '1 microsecond'::interval)
"""


class PreparedTransactions:
    """The two-phase messages of one subscription. When a call returns, the position is after its message, and is on disk."""

    def __init__(self, session: ApplySession, rows: SessionRows, applier: Applier) -> None:
        self._session = session
        self._rows = rows
        self._applier = applier

    def gid(self, xid: int) -> str:
        """PostgreSQL's name of a prepared transaction on the subscriber."""
        return f"pg_gid_{self._rows.oid}_{xid}"

    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None:
        """Apply and prepare a transaction, unless that is done.

        Raises:
            TargetError: prepared transactions are disabled in the target; or as :meth:`Applier.prepare`.
        """
        transaction = prepared.transaction
        if await self.is_done(transaction.xid):
            await self._applier.skip(transaction)
        else:
            await self._require_prepared_transactions()
            try:
                await self._applier.prepare(transaction, gate, self.gid(transaction.xid))
            except TargetError:
                # if it is skipped now, its COMMIT PREPARED must be an error
                with contextlib.suppress(TargetError):
                    await self._note_received(transaction)
                raise
        await self.prepared(transaction)

    async def is_done(self, xid: int, session: ApplySession | None = None) -> bool:
        """Whether a transaction is already prepared or committed. Use another ``session`` while the apply session is busy."""
        session, gid = session or self._session, self.gid(xid)
        return await _is_prepared(session, gid) or await self._has_row(session, gid)

    async def prepared(self, transaction: Transaction) -> None:
        """Note that the transaction is prepared, and move the position to its end, unless the position is already past it."""
        crash_points.reached("postgres.prepared")
        await transaction.discard()
        async with self._session.transaction():
            await self._note_received(transaction)
            if transaction.end_lsn > self._applier.position:
                await self._rows.move_position(transaction.end_lsn)
        self._applier.position = max(self._applier.position, transaction.end_lsn)

    async def _note_received(self, transaction: Transaction) -> None:
        await self._session.fetch(
            "INSERT INTO subscriber.prepared_transaction (srsubid, xid, gid, prepare_end_lsn)"
            " VALUES (%s::int8::oid, %s, %s, %s::pg_lsn) ON CONFLICT DO NOTHING",
            self._rows.oid,
            transaction.xid,
            _received(self.gid(transaction.xid)),
            str(transaction.end_lsn),
        )

    async def commit(self, message: CommitPrepared, _gate: RelationGate) -> None:
        """COMMIT PREPARED, unless that is done. The changes were made at PREPARE.

        Raises:
            DataLossError: the prepared transaction is missing and was not committed. NeverPrepared: its PREPARE was never received.
        """
        if message.end_lsn <= self._applier.position:
            self._applier.ended(message.xid, committed=True)
            return
        gid = self.gid(message.xid)
        if await _is_prepared(self._session, gid):
            await self._set_up_origin(message.end_lsn, message.commit_time)
            with self._naming("COMMIT PREPARED", message.xid, message.commit_lsn):
                await self._session.fetch(f"COMMIT PREPARED '{gid}'")
            crash_points.reached("postgres.commit_prepared")
        elif not await self._has_row(self._session, gid):
            if not await self._has_row(self._session, _received(gid)):
                raise never_prepared(message)
            raise DataLossError(
                f'prepared transaction with identifier "{gid}" does not exist in the target, and was not committed there',
                hint="it was rolled back in the target, or the target was restored from a backup: copy its tables again",
            )
        await self._end(message.end_lsn, gid)
        self._applier.ended(message.xid, committed=True)

    async def rollback(self, message: RollbackPrepared) -> None:
        """ROLLBACK PREPARED if the prepared transaction exists. It may be missing: its PREPARE may be older than the two-phase start."""
        if message.rollback_end_lsn <= self._applier.position:
            self._applier.ended(message.xid, committed=False)
            return
        gid = self.gid(message.xid)
        if await _is_prepared(self._session, gid):
            await self._set_up_origin(message.rollback_end_lsn, message.rollback_time)
            with self._naming("ROLLBACK PREPARED", message.xid, message.rollback_end_lsn):
                await self._session.fetch(f"ROLLBACK PREPARED '{gid}'")
            crash_points.reached("postgres.rollback_prepared")
        await self._end(message.rollback_end_lsn, gid)
        self._applier.ended(message.xid, committed=False)

    async def _set_up_origin(self, lsn: Lsn, microseconds: int) -> None:
        if self._session.origin is not None:
            await self._session.fetch(_XACT_SETUP, str(lsn), kept_in_years(microseconds))

    @contextlib.contextmanager
    def _naming(self, message_type: str, xid: int, lsn: Lsn) -> Iterator[None]:
        try:
            yield
        except TargetError as error:
            error.add_note(describe(ChangeContext(f"pg_{self._rows.oid}", xid, lsn), message_type))
            raise

    async def _end(self, lsn: Lsn, gid: str) -> None:
        async with self._session.transaction():
            await self._rows.move_position(lsn)
            await self._session.fetch(
                "DELETE FROM subscriber.prepared_transaction WHERE srsubid = %s::int8::oid AND gid IN (%s, %s)",
                self._rows.oid,
                gid,
                _received(gid),
            )
        self._applier.position = lsn

    async def _has_row(self, session: ApplySession, gid: str) -> bool:
        query = "SELECT 1 FROM subscriber.prepared_transaction WHERE srsubid = %s::int8::oid AND gid = %s"
        return bool(await session.fetch(query, self._rows.oid, gid))

    async def _require_prepared_transactions(self) -> None:
        if (await self._session.fetch("SELECT pg_catalog.current_setting('max_prepared_transactions')::int"))[0][0] == 0:
            raise TargetError(
                "prepared transactions are disabled in the target",
                sqlstate="55000",
                hint="set max_prepared_transactions of the target to a value above zero and restart it, or use two_phase = false",
            )


async def _is_prepared(session: ApplySession, gid: str) -> bool:
    return bool(
        await session.fetch("SELECT 1 FROM pg_catalog.pg_prepared_xacts WHERE gid = %s AND database = pg_catalog.current_database()", gid)
    )


def _received(gid: str) -> str:
    """The key of the row that proves that a PREPARE was received. The row of the gid is invisible and locked until COMMIT PREPARED."""
    return f"received {gid}"
