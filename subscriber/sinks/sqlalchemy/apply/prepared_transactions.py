"""Prepared transactions of the publisher, stored in the target until their COMMIT PREPARED or ROLLBACK PREPARED.

Only PostgreSQL has prepared transactions that survive their session without blocking unrelated work. So this sink stores the *records* of a
prepared transaction in ``prepared_transaction_chunk``, and applies them at COMMIT PREPARED. After a PREPARE was acknowledged, the publisher
never sends the transaction again: the stored records are as valuable as applied data. The row that completes them is committed together
with the position.

A stored transaction can be read on its own. Only changes of relations that the gate allowed at PREPARE are stored. Each relation's
description is stored before its first change, even if the stream sent it in an earlier transaction. (The columns of the relation cannot
have changed in between: a prepared transaction on the publisher holds locks that block ALTER TABLE.)

The row that completes them has a twin in ``received_prepare``, which is written and removed with it. Before 18, a publisher sends only
COMMIT PREPARED of a transaction without changes. So one without both rows was never received, and one that only the twin knows is lost.

============================  =====================================  ==================================================================
 crash                         state of the target                    recovery
============================  =====================================  ==================================================================
 while records are stored      chunks, but no complete row; the       PREPARE comes again, removes the chunks and starts over; or
                               position is before PREPARE             ROLLBACK PREPARED comes and removes them
 after the last record         a complete row, and in the same        PREPARE does not come again, or is recognized as done
                               commit the position after PREPARE
 while it is applied           as before: changes, removal and        COMMIT PREPARED comes again and applies it
                               position are one transaction
 after it was applied          neither row nor chunks; the position   COMMIT PREPARED, if it comes again, is skipped
                               is after COMMIT PREPARED
============================  =====================================  ==================================================================

The LSN of a PREPARE does not decide whether it is stored. A PREPARE from before two-phase was enabled for the slot is sent late, right
before its COMMIT PREPARED, with its original LSN, which is far before the position. If such a pair comes again after it was applied, its
PREPARE is stored once more, and its COMMIT PREPARED, which is not past the position, removes it.

If the target rejects a change, COMMIT PREPARED raises an ApplyError: the error cannot occur earlier. The transaction stays stored. It is
retried, or skipped by the LSN of COMMIT PREPARED.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from struct import Struct
from typing import Any, Final

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.errors import DataLossError, TargetError
from subscriber.interfaces import RelationGate
from subscriber.protocol.decoder import decode
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, Relation, RollbackPrepared, Tag, Truncate
from subscriber.sinks.prepared_errors import lost_prepared, never_prepared
from subscriber.sinks.runs import CHANGES
from subscriber.sinks.sqlalchemy.apply.applier import Applier, Finish
from subscriber.sinks.sqlalchemy.apply.relation_map import RelationMap
from subscriber.sinks.sqlalchemy.catalog_tables import TABLES
from subscriber.sinks.sqlalchemy.session.fence import Fence
from subscriber.sinks.sqlalchemy.session.session import Session
from subscriber.sinks.sqlalchemy.session.statement_size import limit_of
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["PreparedTransactions"]

_LENGTH: Final = Struct(">I")
_RELATION_ID: Final = Struct(">I").unpack_from
_CHUNK: Final = 256 * 1024
_PER_COMMIT: Final = 8 * 1024**2


class PreparedTransactions:
    """The two-phase messages of one subscription. After each call the position is not before its message, durably.

    Args:
        session: the apply worker's session.
        fence: the sink's fence.
        applier: the subscription's applier.
        make_relations: creates an empty map of relations, for a stored transaction.
    """

    def __init__(self, session: Session, fence: Fence, applier: Applier, make_relations: Callable[[], RelationMap]) -> None:
        self._session = session
        self._fence = fence
        self._applier = applier
        self._make_relations = make_relations
        self._oid = applier.owner.oid

    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate, finish: Finish | None = None) -> None:
        """Store a transaction, unless it is stored already. ``finish`` is executed in the target transaction that completes it.

        Raises:
            TargetError, TargetUnavailable, ProtocolError, SpoolError
        """
        transaction, relations = prepared.transaction, self._applier.relations
        async with self._session.snapshot() as connection:
            header = await self._header(connection, transaction.xid)
        if header is not None and (header["gid"], header["prepare_end_lsn"]) == (prepared.gid, transaction.end_lsn):
            await self._applier.move(transaction.end_lsn, finish)
            await self._applier.skip(transaction)
            return
        remembered = relations.remembered()
        done = False
        try:
            await self._keep(prepared, gate, finish)
            done = True
        finally:
            if not done:
                relations.restore(remembered)
        await transaction.discard()

    async def _keep(self, prepared: PreparedTransaction, gate: RelationGate, finish: Finish | None) -> None:
        transaction = prepared.transaction
        writing = _Chunks(self._oid, transaction.xid)
        keeping = _Keeping(transaction, gate, self._applier.relations)
        started = False
        async for chunk in transaction.chunks():
            for record in chunk:
                for kept in keeping.kept(record):
                    writing.add(kept)
            if writing.waiting >= _PER_COMMIT:
                async with self._session.transaction() as connection:
                    await self._fence.hold(connection)
                    if not started:
                        await self._remove(connection, transaction.xid)
                    await self._write(connection, writing.take(limit_of(connection).chunk))
                started = True

        async def complete(connection: AsyncConnection) -> None:
            if not started:
                await self._remove(connection, transaction.xid)
            await self._write(connection, writing.take(limit_of(connection).chunk, last=True))
            await connection.execute(insert(TABLES["prepared_transaction"]).values(self._header_values(prepared, writing)))
            await connection.execute(insert(TABLES["received_prepare"]).values(srsubid=self._oid, xid=transaction.xid))
            if finish is not None:
                await finish(connection)

        await self._applier.move(transaction.end_lsn, complete)

    def _header_values(self, prepared: PreparedTransaction, writing: _Chunks) -> dict[str, Any]:
        transaction = prepared.transaction
        origin = transaction.origin
        return {
            "srsubid": self._oid,
            "xid": transaction.xid,
            "gid": prepared.gid,
            "prepare_lsn": transaction.final_lsn,
            "prepare_end_lsn": transaction.end_lsn,
            "prepare_time": transaction.commit_time,
            "origin_name": None if origin is None else origin.name,
            "origin_lsn": None if origin is None else origin.commit_lsn,
            "prefixed": transaction.prefixed,
            "changes": writing.records,
            "size": writing.size,
            "complete": True,
        }

    async def _write(self, connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> None:
        # one by one, so that no statement is larger than a chunk
        for row in rows:
            await connection.execute(insert(TABLES["prepared_transaction_chunk"]).values(row))

    async def _header(self, connection: AsyncConnection, xid: int) -> Mapping[str, Any] | None:
        table = TABLES["prepared_transaction"]
        query = select(table).where(table.c.srsubid == self._oid, table.c.xid == xid, table.c.complete)
        row = (await connection.execute(query)).mappings().one_or_none()
        return None if row is None else dict(row)

    async def _was_received(self, xid: int) -> bool:
        table = TABLES["received_prepare"]
        async with self._session.snapshot() as connection:
            return (await connection.execute(select(table).where(table.c.srsubid == self._oid, table.c.xid == xid))).first() is not None

    async def _remove(self, connection: AsyncConnection, xid: int) -> None:
        for table in (TABLES["prepared_transaction_chunk"], TABLES["prepared_transaction"], TABLES["received_prepare"]):
            await connection.execute(delete(table).where(table.c.srsubid == self._oid, table.c.xid == xid))

    async def commit(self, message: CommitPrepared, gate: RelationGate) -> None:
        """Apply the stored transaction, unless it was applied already. The gate is asked a second time.

        Raises:
            DataLossError: it was received, and is lost. NeverPrepared: it was never received.
            ApplyError, RelationError: the target rejected a change; the transaction stays stored.
            TargetError, TargetUnavailable
        """
        async with self._session.snapshot() as connection:
            header = await self._header(connection, message.xid)

        async def remove(connection: AsyncConnection) -> None:
            await self._remove(connection, message.xid)

        if message.end_lsn <= self._applier.position:
            if header is not None:
                await self._applier.move(self._applier.position, remove)
            else:
                self._applier.settled()
            return
        if header is None and not await self._was_received(message.xid):
            raise never_prepared(message)
        if header is None or header["gid"] != message.gid:
            raise lost_prepared(message)
        transaction = Transaction(
            xid=message.xid,
            final_lsn=message.commit_lsn,
            end_lsn=message.end_lsn,
            commit_time=message.commit_time,
            prefixed=header["prefixed"],
            records=[],
            spilled=header["changes"],
            size=header["size"],
        )
        transaction.spool = _Kept(self._session, self._oid, transaction)

        try:
            await self._applier.apply_all([transaction], gate, self._make_relations(), remove)
        except TargetError as error:
            error.add_note(f'at COMMIT PREPARED of "{message.gid}", which stays prepared')
            raise

    async def rollback(self, message: RollbackPrepared) -> None:
        """Remove the stored transaction, if there is one: its PREPARE may be from before two-phase was enabled for the slot.

        Raises:
            TargetError, TargetUnavailable
        """
        await self._forget(message, message.rollback_end_lsn)

    async def skip(self, message: CommitPrepared, finish: Finish) -> None:
        """Remove the stored transaction without applying it. ``finish`` is executed in the same target transaction.

        Raises:
            TargetError, TargetUnavailable
        """
        await self._forget(message, message.end_lsn, finish)

    async def _forget(self, message: CommitPrepared | RollbackPrepared, lsn: Lsn, finish: Finish | None = None) -> None:
        async with self._session.snapshot() as connection:
            header = await self._header(connection, message.xid)

        async def remove(connection: AsyncConnection) -> None:
            # without a complete row, remove the chunks of a PREPARE that was interrupted
            if header is None or header["gid"] == message.gid:
                await self._remove(connection, message.xid)
            if finish is not None:
                await finish(connection)

        await self._applier.move(lsn, remove)


class _Keeping:
    """Chooses the records of a transaction to store, and adds descriptions of relations that an earlier transaction brought."""

    def __init__(self, transaction: Transaction, gate: RelationGate, relations: RelationMap) -> None:
        self._transaction = transaction
        self._gate = gate
        self._relations = relations
        self._offset = 5 if transaction.prefixed else 1
        self._wanted: dict[int, bool] = {}

    def kept(self, record: bytes) -> list[bytes]:
        """Return the records to store for one received record.

        Raises:
            ProtocolError
        """
        tag = record[0] if record else 0
        if tag in CHANGES:
            # decode it to detect a damaged record now: once it is stored, the publisher does not send it again
            decode(record, in_stream=self._transaction.prefixed)
            relation_id = _RELATION_ID(record, self._offset)[0]
            return [*self._description(relation_id), record] if self._is_wanted(relation_id) else []
        if tag not in {Tag.RELATION, Tag.TRUNCATE}:
            return []
        message = decode(record, in_stream=self._transaction.prefixed)
        if isinstance(message, Relation):
            if self._relations.define(message):
                self._wanted.pop(message.relation_id, None)
            return []
        if not isinstance(message, Truncate):
            return []
        wanted = tuple(relation_id for relation_id in message.relation_ids if self._is_wanted(relation_id))
        found = [description for relation_id in wanted for description in self._description(relation_id)]
        return [*found, encode(_truncate(message, wanted))] if wanted else []

    def _is_wanted(self, relation_id: int) -> bool:
        return relation_id in self._wanted or bool(self._gate(self._relations.remote(relation_id), self._transaction.final_lsn))

    def _description(self, relation_id: int) -> list[bytes]:
        if relation_id in self._wanted:
            return []
        self._wanted[relation_id] = True
        relation = self._relations.remote(relation_id)
        return [encode(replace(relation, xid=self._transaction.xid if self._transaction.prefixed else None))]


def _truncate(message: Truncate, relation_ids: tuple[int, ...]) -> Truncate:
    return replace(message, relation_ids=relation_ids)


class _Chunks:
    """Converts records to rows of ``prepared_transaction_chunk``: a stream of bytes, each record after its length, cut into pieces."""

    def __init__(self, oid: int, xid: int) -> None:
        self._oid = oid
        self._xid = xid
        self._buffer = bytearray()
        self._number = 0
        self.records = 0
        self.size = 0

    @property
    def waiting(self) -> int:
        """The number of bytes that were not taken yet."""
        return len(self._buffer)

    def add(self, record: bytes) -> None:
        """Add a record."""
        self._buffer += _LENGTH.pack(len(record))
        self._buffer += record
        self.records += 1
        self.size += len(record)

    def take(self, most: int, *, last: bool = False) -> list[dict[str, Any]]:
        """Take rows of whole chunks, each of at most ``most`` bytes. ``last``: also take the rest, as a smaller chunk."""
        rows: list[dict[str, Any]] = []
        size = min(most, _CHUNK)
        end = len(self._buffer) if last else len(self._buffer) // size * size
        for start in range(0, end, size):
            data = bytes(self._buffer[start : min(start + size, end)])
            rows.append({"srsubid": self._oid, "xid": self._xid, "number": self._number, "data": data})
            self._number += 1
        del self._buffer[:end]
        return rows


class _Kept:
    """Reads stored records, in the session's open transaction. A :class:`subscriber.transaction.model.SpooledRecords`."""

    def __init__(self, session: Session, oid: int, transaction: Transaction) -> None:
        self._session = session
        self._records = transaction.spilled
        self._chunk = TABLES["prepared_transaction_chunk"]
        self._row = (self._chunk.c.srsubid == oid, self._chunk.c.xid == transaction.xid)

    async def chunks(self, start: int = 0) -> AsyncIterator[Sequence[bytes]]:
        """See :meth:`subscriber.transaction.model.SpooledRecords.chunks`."""
        waiting = bytearray()
        number = read = 0
        while True:
            query = select(self._chunk.c.data).where(*self._row, self._chunk.c.number == number)
            data = (await self._session.connection.execute(query)).scalar()
            if data is None:
                break
            number += 1
            waiting += data
            records = _taken(waiting)
            wanted = records[max(start - read, 0) :]
            read += len(records)
            if wanted:
                yield wanted
        if waiting or read != self._records:
            raise DataLossError(
                "a prepared transaction that was kept in the target is damaged", hint="restore the target, or copy its tables again"
            )

    async def discard(self) -> None:
        """Do nothing: the transaction that applies the records removes them."""


def _taken(waiting: bytearray) -> list[bytes]:
    """Take all complete records from the beginning of the buffer."""
    found = []
    position = 0
    while position + _LENGTH.size <= len(waiting):
        end = position + _LENGTH.size + _LENGTH.unpack_from(waiting, position)[0]
        if end > len(waiting):
            break
        found.append(bytes(waiting[position + _LENGTH.size : end]))
        position = end
    del waiting[:position]
    return found
