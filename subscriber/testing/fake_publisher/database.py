"""What the fake publisher holds: tables, publications, transactions, the WAL, slots and snapshots. No network."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableName
from subscriber.protocol.capabilities import capabilities
from subscriber.protocol.lsn import INVALID_LSN, POSTGRES_EPOCH, Lsn
from subscriber.protocol.messages import ReplicaIdentity
from subscriber.testing.fake_publisher.backend.parameters import parameters
from subscriber.testing.fake_publisher.publications import Publication, PublishedTable
from subscriber.testing.fake_publisher.replication.filters import bound_filter, check_command, row_passes
from subscriber.testing.fake_publisher.replication.slots import Slot
from subscriber.testing.fake_publisher.replication.snapshots import Snapshot, TableContent
from subscriber.testing.fake_publisher.replication.wal import (
    Abort,
    Commit,
    CommitPrepared,
    Origin,
    Record,
    RollbackPrepared,
    Wal,
    WalContent,
)
from subscriber.testing.fake_publisher.server_errors import ServerError
from subscriber.testing.fake_publisher.tables import FakeColumn, FakeSequence, FakeTable, RowValues, TableShape, Types, table_name
from subscriber.testing.fake_publisher.transactions import FakeTransaction
from subscriber.types import TypeFact

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session

__all__ = ["FakeDatabase"]

_FIRST_OID: Final = 16400


class FakeDatabase:
    """The state of a publisher; see :class:`subscriber.testing.fake_publisher.FakePublisher`."""

    def __init__(self, version: int | str, name: str, *, logical_decoding_work_mem: int, toast_threshold: int, start: Lsn) -> None:
        major, _, minor = str(version).partition(".")
        if not major.isdigit() or not 13 <= int(major) <= 19:
            raise ConfigurationError(f"the fake publisher cannot be PostgreSQL {version}", hint="choose a version from 13 to 19")
        self.version_text = f"{major}.{minor or 4}"
        self.caps = capabilities(int(major) * 10000 + int(minor or 4))
        self.database = name
        self.logical_decoding_work_mem = logical_decoding_work_mem
        self.toast_threshold = toast_threshold
        self.system_identifier = str(7_000_000_000_000_000_000 + time.time_ns() % 10**15)
        self.timeline = 1
        self.timelines: list[tuple[int, Lsn]] = []
        self.types = Types()
        self.tables: dict[TableName, FakeTable] = {}
        self.sequences: dict[TableName, FakeSequence] = {}
        self.publications: dict[str, Publication] = {}
        self.slots: dict[str, Slot] = {}
        self.wal = Wal(start)
        self.exported: dict[str, tuple[Session, Snapshot]] = {}
        self.sessions: dict[int, Session] = {}
        self.settings: dict[str, str] = {}
        self._running: set[FakeTransaction] = set()
        self._outcomes: dict[int, str] = {}
        self._oids = itertools.count(_FIRST_OID)
        self._xids = itertools.count(731)
        self._snapshots = itertools.count(1)
        self._change = asyncio.Event()

    def changed(self) -> None:
        """Wake everyone who waits for a change of slots, sessions, feedback or transactions."""
        self._change.set()
        self._change = asyncio.Event()
        self.wal.wake()

    async def until_changed(self) -> None:
        """Wait for the next change."""
        await self._change.wait()

    # --- definitions

    def create_table(
        self,
        name: str,
        columns: Mapping[str, str],
        *,
        key: Sequence[str] = (),
        not_null: Iterable[str] = (),
        replica_identity: ReplicaIdentity = "d",
        identity_index: Sequence[str] = (),
        generated: Mapping[str, str] | None = None,
    ) -> None:
        """Create a table.

        Args:
            name: ``schema.name``, or a name in schema public.
            columns: their types, as in CREATE TABLE.
            key: the primary key.
            not_null: columns with NOT NULL, besides the primary key.
            replica_identity: ``d``, ``n``, ``f`` or ``i``.
            identity_index: the columns of the index for ``i``.
            generated: ``s`` or ``v`` for generated columns.

        Raises:
            ConfigurationError: it exists, or a type or column does not.
        """
        found = table_name(name)
        if found in self.tables:
            raise ConfigurationError(f'relation "{found}" already exists')
        required = {*key, *not_null, *identity_index}
        made = []
        for number, (column, declaration) in enumerate(columns.items(), 1):
            oid, modifier = self.types.parse(declaration)
            made.append(FakeColumn(column, oid, modifier, column in required, (generated or {}).get(column, ""), number))
        shape = TableShape(next(self._oids), found, tuple(made), tuple(key), replica_identity, tuple(identity_index))
        table = FakeTable(shape)
        table.check_columns(required)
        self.tables[found] = table
        self.wal.advance(256)

    def alter_table(self, name: str, *, add: Mapping[str, str] | None = None, drop: Iterable[str] = ()) -> None:
        """Add and drop columns. New columns are NULL in existing rows.

        Raises:
            ConfigurationError: there is no such table or column, or an open transaction has changed the table.
        """
        table = self.find_table(name)
        shape = table.shape
        dropped = set(drop)
        table.check_columns(dropped)
        if table.locks:
            raise ConfigurationError(f"an open transaction has changed {shape.name}", hint="end it first: the fake publisher does not wait")
        kept = [place for place, column in enumerate(shape.columns) if column.name not in dropped]
        number = max((column.number for column in shape.columns), default=0)
        added = [
            FakeColumn(column, *self.types.parse(declaration), number=number + place)
            for place, (column, declaration) in enumerate((add or {}).items(), 1)
        ]
        columns = (*(shape.columns[place] for place in kept), *added)
        table.shape = TableShape(shape.oid, shape.name, columns, shape.primary_key, shape.replica_identity, shape.identity_index)
        empty = (None,) * len(added)
        table.rows = {row: (*(values[place] for place in kept), *empty) for row, values in table.rows.items()}
        self.wal.advance(256)

    def find_table(self, name: str) -> FakeTable:
        """The table of this name.

        Raises:
            ConfigurationError: there is none.
        """
        found = self.tables.get(table_name(name))
        if found is None:
            raise ConfigurationError(f'relation "{table_name(name)}" does not exist', hint="create it with create_table()")
        return found

    def table_by_oid(self, oid: int) -> FakeTable | None:
        """The table of this oid."""
        return next((table for table in self.tables.values() if table.shape.oid == oid), None)

    def create_publication(
        self,
        name: str,
        *tables: str,
        all_tables: bool = False,
        schemas: Iterable[str] = (),
        columns: Mapping[str, Sequence[str]] | None = None,
        where: Mapping[str, str] | None = None,
        publish: Iterable[str] = ("insert", "update", "delete", "truncate"),
        generated_columns: bool = False,
        except_tables: Iterable[str] = (),
        all_sequences: bool = False,
    ) -> None:
        """Create a publication.

        Args:
            name: its name.
            tables: their names; none with ``all_tables`` or ``schemas``.
            all_tables: FOR ALL TABLES.
            schemas: TABLES IN SCHEMA (15).
            columns: column lists by table (15).
            where: row filters by table (15).
            publish: the operations.
            generated_columns: publish stored generated columns (18).
            except_tables: with ``all_tables``, all but these (19).
            all_sequences: FOR ALL SEQUENCES (19).

        Raises:
            ConfigurationError: a table does not exist, or the version lacks something.
        """
        made = Publication(next(self._oids), name, {}, all_tables, frozenset(schemas), frozenset(publish), generated_columns)
        for table in tables:
            shape = self.find_table(table).shape
            listed = (columns or {}).get(table)
            made.tables[shape.name] = PublishedTable(None if listed is None else tuple(listed), (where or {}).get(table))
        made.except_tables = frozenset(self.find_table(table).shape.name for table in except_tables)
        made.all_sequences = all_sequences
        made.check(self.caps)
        for table, condition in (where or {}).items():
            bound_filter(self.find_table(table).shape, condition, self.types)
        self.publications[name] = made

    def create_sequence(self, name: str, *, last_value: int = 1, is_called: bool = False) -> None:
        """Create a sequence of type bigint.

        Args:
            name: ``schema.name``, or a name in schema public.
            last_value: its last value.
            is_called: whether that was handed out.
        """
        self.sequences[table_name(name)] = FakeSequence(next(self._oids), last_value, is_called)

    def everything(self) -> Sequence[Publication]:
        """A publication of all tables, for plugins that know no publications."""
        return (Publication(0, "", all_tables=True, generated_columns=True),)

    def add_type(self, fact: TypeFact) -> None:
        """Add a type that is not built in."""
        self.types.add(fact)

    # --- transactions

    def transaction(self, *, origin: str | None = None, origin_lsn: Lsn = INVALID_LSN) -> FakeTransaction:
        """A new transaction.

        Args:
            origin: the name of the replication origin, if it was replicated from elsewhere.
            origin_lsn: its position there.
        """
        return FakeTransaction(self, None if origin is None else Origin(origin, origin_lsn, self.now()))

    def rows(self, table: str) -> list[dict[str, str | None]]:
        """The committed rows of a table, as text."""
        return FakeTransaction(self).rows(table)

    def next_xid(self) -> int:
        return next(self._xids)

    def now(self) -> int:
        """Microseconds since the PostgreSQL epoch."""
        return time.time_ns() // 1000 - int(POSTGRES_EPOCH.timestamp()) * 10**6

    def write(self, content: WalContent, *, xid: int = 0, top_xid: int = 0, origin: Origin | None = None) -> Record:
        match content:
            case Commit(subxids) | CommitPrepared(subxids=subxids):
                self._outcomes.update(dict.fromkeys((xid, *subxids), "committed"))
            case Abort(subxids) | RollbackPrepared(subxids=subxids):
                self._outcomes.update(dict.fromkeys((xid, *subxids), "aborted"))
        return self.wal.append(content, xid=xid, top_xid=top_xid, origin=origin)

    def began(self, transaction: FakeTransaction) -> None:
        self._running.add(transaction)

    def ended(self, transaction: FakeTransaction) -> None:
        self._running.discard(transaction)
        self.changed()

    def transaction_status(self, xid: int) -> str | None:
        """``pg_xact_status``: committed, aborted or in progress; None: it is not known."""
        known = self._outcomes.get(xid)
        if known is None and any(xid in transaction.xids for transaction in self._running):
            return "in progress"
        return known

    def oldest_needed(self, confirmed: Lsn) -> Lsn:
        """Where decoding must start, so that it sees every transaction whole that ends after ``confirmed``."""
        return min([confirmed, *(self._first_of_later(confirmed))])

    def _first_of_later(self, confirmed: Lsn) -> list[Lsn]:
        first: dict[int, Lsn] = {}
        for record in self.wal:
            if record.top_xid:
                first.setdefault(record.top_xid, record.start)
        later = {record.top_xid for record in self.wal.since(confirmed) if record.top_xid}
        running = [transaction.first_lsn for transaction in self._running if transaction.first_lsn is not None]
        return [first[xid] for xid in later] + running

    # --- slots

    def slot(self, name: str, database: str | None = None) -> Slot:
        """The slot of this name.

        Raises:
            ServerError: it does not exist, or belongs to another database.
        """
        found = self.slots.get(name)
        if found is None:
            raise ServerError("42704", f'replication slot "{name}" does not exist')
        if database is not None and found.database != database:
            raise ServerError("0A000", "replication slot was not created in this database")
        return found

    async def create_slot(
        self,
        name: str,
        plugin: str = "pgoutput",
        *,
        temporary: bool = False,
        two_phase: bool = False,
        failover: bool = False,
        owner: Session | None = None,
    ) -> Slot:
        """Create a slot. Waits for the transactions that are running, prepared ones included, as a server does."""
        self.require_free(name)
        awaited = set(self._running)
        began = self.wal.end
        while awaited & self._running:
            if owner is not None and owner.cancelled.is_set():
                raise ServerError("57014", "canceling statement due to user request")
            await self.until_changed()
        self.require_free(name)
        end = self.wal.end
        slot = Slot(name, plugin, self.database, min(began, end), end, temporary, two_phase, end if two_phase else None, failover)
        slot.owner_pid = 0 if owner is None else owner.pid
        self.slots[name] = slot
        self.changed()
        return slot

    def require_free(self, name: str) -> None:
        if name in self.slots:
            raise ServerError("42710", f'replication slot "{name}" already exists')

    def invalidate_slot(self, name: str, reason: str = "wal_removed") -> None:
        """Invalidate a slot. A walsender that uses it is ended."""
        self.slot(name).invalidation_reason = reason
        self.wal.wake()
        self.changed()

    def drop_slot(self, name: str) -> None:
        """Remove a slot, even if it is in use."""
        del self.slots[name]
        self.wal.wake()
        self.changed()

    def promote(self) -> None:
        """Continue on a new timeline, as a standby that was promoted. Connections are not ended: call :meth:`close` and :meth:`start`."""
        self.timelines.append((self.timeline, self.wal.end))
        self.timeline += 1

    # --- snapshots

    def snapshot(self, name: str) -> Snapshot:
        """The committed rows as of now."""
        return Snapshot(name, {table.shape.oid: TableContent(table.shape, tuple(table.rows.values())) for table in self.tables.values()})

    def export_snapshot(self, session: Session) -> str:
        """Export a snapshot until the session runs another command; return its name."""
        name = f"00000003-{next(self._snapshots):08X}-1"
        self.exported[name] = session, self.snapshot(name)
        return name

    def imported_snapshot(self, name: str) -> Snapshot:
        """An exported snapshot.

        Raises:
            ServerError: it does not exist any more.
        """
        session, snapshot = self.exported.get(name, (None, None))
        if session is None or snapshot is None or session.exported != name or session.pid not in self.sessions:
            state = "42704" if self.caps.at_least(17) else "22023"
            text = f'snapshot "{name}" does not exist' if self.caps.at_least(17) else f'invalid snapshot identifier: "{name}"'
            raise ServerError(state, text)
        return snapshot

    # --- settings

    def parameter(self, session: Session, name: str) -> str:
        """The value of a run-time parameter.

        Raises:
            ServerError: there is no such parameter.
        """
        found = parameters(self, session).get(name.lower())
        if found is None:
            raise ServerError("42704", f'unrecognized configuration parameter "{name}"')
        return found

    def knows_parameter(self, session: Session, name: str) -> bool:
        """Whether there is a parameter of this name."""
        return name.lower() in parameters(self, session)

    def passes(self, shape: TableShape, where: str, row: RowValues) -> bool:
        """Whether a row passes a filter."""
        return row_passes(shape, where, row, self.types)

    def check_command(self, shape: TableShape, operation: Literal["update", "delete"]) -> None:
        """Check that the publications allow an UPDATE or DELETE of a table.

        Raises:
            ConfigurationError: they do not.
        """
        check_command(shape, operation, self.publications.values(), self.types)
