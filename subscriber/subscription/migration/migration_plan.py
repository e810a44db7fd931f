"""``migrate --dry-run``: what a migration would move, how long it may take, and what would keep it from working. It changes nothing.

Free space is known only if the target's data directory is on this machine: no function of PostgreSQL tells it. The time is estimated from a
sample of the largest table, which is copied into a temporary table of texts, and rolled back.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.interfaces import CopyFormat, TableName
from subscriber.printable import counted
from subscriber.protocol.quoting import quote_literal
from subscriber.sinks.postgres.scripts import ScriptSession
from subscriber.subscription.management.schema import check_client_programs
from subscriber.subscription.management.unmoved import unmoved_objects
from subscriber.subscription.migration.copy_estimate import shown_bytes, shown_seconds
from subscriber.subscription.migration.preconditions import disk_problem, schema_problems
from subscriber.subscription.migration.spec import APPLICATION, MigrationSpec
from subscriber.subscription.targets import is_postgres, open_target
from subscriber.walreceiver.checks import decoding_problems
from subscriber.walreceiver.copying.snapshot import SnapshotReader
from subscriber.walreceiver.new_publication import planned_tables
from subscriber.walreceiver.session import Session
from subscriber.walreceiver.table_sizes import TableSize, table_sizes

__all__ = ["MigrationPlan", "plan_migration"]

_SHOWN: Final = 10
_SAMPLE_SECONDS: Final = 5.0
_SAMPLE_BYTES: Final = 64 * 1024**2
_GIGABYTE: Final = 1024**3

_SOURCE_SETTINGS: Final = """
SELECT pg_catalog.current_setting('max_slot_wal_keep_size', true), pg_catalog.current_setting('idle_replication_slot_timeout', true),
       pg_catalog.current_setting('max_replication_slots')::int - (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_slots),
       pg_catalog.current_setting('max_wal_senders')::int - (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_replication)
"""
_TARGET_SETTINGS: Final = """
SELECT pg_catalog.pg_size_bytes(pg_catalog.current_setting('max_wal_size'))::text,
       pg_catalog.pg_size_bytes(pg_catalog.current_setting('maintenance_work_mem'))::text
"""
_LEVEL: Final = "SELECT pg_catalog.current_setting('wal_level')"


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan:
    """What a migration would do.

    Attributes:
        tables: that are moved, the largest first.
        problems: what must be corrected before.
        notes: settings that should change, and what is not known.
        not_moved: what will not be moved.
        rate: bytes per second of the sample copy; None: there are no rows.
        sessions: how many tables are copied at once.
    """

    tables: Mapping[TableName, TableSize]
    problems: Sequence[SubscriberError] = ()
    notes: Sequence[str] = ()
    not_moved: Sequence[str] = ()
    rate: float | None = None
    sessions: int = 1

    def lines(self) -> list[str]:
        """The plan for people, without the problems."""
        total, indexes = sum(each.bytes for each in self.tables.values()), sum(each.index_bytes for each in self.tables.values())
        rows = sum(each.rows or 0 for each in self.tables.values())
        sizes = f"{shown_bytes(total)}, and {shown_bytes(indexes)} of indexes on the publisher"
        lines = [f"{counted(len(self.tables), 'table')} with about {counted(rows, 'row')}: {sizes}"]
        for name, size in list(self.tables.items())[:_SHOWN]:
            known = f"about {size.rows:,} rows" if size.rows is not None else "unknown number of rows (ANALYZE)"
            lines.append(f"  {name}: {shown_bytes(size.bytes)}, {known}, {shown_bytes(size.index_bytes)} of indexes")
        if len(self.tables) > _SHOWN:
            lines.append(f"  and {len(self.tables) - _SHOWN:,} smaller tables")
        if self.rate is not None:
            fast, slow = total / self.rate / self.sessions, total / self.rate
            lines.append(
                f"the copy takes about {shown_seconds(fast)} to {shown_seconds(slow)}: one session copied {shown_bytes(self.rate)}/s"
                f" of a sample, and {self.sessions} run at once; indexes and the comparison take more, and are not estimated"
            )
        return [*lines, *self.notes, *(f"not moved: {line}" for line in self.not_moved)]


async def plan_migration(spec: MigrationSpec) -> MigrationPlan:
    """Look at both servers.

    Raises:
        ConfigurationError: the target is not PostgreSQL; no table matches; the publication exists, and its tables cannot be chosen.
        PublisherError, TargetError: a server cannot be reached or queried.
    """
    if not is_postgres(spec.target):
        raise ConfigurationError("--dry-run is for a PostgreSQL target", hint="use `subscriber check`")
    problems = list[SubscriberError]()
    try:
        await check_client_programs(connection=spec.connection, target=spec.target, options=spec.schema)
    except ConfigurationError as error:
        problems.append(error)
    async with (
        await spec.publisher() as publisher,
        await ScriptSession.open(spec.target, APPLICATION) as session,
    ):
        oids, lacking = await planned_tables(publisher, spec.publication, spec.choice)
        problems += lacking
        problems += [ConfigurationError(message, hint=hint) for message, hint in await decoding_problems(publisher, "on the publisher")]
        tables = await table_sizes(publisher, oids)
        problems += [
            ConfigurationError(f'the role may not read table "{table}"', hint="GRANT SELECT, and USAGE on its schema, to it")
            for table, size in tables.items()
            if not size.readable
        ]
        problems += await schema_problems(publisher, session, spec.schema)
        findings = await open_target(spec.target, spec.options, spec.settings).check([], two_phase=spec.options.two_phase)
        problems += [ConfigurationError(each.message, hint=each.hint) for each in findings if each.severity == "error"]
        sessions = spec.settings.max_sync_workers_per_subscription
        notes = await setting_notes(publisher, session, tables, sessions)
        small, line = await disk_problem(session, tables)
        problems += [small] if small is not None else []
        rate = await sample_rate(spec.connection, session, tables)
        return MigrationPlan(
            tables=tables,
            problems=problems,
            notes=[line, *notes],
            not_moved=await unmoved_objects(publisher.execute, oids, spec.publication, spec.publication, spec.schema),
            rate=rate,
            sessions=min(sessions, max(len(tables), 1)),
        )


async def setting_notes(publisher: Session, target: ScriptSession, tables: Mapping[TableName, TableSize], sessions: int) -> list[str]:
    """Settings of both servers that should change for the migration, as lines for people."""
    total = sum(each.bytes for each in tables.values())
    indexes = sum(each.index_bytes for each in tables.values())
    notes = []
    ((kept, idle, slots, senders),) = await publisher.execute(_SOURCE_SETTINGS)
    if kept not in {None, "-1"}:
        notes.append(
            f"publisher: max_slot_wal_keep_size is {kept}: the slot is lost, and the migration with it, if more WAL is written while"
            " tables are copied; set it to -1, and watch the disk"
        )
    if idle not in {None, "0"}:
        notes.append(f"publisher: idle_replication_slot_timeout is {idle}: set it to 0, so that a pause does not end the migration")
    needed = sessions + 1
    for name, free in (("max_replication_slots", slots), ("max_wal_senders", senders)):
        if int(free or 0) < needed:
            notes.append(f"publisher: {name} leaves {int(free or 0)} free, and {needed} are used: raise it by {needed - int(free or 0)}")
    ((wal, memory),) = await target.query(_TARGET_SETTINGS)
    if total > 4 * int(wal or 0) and int(wal or 0) < 16 * _GIGABYTE:
        notes.append(f"target: max_wal_size is {shown_bytes(int(wal or 0))}: 16GB or more until it is ready means fewer checkpoints")
    if indexes > _GIGABYTE and int(memory or 0) < _GIGABYTE:
        notes.append(f"target: maintenance_work_mem is {shown_bytes(int(memory or 0))}: 1GB or more builds indexes faster")
    ((level,),) = await target.query(_LEVEL)
    if level != "logical":
        notes.append(f'target: wal_level is "{level}": a way back after the cutover needs logical, and a restart')
    return notes


async def sample_rate(conninfo: str, target: ScriptSession, tables: Mapping[TableName, TableSize]) -> float | None:
    """Copy rows of the largest table that the role may read into a temporary table, for some seconds.

    Returns:
        The bytes per second, as the publisher stores them; None: there are no rows.

    Raises:
        PublisherError, TargetError: a server rejected it.
    """
    name, size = next(((name, size) for name, size in tables.items() if size.readable and size.rows), (None, None))
    if name is None or size is None or not size.rows:
        return None
    relation = name.quoted
    async with await SnapshotReader.connect(conninfo, application_name="subscriber migrate") as reader:
        reader.reads_rows = True
        ((columns,),) = await reader.execute(
            "SELECT pg_catalog.count(*) FROM pg_catalog.pg_attribute"  # noqa: S608
            f" WHERE attrelid = {quote_literal(relation)}::pg_catalog.regclass AND attnum > 0 AND NOT attisdropped"
        )
        read = _Sample()
        began = time.monotonic()
        query = f"COPY (SELECT * FROM {relation}) TO STDOUT"  # noqa: S608 (quoted)
        rows = reader.copy_out(query, CopyFormat.TEXT, read.add)
        try:
            await target.try_copy(int(columns or 0), read.limited(rows, began))
        finally:
            await rows.aclose()
    return read.rows / max(time.monotonic() - began, 1e-3) * size.bytes / size.rows


class _Sample:
    """The rows of a sample."""

    def __init__(self) -> None:
        self.rows = 0

    def add(self, rows: int) -> None:
        self.rows += rows

    async def limited(self, pieces: AsyncIterator[bytes], began: float) -> AsyncIterator[bytes]:
        """The first pieces."""
        read = 0
        async for piece in pieces:
            yield piece
            read += len(piece)
            if read >= _SAMPLE_BYTES or time.monotonic() - began >= _SAMPLE_SECONDS:
                return
